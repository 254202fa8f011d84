// How decode's list of work is cut (kernels/decode/work_list.h): every place has one block, the parts of a unit are as
// many as its first block says, each finds the slot that its block gives it, and only the last to arrive, in any order,
// takes itself for the last. Lists of a few places to 2^60, and units of one length. usage: fuzz_work_list COUNT
// [SEED]. Exit status 1 and a line on stderr at the first failure.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/decode/work_list.h"

namespace turboattn::decode {
namespace {

void Check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz_work_list: %s\n", what);
  std::exit(1);
}

void Fuzz(std::mt19937_64& random) {
  const auto in = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
  };
  const int grid = static_cast<int>(in(1, 512));
  const int units = static_cast<int>(in(1, int64_t{1} << in(0, 20)));
  const bool even = in(0, 1) != 0 && EvenCut::Of(units, grid).units > 0;
  const int start = static_cast<int>(in(0, 23));
  const int64_t unit = in(1, int64_t{1} << in(0, 40)), places = start + unit;
  const int64_t total = even ? units * places : in(0, int64_t{1} << in(0, 60));
  const EvenCut cut = EvenCut::Of(units, grid);
  const WorkList list(total, grid, start, cut, even);
  // A block's places, and those that have keys.
  int64_t longest = list.each + (list.left > 0 ? 1 : 0) + list.start, longest_keys = longest - list.start;
  if (list.chunk == total && list.start == 0) {
    Check(list.blocks == std::min<int64_t>(total, grid), "blocks that have work");
  } else {
    if (cut.block_units > 1) longest_keys = cut.block_units * unit;
    Check(even && list.blocks <= grid, "more blocks than there are");
    Check((longest_keys - std::min(longest_keys / 16 + 1, WorkList::kMaxUneven)) * grid <= units * unit,
          "a block too long");
  }
  if (total == 0) return;
  const auto begin_of = [&](int block) {
    int64_t begin, end;
    list.Range(block, cut, &begin, &end);
    return begin;
  };
  const auto end_of = [&](int block) {
    int64_t begin, end;
    list.Range(block, cut, &begin, &end);
    return end;
  };
  Check(begin_of(0) == 0 && end_of(list.blocks - 1) == total, "the ends of the list");
  for (int block = 0; block < list.blocks; ++block) {
    const int64_t begin = begin_of(block), end = end_of(block);
    Check(block == 0 || begin == end_of(block - 1), "places without a block, or with two");
    Check(begin < end && end - begin <= longest, "a block's share");
    if (list.chunk < total || list.start > 0) {
      const int64_t at = begin % places, keys = end - begin - std::max(start - at, int64_t{0});
      Check(at == 0 || begin / places == (end - 1) / places, "parts of two units");
      Check(at == 0 || at > start, "a part that begins in a unit's start");
      Check(cut.block_units > 1 || (keys > 0 && keys <= longest_keys), "keys of a part");
    }
    Check(list.BlockOf(begin) == block && list.BlockOf(end - 1) == block, "the block of a place");
  }
  // A unit of some blocks of keys, as the kernel's blocks walk over it.
  const int64_t first = in(0, total - 1), length = in(1, total - first);
  const int owner = list.BlockOf(first), parts = list.BlockOf(first + length - 1) - owner + 1;
  const int64_t slot = 2 * owner + 1;
  std::vector<int> order(parts);
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), random);
  uint64_t word = ArrivalWord::kBegun;
  for (int i = 0; i < parts; ++i) {
    word += ArrivalWord::Of(order[i] == 0 ? parts : 0);
    Check(ArrivalWord::HasBegun(word) && ArrivalWord::IsLast(word) == (i == parts - 1), "who is the last to arrive");
  }
  Check(ArrivalWord::Parts(word) == parts, "parts that have arrived");
  int part = 0;
  for (int64_t place = first; place < first + length; ++part) {
    const int block = owner + part;
    Check(part < parts && block < list.blocks, "more parts than the first block says");
    Check(place >= begin_of(block) && place < end_of(block), "a part in another block");
    Check(SlotOfPart(slot, part, false) == 2 * block + (part == 0 ? 1 : 0), "the slot of a part");
    Check(SlotOfPart(slot, part, true) == slot + part, "the slot of a fixed part");
    place = std::min(end_of(block), first + length);
  }
  Check(part == parts, "fewer parts than the first block says");
}

}  // namespace
}  // namespace turboattn::decode

int main(int argc, char** argv) {
  const int64_t count = argc > 1 ? std::atoll(argv[1]) : 500;
  std::mt19937_64 random(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0);
  for (int64_t i = 0; i < count; ++i) turboattn::decode::Fuzz(random);
  std::printf("fuzz_work_list: %lld lists\n", static_cast<long long>(count));
  return 0;
}

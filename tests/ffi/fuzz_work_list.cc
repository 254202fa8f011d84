// How decode's list of work is cut (kernels/decode/work_list.h): every place has one block, the parts of a unit are as
// many as its first block says, and each finds the slot that its block gives it. Lists of a few places to 2^60.
// usage: fuzz_work_list COUNT [SEED]. Exit status 1 and a line on stderr at the first failure.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>

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
  const int64_t total = in(0, int64_t{1} << in(0, 60));
  const WorkList list(total, grid);
  Check(list.blocks == std::min<int64_t>(total, grid), "blocks that have work");
  Check(list.Begin(0) == 0 && list.Begin(list.blocks) == total, "the ends of the list");
  for (int block = 0; block < list.blocks; ++block) {
    const int64_t begin = list.Begin(block), end = list.Begin(block + 1);
    Check(begin < end && end - begin - total / list.blocks <= 1, "a block's share");
    Check(list.BlockOf(begin) == block && list.BlockOf(end - 1) == block, "the block of a place");
  }
  if (total == 0) return;
  // A unit of some blocks of keys, as the kernel's blocks walk over it.
  const int64_t first = in(0, total - 1), length = in(1, total - first);
  const int owner = list.BlockOf(first), parts = list.BlockOf(first + length - 1) - owner + 1;
  const int64_t slot = 2 * owner + 1;
  int part = 0;
  for (int64_t place = first; place < first + length; ++part) {
    const int block = owner + part;
    Check(part < parts && block < list.blocks, "more parts than the first block says");
    Check(place >= list.Begin(block) && place < list.Begin(block + 1), "a part in another block");
    Check(SlotOfPart(slot, part, false) == 2 * block + (part == 0 ? 1 : 0), "the slot of a part");
    Check(SlotOfPart(slot, part, true) == slot + part, "the slot of a fixed part");
    place = std::min(list.Begin(block + 1), first + length);
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

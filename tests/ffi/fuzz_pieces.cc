// How prefill cuts long tiles in pieces (kernels/prefill/pieces.h): they fit the workspace, cost no more than whole
// tiles, and each has a place of its own. Sequences of a block to 2^24, alike or not, and some examples. usage:
// fuzz_pieces COUNT [SEED]. Exit status 1 and a line on stderr at the first failure.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <vector>

#include "kernels/prefill/pieces.h"

namespace turboattn::prefill {
namespace {

void Check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz_pieces: %s\n", what);
  std::exit(1);
}

struct Sequence {
  int tiles;   // of a head
  int blocks;  // of a tile
};

// The longest piece of the best cut, beside other tiles.
int Best(const std::vector<Sequence>& long_ones, float others, float other_blocks, int heads, int sms, int step) {
  CallTiles call;
  call.others = others;
  call.blocks = other_blocks;
  for (const Sequence& sequence : long_ones) {
    const int tiles = sequence.tiles * heads;
    call.long_tiles += tiles;
    call.blocks += static_cast<float>(tiles) * static_cast<float>(sequence.blocks);
    call.longest = std::max(call.longest, sequence.blocks);
  }
  const auto tiles_of = [&](int i) { return long_ones[i].tiles * heads; };
  const auto blocks_of = [&](int i) { return long_ones[i].blocks; };
  int64_t best = INT64_MAX;
  for (int first = 2; first < 2 + step; ++first) {
    best = std::min(best, BestPieces(call, static_cast<int>(long_ones.size()), tiles_of, blocks_of, sms, first, step));
  }
  Check(best >> 32 <= CostOfPieces(call, call.long_tiles, call.longest, 1, sms), "pieces cost more than whole tiles");
  return static_cast<int>(best & INT32_MAX);
}

// Every other tile has one SM.
void CheckOthers(const OtherTiles& others, int count, int sms) {
  std::vector<int> owners(count, 0);
  const auto take = [&](int64_t number) {
    if (number < count) ++owners[number];
  };
  for (int sm = 0; sm < sms; ++sm) {
    const int filler = sm - others.first_idle;
    for (int i = 0; i < others.each && filler >= 0 && filler < others.idle; ++i) take(others.idle * i + filler);
    for (int64_t item = sm; item < count; item += sms) take(int64_t{others.idle} * others.each + item);
  }
  Check(std::all_of(owners.begin(), owners.end(), [](int n) { return n == 1; }), "another tile without an SM, or two");
  Check(others.idle >= 0 && others.first_idle + others.idle <= sms, "SMs that there are not");
}

// Returns whether tiles were cut.
bool Fuzz(std::mt19937_64& random) {
  const auto in = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(random() % static_cast<uint64_t>(high - low + 1));
  };
  const int sms = static_cast<int>(in(1, kPrefillSms)), heads = static_cast<int>(in(1, 8));
  const int most = 1 << in(0, 24);
  std::vector<Sequence> all(in(1, 100)), long_ones;
  float all_blocks = 0.f;
  for (Sequence& sequence : all) {
    sequence = {static_cast<int>(in(1, in(0, 3) == 0 ? 50 : 3)), static_cast<int>(in(1, in(0, 3) == 0 ? most : 9))};
    all_blocks += static_cast<float>(sequence.tiles * heads) * static_cast<float>(sequence.blocks);
  }
  int64_t tiles = 0;
  for (const Sequence& sequence : all) {
    if (!IsLong(sequence.blocks, all_blocks, sms)) continue;
    long_ones.push_back(sequence);
    tiles += sequence.tiles * heads;
  }
  Check(tiles <= 2 * sms, "more long tiles than have a place");
  if (tiles == 0) return false;
  float other_tiles = 0.f, other_blocks = 0.f;
  for (const Sequence& sequence : all) {
    if (IsLong(sequence.blocks, all_blocks, sms)) continue;
    other_tiles += static_cast<float>(sequence.tiles * heads);
    other_blocks += static_cast<float>(sequence.tiles * heads) * static_cast<float>(sequence.blocks);
  }
  const int length = Best(long_ones, other_tiles, other_blocks, heads, sms, 1);
  Check(length == Best(long_ones, other_tiles, other_blocks, heads, sms, 32),
        "lanes that try other pieces each find another cut");
  std::vector<int> owners(kMaxPrefillParts, -1);
  int longest = 0, first = 0, tile = 0;
  for (const Sequence& sequence : long_ones) {
    const int pieces = PiecesOf(sequence.blocks, length), end = first + sequence.tiles * heads * pieces;
    longest = std::max(longest, sequence.blocks);
    for (int number = 0; first + number < end; ++number) {
      const PiecePlace at(number, sequence.tiles, pieces);
      Check(at.head < heads && at.tile < sequence.tiles && at.place < pieces, "a piece of no tile");
      const int begin = first + at.head * sequence.tiles * pieces + at.tile;  // of the tile's first piece
      Check(first + number == begin + at.place * sequence.tiles, "where a tile's pieces are");
      Check(at.place == 0 || owners[begin] == tile + at.head * sequence.tiles + at.tile, "pieces of other tiles");
      owners[first + number] = tile + at.head * sequence.tiles + at.tile;
    }
    first = end;
    tile += sequence.tiles * heads;
  }
  CallTiles call;
  call.others = other_tiles;
  call.blocks = all_blocks;
  CheckOthers(OtherTiles(call, first, length, all_blocks - other_blocks, sms), static_cast<int>(other_tiles), sms);
  return length < longest;
}

// `tiles` tiles of `blocks` each are cut in so many pieces on a card of 132 SMs.
void Example(int tiles, int blocks, int pieces) {
  const int found = PiecesOf(blocks, Best({{tiles, blocks}}, 0.f, 0.f, 1, 132, 32));
  if (found == pieces) return;
  std::fprintf(stderr, "%d tiles of %d blocks: %d pieces, not %d\n", tiles, blocks, found, pieces);
  Check(false, "an example");
}

}  // namespace
}  // namespace turboattn::prefill

int main(int argc, char** argv) {
  const int64_t count = argc > 1 ? std::atoll(argv[1]) : 500;
  std::mt19937_64 random(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0);
  // One round, then two to four; 100 tiles of 32 blocks are best left whole.
  const int examples[][3] = {{32, 1024, 4},  {66, 1024, 2},  {8, 1024, 16},  {1, 1024, 128}, {48, 1024, 11},
                             {48, 64, 5},    {48, 32, 2},    {100, 1024, 5}, {100, 32, 1},   {132, 1024, 1},
                             {264, 1024, 1}, {140, 1024, 3}, {32, 4, 1},     {1, 7, 1},      {1, 8, 2}};
  for (const auto& example : examples) turboattn::prefill::Example(example[0], example[1], example[2]);
  int64_t cuts = 0;
  for (int64_t i = 0; i < count; ++i) cuts += turboattn::prefill::Fuzz(random);
  turboattn::prefill::Check(cuts > count / 10, "hardly any call is cut");
  std::printf("fuzz_pieces: %lld calls, %lld cut\n", static_cast<long long>(count), static_cast<long long>(cuts));
  return 0;
}

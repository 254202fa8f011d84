// How the keys of long tiles are cut in pieces, which the SMs of a card share out. Pure functions of sizes, for the
// host's tests too.
#ifndef TURBOATTN_KERNELS_PREFILL_PIECES_H_
#define TURBOATTN_KERNELS_PREFILL_PIECES_H_

#include <cstdint>

#include "core/heuristics.h"
#include "kernels/common/page_walk.h"

namespace turboattn::prefill {

// What tiles, or pieces of tiles, cost an SM: blocks of keys, 1.7 us each on an H100, and kStart for the start, the end
// and the memory that a piece takes.
constexpr int kStart = 3;
TA_HD float CostOf(float tiles, float blocks) { return blocks + kStart * tiles; }

// Whether a tile of so many blocks of keys would take an SM more than half of the time that all tiles take if they are
// shared out evenly. There are fewer than 2 * sms such tiles. Others are not worth a search.
constexpr int kMinLong = 9;
TA_HD bool IsLong(int blocks, float all_blocks, int sms) {
  return blocks >= kMinLong && 2.f * static_cast<float>(blocks) * static_cast<float>(sms) > all_blocks;
}

// Pieces of a tile, of `most` blocks or fewer. They are equal, and pieces of tiles that read the same keys run side by
// side: shares that ended at any block read them from memory again, 1 x (128 on 131072) in 510 us instead of 440.
TA_HD int PiecesOf(int blocks, int most) { return (blocks + most - 1) / most; }

// The long tiles of a call, and all others together.
struct CallTiles {
  int64_t long_tiles = 0;
  int longest = 0;  // blocks of a tile
  float others = 0.f;
  float blocks = 0.f;  // of all
};

// What a call costs with the long tiles in so many pieces. SMs take a piece each, in rounds; other tiles fill the last
// one up. of_longest: of the longest tile. Merging costs kMerge, and 1 for each kMergeRate pieces of a tile, which a
// warp reads one after the other.
TA_HD int64_t CostOfPieces(const CallTiles& call, int64_t pieces, int most, int of_longest, int sms) {
  constexpr int kMerge = 2, kMergeRate = 16;
  const int64_t rounds = (pieces + sms - 1) / sms * (most + kStart);
  const int64_t even =
      static_cast<int64_t>(CostOf(call.others + static_cast<float>(pieces), call.blocks) / static_cast<float>(sms));
  return (rounds > even ? rounds : even) + (of_longest > 1 ? kMerge + of_longest / kMergeRate : 0);
}

// The best cut of those that make `first`, first + step ... pieces of the longest tile, and of none: its cost in the
// high half, the blocks of a piece in the low one, so that the least is the best. Sequence i has tiles(i) long tiles,
// of blocks(i).
template <class Tiles, class Blocks>
TA_HD int64_t BestPieces(const CallTiles& call, int sequences, Tiles tiles, Blocks blocks, int sms, int first,
                         int step) {
  constexpr int kMinBlocks = 4;
  const int longest = call.longest, last = sms < longest / kMinBlocks ? sms : longest / kMinBlocks;
  int64_t best = CostOfPieces(call, call.long_tiles, longest, 1, sms) << 32 | longest;
  for (int of_longest = first; of_longest <= last; of_longest += step) {
    const int most = PiecesOf(longest, of_longest);
    int64_t pieces = 0;
    for (int i = 0; i < sequences; ++i) pieces += int64_t{tiles(i)} * PiecesOf(blocks(i), most);
    const int64_t cut = CostOfPieces(call, pieces, most, of_longest, sms) << 32 | most;
    if (pieces <= kMaxPrefillParts && cut < best) best = cut;
  }
  return best;
}

// Which of the other tiles an SM takes, by their numbers: those that have no piece in the last round take up to `each`
// first, all others then follow from SM to SM.
struct OtherTiles {
  int first_idle = 0, idle = 0, each = 0;  // SMs first_idle, first_idle + 1 ...

  OtherTiles() = default;
  TA_HD OtherTiles(const CallTiles& call, int pieces, int most, float long_blocks, int sms) {
    first_idle = pieces % sms;
    if (first_idle == 0 || call.others < 1.f) return;
    idle = sms - first_idle;
    const float cost = CostOf(call.others, call.blocks - long_blocks) / call.others;
    const float room = static_cast<float>(most + kStart) / cost, share = call.others / static_cast<float>(idle) + 1.f;
    each = static_cast<int>(room < share ? room : share);
  }
};

// Piece `number` of a sequence whose kv heads have `tiles` tiles each, of `pieces` pieces: by head and place in the
// keys, so that the pieces of a tile are `tiles` numbers apart.
struct PiecePlace {
  int head, place, tile;

  TA_HD PiecePlace(int number, int tiles, int pieces) {
    head = number / (tiles * pieces);
    const int rest = number - head * tiles * pieces;
    place = rest / tiles;
    tile = rest - place * tiles;
  }
};

}  // namespace turboattn::prefill

#endif  // TURBOATTN_KERNELS_PREFILL_PIECES_H_

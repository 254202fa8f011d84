// The flat list of decode work, cut over the grid: which of its places a block has, and in how many parts it leaves a
// unit. A unit has `start` places for what its start costs, which nobody works on, then one for each block of its keys.
// Pure functions of sizes, for the host's tests too.
#ifndef TURBOATTN_KERNELS_DECODE_WORK_LIST_H_
#define TURBOATTN_KERNELS_DECODE_WORK_LIST_H_

#include <cstdint>

#include "kernels/common/page_walk.h"

namespace turboattn::decode {

// How a grid would be cut over `units` units of one length, before that length is known. Without divisions on the
// device, whose instructions a block would wait for at its start.
struct EvenCut {
  static constexpr int64_t kMaxUnit = int64_t{1} << 22;  // places; Fraction() is exact for them, of up to 2^10 blocks

  int units = 0;        // 0: too many, or not asked for
  int chunks;           // of block_units units each, but for the last
  int block_units;      // of a block. 1: ...
  int unit_blocks;      // ... a unit has so many blocks, if it has as many places
  uint32_t reciprocal;  // of unit_blocks, times 2^32 and rounded up
  uint32_t inverse;     // of units / 2^shift, an odd number, modulo 2^32
  int shift;

  static EvenCut Of(int64_t units, int grid) {
    EvenCut cut = {};
    if (units == 0 || units > (1 << 30) || grid > 1024) return cut;
    cut.units = static_cast<int>(units);
    cut.block_units = (cut.units + grid - 1) / grid;
    cut.chunks = (cut.units + cut.block_units - 1) / cut.block_units;
    cut.unit_blocks = cut.units <= grid ? grid / cut.units : 1;
    if (cut.chunks * cut.unit_blocks < grid - grid / 16) return {};  // too few blocks would have work
    cut.reciprocal = static_cast<uint32_t>(((int64_t{1} << 32) + cut.unit_blocks - 1) / cut.unit_blocks);
    while ((units >> cut.shift) % 2 == 0) ++cut.shift;
    const uint32_t odd = static_cast<uint32_t>(units >> cut.shift);
    cut.inverse = odd;  // right in 3 bits, and each step doubles them
    for (int step = 0; step < 4; ++step) cut.inverse *= 2 - odd * cut.inverse;
    return cut;
  }
  // total / units, which leaves no rest.
  TA_HD uint32_t Unit(uint32_t total) const { return (total >> shift) * inverse; }
  // x / unit_blocks, rounded down.
  TA_HD uint32_t Fraction(uint32_t x) const {
    return unit_blocks == 1 ? x : static_cast<uint32_t>(uint64_t{x} * reciprocal >> 32);
  }
};

// `total` places over as many blocks of the grid as have one. Each chunk_blocks blocks share `chunk` places, the first
// `left` of them have one more than the others, and the first one the `start` places besides. 64 bits: ranges that
// overlap claim rows again and again.
struct WorkList {
  // bf16, H200: 64 x 4096, 4 places more, 245.4 us and cut equally 247.0; 128 x 8192, 16 more, 953 and 943.
  static constexpr int64_t kMaxUneven = 8;

  int64_t total;
  int blocks;  // that have places
  int64_t chunk;
  int chunk_blocks;
  int start;  // 0 where the list is one chunk
  int64_t each;
  int left;

  // One chunk, or where all of the cut's units are equally long, whole units a block or whole blocks a unit: no block
  // then has parts of two units, whose starts and ends cost more than a place or two. Not where the longest block would
  // have a sixteenth more places than an equal share, and one, or more than kMaxUneven.
  // Equal parts of a unit have equal numbers of its keys: each has a start.
  TA_HD WorkList(int64_t total, int grid, int start, const EvenCut& cut, bool all_even) : total(total), start(start) {
    if (all_even && total > 0 && total <= INT32_MAX) {
      // In 32 bits: a chunk has no more places than the list.
      const uint32_t start32 = static_cast<uint32_t>(start), all = static_cast<uint32_t>(total);
      const uint32_t places = cut.Unit(all), unit = places - start32;
      const uint32_t unit_blocks = static_cast<uint32_t>(cut.unit_blocks);
      const uint32_t block_units = static_cast<uint32_t>(cut.block_units);
      const uint32_t of_chunk = unit < unit_blocks ? unit : unit_blocks, keys_of_chunk = places * block_units - start32;
      const uint32_t share = unit < unit_blocks ? 1 : block_units > 1 ? keys_of_chunk : cut.Fraction(unit);
      const uint32_t longer = keys_of_chunk - share * of_chunk;
      const uint32_t keys = all - static_cast<uint32_t>(cut.units) * start32;
      const uint32_t longest = block_units > 1 ? unit * block_units : share + (longer > 0 ? 1 : 0);
      const uint32_t most = kMaxUneven, uneven = longest / 16 + 1 < most ? longest / 16 + 1 : most;
      chunk_blocks = static_cast<int>(of_chunk);
      blocks = cut.chunks * chunk_blocks;
      chunk = places * block_units;
      each = share;
      left = static_cast<int>(longer);
      if (unit < EvenCut::kMaxUnit && uint64_t{longest - uneven} * static_cast<uint32_t>(grid) <= keys) return;
    }
    this->start = 0;
    blocks = total < grid ? static_cast<int>(total) : grid;
    chunk = total;
    chunk_blocks = blocks;
    each = blocks == 0 ? 0 : Divide(total, blocks);
    left = static_cast<int>(total - each * blocks);
  }

  // The places of one of its blocks.
  TA_HD void Range(int block, const EvenCut& cut, int64_t* begin, int64_t* end) const {
    const int c = block < chunk_blocks              ? 0
                  : chunk_blocks == cut.unit_blocks ? static_cast<int>(cut.Fraction(static_cast<uint32_t>(block)))
                                                    : block / chunk_blocks;
    const int r = block - c * chunk_blocks;
    if (total <= INT32_MAX) {  // places have 31 bits, and what is past the end of the last chunk 32
      const uint32_t each32 = static_cast<uint32_t>(each), all = static_cast<uint32_t>(total);
      const uint32_t keys = c * static_cast<uint32_t>(chunk) + start + r * each32 + (r < left ? r : left);
      const uint32_t last = keys + each32 + (r < left ? 1 : 0);
      *begin = r == 0 ? keys - start : keys;
      *end = last < all ? last : all;
      return;
    }
    const int64_t keys = c * chunk + start + r * each + (r < left ? r : left), last = keys + each + (r < left ? 1 : 0);
    *begin = r == 0 ? keys - start : keys;
    *end = last < total ? last : total;
  }
  TA_HD int BlockOf(int64_t place) const {
    const int64_t c = place < chunk ? 0 : Divide(place, chunk), in_chunk = place - c * chunk;
    const int64_t within = in_chunk < start ? 0 : in_chunk - start;
    const int64_t longer = left * (each + 1);  // places of the blocks that have one more
    const int64_t r = within < longer ? Divide(within, each + 1) : left + Divide(within - longer, each);
    return static_cast<int>(c * chunk_blocks + r);
  }
};

// Where part `part` of a unit lies whose first part is in `slot`. Parts cut by the grid: a block's second slot is for
// the unit that begins in it, its first one for the unit that goes on.
TA_HD int64_t SlotOfPart(int64_t slot, int part, bool fixed_parts) {
  return fixed_parts || part == 0 ? slot + part : slot + 2 * part - 1;
}

// Counts the parts of a unit that are in their slots: in the low half of a word how many have come and, once the unit's
// first one has, how many there will be. The other half says that the block which keeps the word has begun: that
// is written over what an earlier use of the workspace left there, which may hardly say the same: see README.md.
struct ArrivalWord {
  static constexpr uint64_t kBegun = uint64_t{0x5a7c3e91} << 32;
  static constexpr int kPartsBit = 16;

  // What a part adds; parts: of the unit, if it is the first one, else 0.
  static TA_HD uint64_t Of(int parts) { return 1 + (static_cast<uint64_t>(parts) << kPartsBit); }
  static TA_HD bool HasBegun(uint64_t word) { return word >> 32 == kBegun >> 32; }
  static TA_HD int Parts(uint64_t word) { return static_cast<int>(word >> kPartsBit & 0xffffu); }
  // Whether it was the last part's addition that made the word what it is.
  static TA_HD bool IsLast(uint64_t word) {
    return HasBegun(word) && Parts(word) > 0 && Parts(word) == static_cast<int>(word & 0xffffu);
  }
};

}  // namespace turboattn::decode

#endif  // TURBOATTN_KERNELS_DECODE_WORK_LIST_H_

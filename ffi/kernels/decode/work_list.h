// The flat list of decode work, cut over the grid: which of its places a block has, and in how many parts it leaves a
// unit. Pure functions of sizes, for the host's tests too.
#ifndef TURBOATTN_KERNELS_DECODE_WORK_LIST_H_
#define TURBOATTN_KERNELS_DECODE_WORK_LIST_H_

#include <cstdint>

#include "kernels/common/page_walk.h"

namespace turboattn::decode {

// Not inline on the device: there are many divisions, and a kernel's start takes as long as its instructions take to
// arrive.
#if defined(__CUDACC__)
__host__ __device__ __noinline__
#endif
    inline int64_t
    Quotient(int64_t a, int64_t b) {
  return Divide(a, b);
}

// How a grid would be cut over `units` units of one length, before that is known.
struct EvenCut {
  int units;        // 0: too many to ask
  int chunks;       // of block_units units each, but for the last
  int block_units;  // of a block. 1: ...
  int unit_blocks;  // ... a unit has so many blocks, if it has as many places

  static EvenCut Of(int64_t units, int grid) {
    if (units == 0 || units > INT32_MAX - grid) return {};
    const int n = static_cast<int>(units), block_units = (n + grid - 1) / grid;
    return {n, (n + block_units - 1) / block_units, block_units, n <= grid ? grid / n : 1};
  }
};

// `total` places over as many blocks of the grid as have one. Each chunk_blocks blocks share `chunk` places, the first
// `left` of them have one more than the others. 64 bits: ranges that overlap claim rows again and again.
struct WorkList {
  int64_t total;
  int blocks;  // that have work
  int64_t chunk;
  int chunk_blocks;
  int64_t each;
  int left;

  // One chunk, or where `even` says so whole units a block or whole blocks a unit: no block then has parts of two units,
  // whose starts and ends cost more than a place or two. Not where the longest block would have a sixteenth more places,
  // and one. all_even: the cut's units are equally long.
  TA_HD WorkList(int64_t total, int grid, const EvenCut& even, bool all_even)
      : total(total), blocks(total < grid ? static_cast<int>(total) : grid), chunk(total), chunk_blocks(blocks) {
    if (all_even && total > 0) {
      const int64_t unit = Quotient(total, even.units);
      chunk = unit * even.block_units;
      chunk_blocks = unit < even.unit_blocks ? static_cast<int>(unit) : even.unit_blocks;
      Share();
      const int64_t longest = each + (left > 0 ? 1 : 0);
      if ((longest - longest / 16 - 1) * grid <= total) {
        blocks = even.chunks * chunk_blocks;
        return;
      }
      chunk = total;
      chunk_blocks = blocks;
    }
    Share();
  }

  TA_HD int64_t Begin(int block) const {
    const int c = block < chunk_blocks ? 0 : static_cast<int>(Quotient(block, chunk_blocks));
    const int r = block - c * chunk_blocks;
    const int64_t begin = c * chunk + r * each + (r < left ? r : left);
    return begin < total ? begin : total;
  }
  TA_HD int BlockOf(int64_t place) const {
    const int64_t c = place < chunk ? 0 : Quotient(place, chunk), within = place - c * chunk;
    const int64_t longer = left * (each + 1);  // places of the blocks that have one more
    const int64_t r = within < longer ? Quotient(within, each + 1) : left + Quotient(within - longer, each);
    return static_cast<int>(c * chunk_blocks + r);
  }

 private:
  TA_HD void Share() {
    each = chunk_blocks == 0 ? 0 : chunk_blocks == 1 ? chunk : Quotient(chunk, chunk_blocks);
    left = static_cast<int>(chunk - each * chunk_blocks);
  }
};

// Where part `part` of a unit lies whose first part is in `slot`. Parts cut by the grid: a block's second slot is for
// the unit that begins in it, its first one for the unit that goes on.
TA_HD int64_t SlotOfPart(int64_t slot, int part, bool fixed_parts) {
  return fixed_parts || part == 0 ? slot + part : slot + 2 * part - 1;
}

}  // namespace turboattn::decode

#endif  // TURBOATTN_KERNELS_DECODE_WORK_LIST_H_

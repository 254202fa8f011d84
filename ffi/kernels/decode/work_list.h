// The flat list of decode work, cut over the grid: which of its places a block has, and in how many parts it leaves a
// unit. Pure functions of sizes, for the host's tests too.
#ifndef TURBOATTN_KERNELS_DECODE_WORK_LIST_H_
#define TURBOATTN_KERNELS_DECODE_WORK_LIST_H_

#include <cstdint>

#include "kernels/common/page_walk.h"

namespace turboattn::decode {

// `total` places over as many blocks of the grid as have one, the first `left` of which have one more than the others.
// 64 bits: ranges that overlap claim rows again and again.
struct WorkList {
  int64_t total;
  int blocks;  // that have work
  int64_t each;
  int left;

  TA_HD WorkList(int64_t total, int grid) : total(total), blocks(total < grid ? static_cast<int>(total) : grid) {
    each = blocks == 0 ? 0 : Divide(total, blocks);
    left = static_cast<int>(total - each * blocks);
  }
  TA_HD int64_t Begin(int block) const { return block * each + (block < left ? block : left); }
  TA_HD int BlockOf(int64_t place) const {
    const int64_t longer = left * (each + 1);  // places of the blocks that have one more
    return static_cast<int>(place < longer ? Divide(place, each + 1) : left + Divide(place - longer, each));
  }
};

// Where part `part` of a unit lies whose first part is in `slot`. Parts cut by the grid: a block's second slot is for
// the unit that begins in it, its first one for the unit that goes on.
TA_HD int64_t SlotOfPart(int64_t slot, int part, bool fixed_parts) {
  return fixed_parts || part == 0 ? slot + part : slot + 2 * part - 1;
}

}  // namespace turboattn::decode

#endif  // TURBOATTN_KERNELS_DECODE_WORK_LIST_H_

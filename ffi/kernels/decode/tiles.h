// Tile sizes of the decode kernels. Measured choices go here and nowhere else.
#ifndef TURBOATTN_KERNELS_DECODE_TILES_H_
#define TURBOATTN_KERNELS_DECODE_TILES_H_

#include "core/heuristics.h"

namespace turboattn::decode {

// sm80: 4 warps, each with its own 16 keys of a block of 64 and its own ring, so that nothing but the end of a unit
// needs a block-wide barrier.
constexpr int kWarps = 4;
constexpr int kWarpKeys = kDecodeKeys / kWarps;
static_assert(kWarpKeys == 16, "the rows of one m16 tile");

// Steps in a warp's ring, by the bytes of a stored row: K and V of 16 keys are 32 rows. Little's law: 3 TB/s times
// about 700 ns over 132 SMs is 16 KB in flight on each; two blocks of 4 warps with 2 steps of 8 KB on their way have
// 128 KB. A block's memory must stay below 99 KB: two then fit on an SM, and one on the cards of 8.6 and 8.9. Rows of
// 512 bytes are 16 KB a step: two steps let one block reside, with 64 KB on their way, and fit cards with 164 KB.
template <int kStoredBytes>
constexpr int kStages = kStoredBytes == 512   ? 2
                        : kStoredBytes == 256 ? 3
                        : kStoredBytes == 128 ? 5
                                              : 8;

// Blocks that reside on an SM, and the memory of each, beside what is static. Head dim 256 is not for 8.6 and 8.9.
template <int kStoredBytes>
constexpr int kResident = kStoredBytes == 512 ? 1 : 2;
template <int kStoredBytes, int kHeadDim>
constexpr int kMaxSharedBytes = (kHeadDim <= 128                ? 98
                                 : kResident<kStoredBytes> == 2 ? 112
                                                                : 162) *
                                1024;

}  // namespace turboattn::decode

#endif  // TURBOATTN_KERNELS_DECODE_TILES_H_

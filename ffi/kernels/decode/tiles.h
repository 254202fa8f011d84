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

// Blocks that reside on an SM of 8.0 or 9.0, by the bytes of a stored row: three where registers and rings let them,
// since quantised steps wait on conversions more than on bytes. Rows of 64 elements of 16 bits: four with three steps
// each take 127 us, three with four 134, two with five 131 (64 x 4096, H200). Rows of 512 bytes: one.
template <int kStoredBytes, int kRows, int kHeadDim>
constexpr int kResident = kStoredBytes == 512                                    ? 1
                          : kStoredBytes == 128 && kRows == 8 && kHeadDim == 64  ? 4
                          : kStoredBytes <= 128 && kRows == 8 && kHeadDim <= 128 ? 3
                                                                                 : 2;

// Steps in a warp's ring: K and V of 16 keys are 32 rows. Little's law: 3 TB/s times about 700 ns over 132 SMs is 16 KB
// in flight on each; two blocks of 4 warps with 2 steps of 8 KB on their way have 128 KB. Rows of 512 bytes are 16 KB a
// step: two steps have 64 KB on their way, and fit cards with 164 KB.
template <int kStoredBytes, int kBlocks>
constexpr int kStages = kStoredBytes == 512   ? 2
                        : kStoredBytes == 256 ? 3
                        : kStoredBytes == 128 ? (kBlocks == 4   ? 3
                                                 : kBlocks == 3 ? 4
                                                                : 5)
                                              : 8;

// What the start and the end of a unit cost a block, in places of the list: key blocks that it would have read. Some
// 6 us, in which a stream of 4.5 TB/s brings each of 264 blocks 100 KB. H200, us with them / without / what the bytes
// take, 32 x 64 beside 32 x 4096: bf16 144 / 273 / 125, int8 83 / 288 / 68, int4 56 / 292 / 43, of 16 rows 85 / 490 /
// 60; 64 x (1 to 4096): 141 / 166, 86 / 121, 59 / 111, 91 / 194. Two thirds of them took 159, 90, 65, 104.
template <int kStoredBytes, int kBlocks>
constexpr int kStartPlaces = 1536 / (kStoredBytes * kBlocks) - 1;

// Memory of a block, beside what is static (512 bytes). Up to head dim 128 one block fits cards of 8.6 and 8.9, which
// have 99 KB.
template <int kBlocks, int kHeadDim>
constexpr int kMaxSharedBytes = (kBlocks == 4      ? 55
                                 : kBlocks == 3    ? 74
                                 : kHeadDim <= 128 ? 98
                                 : kBlocks == 2    ? 112
                                                   : 162) *
                                    1024 +
                                256;

// Whether calls with as many units as blocks have a kernel whose blocks merge, in place of a merge kernel. H200, us
// with / without: 64 x 256 24.1 / 25.5 (16 rows 27.6 / 31.2), 64 x 4096 248.9 / 250.1, 64 x (0 to 4096) 140.8 / 143.4.
// All else loses at ragged lengths: head dim 64 (64 x 256 14.8 / 16.1, but 64 x (0 to 4096) 85.2 / 83.8), 256 (44.0 /
// 45.7, but 40 x (0 to 500) 50.7 / 49.5, 16 rows 64 x (0 to 4096) 323.9 / 311.6, which spill more), and codes (int8
// 101 / 96). With fewer units than blocks all are cut, and 8 x 256 takes 11.9 / 10.5.
template <bool kQuantised, int kHeadDim>
constexpr bool kMergesManyUnits = !kQuantised && kHeadDim == 128;

// sm90: two blocks on an SM, and rings that leave room for the rest in half of its 228 KB. Three blocks have 128
// registers a thread: 99 us instead of 88 (int4, 64 x 4096, H200).
constexpr int kResidentSm90 = 2;
constexpr int kRingBytesSm90 = 102 * 1024;
// Where warps share values: beside the rings, what they exchange. Three blocks, whose steps take 15 % less, lose more
// than that where parts begin and end: 131 us instead of 116 (64 x 4096, 16 rows), but 128 x 8192 412 instead of 430.
constexpr int kRingBytesSm90Columns = 90 * 1024;

constexpr int kMergeThreads = 256;  // of a block of the merge

}  // namespace turboattn::decode

#endif  // TURBOATTN_KERNELS_DECODE_TILES_H_

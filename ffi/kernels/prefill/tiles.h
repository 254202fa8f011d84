// Tile sizes of the prefill kernels. Measured choices go here and nowhere else.
#ifndef TURBOATTN_KERNELS_PREFILL_TILES_H_
#define TURBOATTN_KERNELS_PREFILL_TILES_H_

namespace turboattn::prefill {

// sm80: 4 warps of 16 or 32 query rows each. Two blocks share an SM's 228 KB: a block's query tile and its tiles of
// K and V must stay below 113 KB, and 255 registers a thread bound rows x (keys + head_dim).
template <int kHeadDim>
struct TilesSm80;

template <>
struct TilesSm80<64> {
  static constexpr int kRows = 128;      // (token, head of the group) rows
  static constexpr int kKeys = 128;      // keys a block; 64 were 6 to 12 % slower on an H200
  static constexpr int kQuerySteps = 0;  // steps of 16 columns of the query that stay in registers
};

template <>
struct TilesSm80<128> {
  static constexpr int kRows = 128;
  static constexpr int kKeys = 64;  // 32 were 9 to 13 % slower, and 64 rows with three blocks on an SM 8 to 23 %
  static constexpr int kQuerySteps = 0;
};

template <>
struct TilesSm80<256> {
  static constexpr int kRows = 64;  // 16 rows of output are 128 registers
  static constexpr int kKeys = 64;
  // 16 rows a warp read shared memory twice as often for their products as 32: it is busy 77 % of the time, and that
  // bounds them. 0 steps were 4 % slower on an H200; 6, 8 and 10 no faster.
  static constexpr int kQuerySteps = 4;
};

// sm90: a producer warpgroup and kConsumers warpgroups of 64 rows each, one block an SM. Query tile and ring must stay
// below 227 KB less 14 to 26 KB of bookkeeping.
template <int kDim, int kValueDim>
struct TilesSm90;

template <>
struct TilesSm90<64, 64> {
  static constexpr int kConsumers = 3;   // 2, with 128 or 192 keys, were 5 to 15 % slower on an H100
  static constexpr int kKeys = 128;      // a block
  static constexpr int kStages = 3;      // of K, and as many of V
  static constexpr int kQuerySteps = 0;  // steps of 16 columns of the query that stay in registers
};

template <>
struct TilesSm90<128, 128> {
  static constexpr int kConsumers = 2;
  static constexpr int kKeys = 128;  // 160 and 176 were 3 to 15 % slower
  static constexpr int kStages = 2;
  static constexpr int kQuerySteps = 0;
};

// MLA before its values are absorbed.
template <>
struct TilesSm90<192, 128> {
  static constexpr int kConsumers = 2;
  static constexpr int kKeys = 128;
  static constexpr int kStages = 2;  // 208 KB with the query tile
  static constexpr int kQuerySteps = 0;
};

// 64 rows of output are 128 registers a thread, which leaves room for 64 keys. A product of 64 x 64 x 16 from shared
// memory reads 4 KB in its 32 cycles, all that shared memory gives, and copies write besides: hence the query steps.
template <>
struct TilesSm90<256, 256> {
  static constexpr int kConsumers = 2;
  static constexpr int kKeys = 64;  // 80 were 3 to 11 % slower on an H200
  static constexpr int kStages = 2;
  static constexpr int kQuerySteps = 4;  // 0 and 6 were 1 to 11 % slower, 7 and 8 0 to 4 %
};

}  // namespace turboattn::prefill

#endif  // TURBOATTN_KERNELS_PREFILL_TILES_H_

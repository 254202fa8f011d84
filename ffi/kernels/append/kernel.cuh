// append_kv on the GPU: bias, RoPE, one rounding to E, encode, store. A block takes a few consecutive tokens, with all
// their (token, head) rows of K and V. There are two ways to move a row: in the registers of a few lanes, for the usual
// row lengths, and through shared memory, one warp a row, for all others.
#ifndef TURBOATTN_KERNELS_APPEND_KERNEL_CUH_
#define TURBOATTN_KERNELS_APPEND_KERNEL_CUH_

#include "core/params.h"
#include "kernels/append/tokens.cuh"
#include "kernels/append/traits.h"
#include "kernels/common/append_row.cuh"
#include "kernels/common/chunk.cuh"
#include "kernels/common/rope.h"

namespace turboattn::append {

// --- rows of kWidth elements, in registers ---------------------------------------------------------------------------
//
// A row takes kWidth / 16 lanes. Lane l holds elements 8l .. 8l + 7 of either half of the row, so that both columns of
// a rotated pair are in one lane, whichever the pairing, and accesses have 16 bytes.

template <int kWidth>
constexpr int kRowLanes = kWidth / (2 * kChunk);

// The eight turns of a lane, those of pair i of each lane first: two of them are one conflict-free 16-byte access.
template <int kWidth>
struct LaneTurns {
  static constexpr int kLanes = kRowLanes<kWidth>;
  bool interleaved;

  __device__ int operator()(int j) const {
    const int lane = interleaved ? j / 4 % kLanes : j / 8;
    const int turn = interleaved ? j / (4 * kLanes) * 4 + j % 4 : j % 8;
    return (turn / 2 * kLanes + lane) * 2 + turn % 2;
  }
};

template <int kWidth, bool kInterleaved>
__device__ inline void RotateLane(const SinCos* s_turns, int lane, float (&x)[2][kChunk]) {
  constexpr int kLanes = kRowLanes<kWidth>;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 two = *reinterpret_cast<const float4*>(s_turns + (i * kLanes + lane) * 2);
    const SinCos turns[2] = {{two.x, two.y}, {two.z, two.w}};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int turn = 2 * i + k;
      if constexpr (kInterleaved) {
        RopeRotate(turns[k], &x[turn / 4][turn % 4 * 2], &x[turn / 4][turn % 4 * 2 + 1]);
      } else {
        RopeRotate(turns[k], &x[0][turn], &x[1][turn]);
      }
    }
  }
}

// Words and not elements: taking them apart would wait for the load.
struct LaneRow {
  uint4 half[2];
};

// The lane's part of row r of the block: the tokens' K rows come first, then their V rows; `side_rows` each. Zeros past
// the last row.
template <class E, int kWidth>
__device__ inline LaneRow LoadLaneRow(const AppendParams& params, int64_t first, int side_rows, int rows, int r) {
  static_assert(sizeof(Chunk<E>) == sizeof(uint4));
  LaneRow row{};
  if (r >= rows) return row;
  const bool is_key = r < side_rows;
  const int64_t source_row = first * params.cache.num_kv_heads + (is_key ? r : r - side_rows);
  const int64_t element = source_row * kWidth + threadIdx.x % kRowLanes<kWidth> * kChunk;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    row.half[h] = static_cast<const uint4*>(is_key ? params.key : params.value)[(element + h * (kWidth / 2)) / kChunk];
  }
  return row;
}

template <class Traits, int kWidth>
__device__ inline void StoreLaneRow(const AppendParams& params, const LaneRow& loaded, const Place* s_place,
                                    const SinCos* s_turns, int side_rows, int rows, int r) {
  using E = typename Traits::E;
  constexpr DType kKv = Traits::kKvDType;
  constexpr int kLanes = kRowLanes<kWidth>;
  const KvCache& cache = params.cache;
  const int lane = threadIdx.x % kLanes;
  const unsigned heads = static_cast<unsigned>(cache.num_kv_heads);
  const bool is_key = r < side_rows;
  const unsigned side_row = r < rows ? (is_key ? r : r - side_rows) : 0;
  const unsigned t = side_row / heads, head = side_row % heads;
  const Place& place = s_place[t];
  const bool written = r < rows && place.page != kUnmapped;
  const Side side = SideOf(params, is_key);

  float x[2][kChunk];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int e = 0; e < kChunk; ++e) x[h][e] = ToFloat(reinterpret_cast<const Chunk<E>&>(loaded.half[h]).e[e]);
  }
  const int64_t bias_element = int64_t{head} * kWidth + lane * kChunk;
#pragma unroll
  for (int h = 0; h < 2; ++h) AddBias<E>(side, params.bias_dtype, bias_element + h * (kWidth / 2), x[h]);
  const bool rotated = is_key && params.rope.dim != 0;
  if (written && rotated) {
    const SinCos* turns = s_turns + t * (kWidth / 2);
    params.rope.interleaved ? RotateLane<kWidth, true>(turns, lane, x) : RotateLane<kWidth, false>(turns, lane, x);
  }

  [[maybe_unused]] RowScale scale{};
  if constexpr (Traits::kIsQuantised) {
    if (rotated || side.bias != nullptr) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int e = 0; e < kChunk; ++e) x[h][e] = RoundTo<E>(x[h][e]);
      }
    }
  }
  if constexpr (kHasRowParams<kKv>) {
    float min = Infinity(), max = -Infinity(), poison = 0.f;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int e = 0; e < kChunk; ++e) {
        min = fminf(min, x[h][e]);
        max = fmaxf(max, x[h][e]);
        poison = fmaf(x[h][e], 0.f, poison);
      }
    }
    scale = GroupRowScale<E, Traits::kBits, kLanes>(min, max, poison);
  }
  if (!written) return;
  const int64_t row = CacheRow(cache, place.page, head, place.slot);
  if constexpr (kHasRowParams<kKv>) {
    if (lane == 0) StoreRowScale<E>(side, row, scale);
  }
  [[maybe_unused]] float fp8_scale = 0.f;
  if constexpr (kKv == DType::kFloat8E4M3) {
    fp8_scale = static_cast<const float*>(side.params)[place.layer * cache.num_kv_heads + head];
  }
  const RowEncoder<Traits::kBits> encoder(scale);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    StoreEncoded<Traits>(side, row, h * (kWidth / 2) + lane * kChunk, encoder, fp8_scale, x[h]);
  }
}

// Block i takes tokens i * block_tokens and on. D and, where there are values, Dv are kWidth; RoPE turns whole rows or
// none. Dynamic shared memory: the turns.
template <class Traits, int kWidth>
__global__ void __launch_bounds__(kMaxWarps* kWarp, kMinBlocks)
    AppendKernel(const __grid_constant__ AppendParams params, int block_tokens) {
  extern __shared__ float4 s_dynamic[];
  __shared__ int s_owner[kMaxTokens];
  __shared__ Place s_place[kMaxTokens];
  SinCos* s_turns = reinterpret_cast<SinCos*>(s_dynamic);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * block_tokens;
  const int64_t left = params.seqs.num_tokens - first;
  const int count = left < block_tokens ? static_cast<int>(left) : block_tokens;
  const int side_rows = count * static_cast<int>(params.cache.num_kv_heads);
  const int rows = params.value != nullptr ? 2 * side_rows : side_rows;
  const int step = blockDim.x / kRowLanes<kWidth>;
  int r = threadIdx.x / kRowLanes<kWidth>;

  // The first rows are on their way while the block finds out where they go.
  auto loaded = LoadLaneRow<typename Traits::E, kWidth>(params, first, side_rows, rows, r);
  PlaceTokens(params, first, count, s_owner, s_place, s_turns, LaneTurns<kWidth>{params.rope.interleaved});
  // All lanes of a warp stay until its first row is past the end: they exchange values.
  const int row_in_warp = static_cast<int>(threadIdx.x % kWarp) / kRowLanes<kWidth>;
  for (; r - row_in_warp < rows; r += step) {
    const auto next = LoadLaneRow<typename Traits::E, kWidth>(params, first, side_rows, rows, r + step);
    StoreLaneRow<Traits, kWidth>(params, loaded, s_place, s_turns, side_rows, rows, r);
    loaded = next;
  }
}

// --- rows of any length, in shared memory ----------------------------------------------------------------------------

// Elements of the longest row that a warp holds.
inline __host__ __device__ int64_t RowWidth(const AppendParams& params) {
  const int64_t value_width = params.value != nullptr ? params.cache.value_dim : 0;
  return params.cache.head_dim > value_width ? params.cache.head_dim : value_width;
}

// As AppendKernel, for any D, Dv and RoPE. Dynamic shared memory: the turns, then one float row a warp.
template <class Traits>
__global__ void __launch_bounds__(kMaxWarps* kWarp)
    AppendAnyKernel(const __grid_constant__ AppendParams params, int block_tokens) {
  extern __shared__ float4 s_dynamic[];
  __shared__ int s_owner[kMaxTokens];
  __shared__ Place s_place[kMaxTokens];
  SinCos* s_turns = reinterpret_cast<SinCos*>(s_dynamic);
  const int pairs = params.rope.dim / 2;
  float* s_row = reinterpret_cast<float*>(s_turns + block_tokens * pairs) + threadIdx.x / kWarp * RowWidth(params);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * block_tokens;
  const int64_t left = params.seqs.num_tokens - first;
  const int count = left < block_tokens ? static_cast<int>(left) : block_tokens;
  PlaceTokens(params, first, count, s_owner, s_place, s_turns, [](int j) { return j; });

  const int heads = static_cast<int>(params.cache.num_kv_heads), side_rows = count * heads;
  const int rows = params.value != nullptr ? 2 * side_rows : side_rows;
  for (int r = threadIdx.x / kWarp; r < rows; r += blockDim.x / kWarp) {
    const bool is_key = r < side_rows;
    const int side_row = is_key ? r : r - side_rows;
    const int t = side_row / heads;
    if (s_place[t].page == kUnmapped) continue;
    MoveRow<Traits>(params, is_key, first * heads + side_row, side_row % heads, s_place[t], s_turns + t * pairs, s_row);
  }
}

}  // namespace turboattn::append

#endif  // TURBOATTN_KERNELS_APPEND_KERNEL_CUH_

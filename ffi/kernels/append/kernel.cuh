// append_kv on the GPU: bias, RoPE, one rounding to E, encode, store. A block takes a few consecutive tokens, with all
// their (token, head) rows of K and V. There are two ways to move a row: in the registers of a few lanes, for the usual
// row lengths, and through shared memory, one warp a row, for all others.
#ifndef TURBOATTN_KERNELS_APPEND_KERNEL_CUH_
#define TURBOATTN_KERNELS_APPEND_KERNEL_CUH_

#include "core/params.h"
#include "kernels/append/tokens.cuh"
#include "kernels/append/traits.h"
#include "kernels/common/append_pairs.cuh"
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

// Where turn j lies among those of its token: of each lane the first two, then of each lane the next two. Two of them
// are one conflict-free 16-byte access.
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

// A lane's part of a row: four pairs of either half.
struct LaneRow {
  uint4 half[2];
};

// chunk: the index of the lane's first chunk.
template <int kWidth>
__device__ inline LaneRow LoadLaneRow(const void* source, int64_t chunk) {
  const uint4* chunks = static_cast<const uint4*>(source) + chunk;
  return {chunks[0], chunks[kRowLanes<kWidth>]};
}

// Row `row` of the pool, kv head `head`. Run by whole warps; rows that are not `written` only take part in the exchange
// of values. turns: of the row's token.
template <class Traits, int kWidth, bool kIsKey>
__device__ inline void StoreLaneRow(const AppendParams& params, const LaneRow& loaded, int64_t row, int head, int layer,
                                    bool written, const SinCos* turns) {
  using E = typename Traits::E;
  constexpr DType kKv = Traits::kKvDType;
  constexpr int kLanes = kRowLanes<kWidth>;
  Side side = SideOf(params, kIsKey);
  side.width = kWidth;  // it is; so the compiler knows
  const int lane = threadIdx.x % kLanes;
  [[maybe_unused]] float fp8_scale = 0.f;
  if constexpr (kKv == DType::kFloat8E4M3) {
    if (written) fp8_scale = static_cast<const float*>(side.params)[layer * params.cache.num_kv_heads + head];
  }

  uint32_t pairs[kChunk] = {loaded.half[0].x, loaded.half[0].y, loaded.half[0].z, loaded.half[0].w,
                            loaded.half[1].x, loaded.half[1].y, loaded.half[1].z, loaded.half[1].w};
  float x[2][kChunk];
  const auto unpack = [&] {
#pragma unroll
    for (int i = 0; i < kChunk; ++i) {
      x[i / 4][i % 4 * 2] = Low<E>(pairs[i]);
      x[i / 4][i % 4 * 2 + 1] = High<E>(pairs[i]);
    }
  };
  const bool rotated = kIsKey && params.rope.dim != 0;
  if (rotated || side.bias != nullptr) {
    unpack();
    const int64_t bias_element = int64_t{head} * kWidth + lane * kChunk;
#pragma unroll
    for (int h = 0; h < 2; ++h) AddBias<E>(side, params.bias_dtype, bias_element + h * (kWidth / 2), x[h]);
    if (rotated) {
      params.rope.interleaved ? RotateLane<kWidth, true>(turns, lane, x) : RotateLane<kWidth, false>(turns, lane, x);
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) pairs[i] = RoundPair<E>(x[i / 4][i % 4 * 2], x[i / 4][i % 4 * 2 + 1]);
  }

  if constexpr (!Traits::kIsQuantised) {
    NormaliseNans<E>(pairs);
    if (!written) return;
    uint4* chunks = static_cast<uint4*>(side.pool) + row * (kWidth / kChunk) + lane;
    chunks[0] = {pairs[0], pairs[1], pairs[2], pairs[3]};
    chunks[kLanes] = {pairs[4], pairs[5], pairs[6], pairs[7]};
  } else {
    [[maybe_unused]] RowScale scale{};
    if constexpr (kHasRowParams<kKv>) scale = PairsRowScale<E, Traits::kBits, kLanes>(pairs);
    if (!written) return;
    if constexpr (kHasRowParams<kKv>) {
      if (lane == 0) StoreRowScale<E>(side, row, scale);
    }
    const RowEncoder<Traits::kBits> encoder(scale);
    unpack();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      StoreEncoded<Traits>(side, row, h * (kWidth / 2) + lane * kChunk, encoder, fp8_scale, x[h]);
    }
  }
}

// Block i takes tokens i * block_tokens and on. D and, where there are values, Dv are kWidth; RoPE turns whole rows or
// none. A lane moves its part of a (token, head) row of K, then of V, then of the next row; it asks for the next row of
// either as soon as the one before has been stored. Dynamic shared memory: the turns.
template <class Traits, int kWidth>
__global__ void __launch_bounds__(kMaxWarps* kWarp, kMinBlocks)
    AppendKernel(const __grid_constant__ AppendParams params, int block_tokens) {
  extern __shared__ float4 s_dynamic[];
  __shared__ int s_owner[kMaxTokens];
  __shared__ Place s_place[kMaxTokens];
  SinCos* s_turns = reinterpret_cast<SinCos*>(s_dynamic);
  constexpr int kPairs = kWidth / 2;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * block_tokens;
  const int64_t left = params.seqs.num_tokens - first;
  const int count = left < block_tokens ? static_cast<int>(left) : block_tokens;
  const unsigned heads = static_cast<unsigned>(params.cache.num_kv_heads);
  const unsigned rows = count * heads, step = blockDim.x / kRowLanes<kWidth>;
  const unsigned page_size = static_cast<unsigned>(params.cache.page_size);
  const bool has_value = params.value != nullptr;

  // The first rows are on their way while the block finds out where they go.
  unsigned r = threadIdx.x / kRowLanes<kWidth>;
  int64_t chunk = (first * heads + r) * (kWidth / kChunk) + threadIdx.x % kRowLanes<kWidth>;
  LaneRow key{}, value{};
  if (r < rows) {
    key = LoadLaneRow<kWidth>(params.key, chunk);
    if (has_value) value = LoadLaneRow<kWidth>(params.value, chunk);
  }
  PlaceTokens(params, first, count, s_owner, s_place);
  if (params.rope.dim != 0) {
    TurnTokens(params.rope, kPairs, first, count, s_place, s_turns, LaneTurns<kWidth>{params.rope.interleaved});
  }

  const unsigned step_tokens = step / heads, step_heads = step % heads;
  unsigned t = r / heads, head = r % heads;
  // All lanes of a warp stay until its first row is past the end: they exchange values.
  const unsigned row_in_warp = threadIdx.x % kWarp / kRowLanes<kWidth>;
  while (r - row_in_warp < rows) {
    const unsigned token = r < rows ? t : 0;
    const int64_t page = s_place[token].page;
    const int layer = s_place[token].layer;
    const bool written = r < rows && page != kUnmapped;
    // CacheRow, without products of 64 bits: see Launch.
    const int64_t row = static_cast<int64_t>(uint64_t{static_cast<unsigned>(page)} * (heads * page_size) +
                                             (head * page_size + static_cast<unsigned>(s_place[token].slot)));
    const SinCos* turns = s_turns + token * kPairs;
    r += step;
    chunk += step * (kWidth / kChunk);
    StoreLaneRow<Traits, kWidth, true>(params, key, row, head, layer, written, turns);
    if (r < rows) key = LoadLaneRow<kWidth>(params.key, chunk);
    if (has_value) {
      StoreLaneRow<Traits, kWidth, false>(params, value, row, head, layer, written, turns);
      if (r < rows) value = LoadLaneRow<kWidth>(params.value, chunk);
    }
    t += step_tokens;
    head += step_heads;
    if (head >= heads) {
      head -= heads;
      ++t;
    }
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
  __shared__ int s_owner[kMaxAnyTokens];
  __shared__ Place s_place[kMaxAnyTokens];
  SinCos* s_turns = reinterpret_cast<SinCos*>(s_dynamic);
  const int pairs = params.rope.dim / 2;
  float* s_row = reinterpret_cast<float*>(s_turns + block_tokens * pairs) + threadIdx.x / kWarp * RowWidth(params);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * block_tokens;
  const int64_t left = params.seqs.num_tokens - first;
  const int count = left < block_tokens ? static_cast<int>(left) : block_tokens;
  PlaceTokens(params, first, count, s_owner, s_place);
  if (pairs != 0) TurnTokens(params.rope, pairs, first, count, s_place, s_turns, [](int j) { return j; });

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

// append_kv on the GPU: bias, RoPE, one rounding to E, encode, store. A block takes a few consecutive tokens, with all
// their (token, head) rows of K and V. There are two ways to move a row: in the registers of a few lanes, for the usual
// row lengths, and through shared memory, one warp a row, for all others.
#ifndef TURBOATTN_KERNELS_APPEND_KERNEL_CUH_
#define TURBOATTN_KERNELS_APPEND_KERNEL_CUH_

#include "core/params.h"
#include "kernels/append/tokens.cuh"
#include "kernels/append/traits.h"
#include "kernels/common/chunk.cuh"
#include "kernels/common/kv_codec.h"
#include "kernels/common/page_walk.h"
#include "kernels/common/rope.h"

namespace turboattn::append {

// One of the two arrays that a token is written to.
struct Side {
  const void* source;  // [T,K,width] E
  const void* bias;    // [K,width] bias_dtype; may be null
  void* pool;          // [L,N,K,P,width] kv dtype
  void* params;        // as KvCache::key_params
  int64_t width;       // D or Dv
};

__device__ inline Side SideOf(const AppendParams& params, bool is_key) {
  const KvCache& cache = params.cache;
  return is_key ? Side{params.key, params.key_bias, cache.key, cache.key_params, cache.head_dim}
                : Side{params.value, params.value_bias, cache.value, cache.value_params, cache.value_dim};
}

// x += bias[element .. element + 7], where there is a bias.
template <class E>
__device__ inline void AddBias(const Side& side, DType bias_dtype, int64_t element, float (&x)[kChunk]) {
  if (side.bias == nullptr) return;
  if (bias_dtype == DType::kFloat32) {
    const Chunk<float> bias = LoadChunk<float>(side.bias, element);
#pragma unroll
    for (int e = 0; e < kChunk; ++e) x[e] = AddRn(x[e], bias.e[e]);
  } else {
    const Chunk<E> bias = LoadChunk<E>(side.bias, element);
#pragma unroll
    for (int e = 0; e < kChunk; ++e) x[e] = AddRn(x[e], ToFloat(bias.e[e]));
  }
}

// Scale and zero of a row from each lane's part of it. `poison` is 0 if the lane's elements are finite, else NaN. Run
// by a whole warp, in groups of kLanes consecutive lanes with a row each; every lane gets its row's result.
template <class E, int kBits, int kLanes>
__device__ inline RowScale GroupRowScale(float min, float max, float poison) {
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) {
    min = fminf(min, __shfl_xor_sync(~0u, min, step));
    max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
  }
  const unsigned group = (kLanes == kWarp ? ~0u : (1u << kLanes % kWarp) - 1) << threadIdx.x % kWarp / kLanes * kLanes;
  const bool finite = (__ballot_sync(~0u, poison == 0.f) & group) == group;
  return MakeRowScale<E, kBits>(min, max, finite);
}

// Codes of one row: those of EncodeCode, without its division. The quotient a / s is first a times a reciprocal and
// then corrected once by its remainder, which is exact in one fma. That gives the rounded quotient itself: s has at
// most 11 significant bits, so a / s is never a tie between two floats, and never closer to one than 2^-12 of their
// distance, while the corrected value is off by less than 2^-20 of it before its rounding.
template <int kBits>
class RowEncoder {
 public:
  __device__ explicit RowEncoder(RowScale row) {
    // A remainder must not be subnormal: all is scaled. A row with such small steps is small itself, nothing overflows.
    power_ = row.scale < 0x1p-64f ? 0x1p64f : 1.f;
    scale_ = MulRn(row.scale, power_);
    zero_ = MulRn(row.zero, power_);
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse_) : "f"(scale_));
    // Without a usable scale (0, Inf, NaN) every quotient below is 0 or NaN, whose code is 0.
    if (!(scale_ > 0.f && IsFinite(scale_))) inverse_ = 0.f;
  }

  // In the low byte; the others are garbage.
  __device__ uint32_t Code(float x) const {
    constexpr float kMaxCode = static_cast<float>((1 << kBits) - 1);
    const float a = fmaf(x, power_, -zero_);  // the product is exact: one rounding, that of x - zero
    const float quotient = MulRn(a, inverse_);
    const float steps = fmaf(fmaf(-quotient, scale_, a), inverse_, quotient);
    const float clamped = fminf(fmaxf(steps, 0.f), kMaxCode);  // fmaxf(NaN, 0) is 0
    return FloatToBits(AddRn(clamped, 0x1p23f));  // as in EncodeCode
  }

 private:
  float power_, scale_, zero_, inverse_;
};

// Encodes x, E values, as elements d .. d + 7 of row `row` of [L,N,K,P]. `encoder` is for int8 and int4, `fp8_scale`
// for fp8.
template <class Traits>
__device__ inline void StoreEncoded(const Side& side, int64_t row, int64_t d, const RowEncoder<Traits::kBits>& encoder,
                                    float fp8_scale, const float (&x)[kChunk]) {
  constexpr DType kKv = Traits::kKvDType;
  const int64_t element = row * side.width + d;
  if constexpr (kKv == DType::kInt4) {
    uint8_t codes[kChunk];
#pragma unroll
    for (int e = 0; e < kChunk; ++e) codes[e] = static_cast<uint8_t>(encoder.Code(x[e]));
    static_cast<uint32_t*>(side.pool)[element / kChunk] = PackInt4(codes);
  } else if constexpr (kKv == DType::kInt8) {
    uint32_t words[2];
#pragma unroll
    for (int w = 0; w < 2; ++w) {
      const uint32_t low = __byte_perm(encoder.Code(x[4 * w]), encoder.Code(x[4 * w + 1]), 0x0040);
      const uint32_t high = __byte_perm(encoder.Code(x[4 * w + 2]), encoder.Code(x[4 * w + 3]), 0x0040);
      words[w] = __byte_perm(low, high, 0x5410);
    }
    static_cast<uint2*>(side.pool)[element / kChunk] = {words[0], words[1]};
  } else {
    Chunk<Element<kKv>> chunk;
#pragma unroll
    for (int e = 0; e < kChunk; ++e) {
      if constexpr (kKv == DType::kFloat8E4M3) {
        chunk.e[e] = EncodeFp8(x[e], fp8_scale);
      } else {
        chunk.e[e] = FromFloat<typename Traits::E>(x[e]);
      }
    }
    StoreChunk(side.pool, element, chunk);
  }
}

template <class E>
__device__ inline void StoreRowScale(const Side& side, int64_t row, RowScale scale) {
  struct alignas(2 * sizeof(E)) Pair {
    E scale, zero;
  };
  static_cast<Pair*>(side.params)[row] = {FromFloat<E>(scale.scale), FromFloat<E>(scale.zero)};
}

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

// One row through s_row[width], by one warp. turns: of the row's token.
template <class Traits>
__device__ inline void MoveRow(const AppendParams& params, bool is_key, int64_t source_row, int64_t head,
                               const Place& place, const SinCos* turns, float* s_row) {
  using E = typename Traits::E;
  constexpr DType kKv = Traits::kKvDType;
  const KvCache& cache = params.cache;
  const RopeParams& rope = params.rope;
  const int lane = threadIdx.x % kWarp;
  const Side side = SideOf(params, is_key);
  for (int64_t d = lane * kChunk; d < side.width; d += kWarp * kChunk) {
    const Chunk<E> chunk = LoadChunk<E>(side.source, source_row * side.width + d);
    float x[kChunk];
#pragma unroll
    for (int e = 0; e < kChunk; ++e) x[e] = ToFloat(chunk.e[e]);
    AddBias<E>(side, params.bias_dtype, head * side.width + d, x);
#pragma unroll
    for (int e = 0; e < kChunk; ++e) s_row[d + e] = x[e];
  }
  __syncwarp();
  if (is_key) {
    for (int64_t j = lane; j < rope.dim / 2; j += kWarp) {
      RopeRotate(turns[j], &s_row[RopeFirst(rope, j)], &s_row[RopeSecond(rope, j)]);
    }
    __syncwarp();
  }
  float min = Infinity(), max = -Infinity(), poison = 0.f;
  for (int64_t d = lane; d < side.width; d += kWarp) {
    const float x = RoundTo<E>(s_row[d]);
    s_row[d] = x;
    min = fminf(min, x);
    max = fmaxf(max, x);
    poison = fmaf(x, 0.f, poison);
  }
  __syncwarp();
  const int64_t row = CacheRow(cache, place.page, head, place.slot);
  [[maybe_unused]] RowScale scale{};
  if constexpr (kHasRowParams<kKv>) {
    scale = GroupRowScale<E, Traits::kBits, kWarp>(min, max, poison);
    if (lane == 0) StoreRowScale<E>(side, row, scale);
  }
  [[maybe_unused]] float fp8_scale = 0.f;
  if constexpr (kKv == DType::kFloat8E4M3) {
    fp8_scale = static_cast<const float*>(side.params)[place.layer * cache.num_kv_heads + head];
  }
  const RowEncoder<Traits::kBits> encoder(scale);
  for (int64_t d = lane * kChunk; d < side.width; d += kWarp * kChunk) {
    float x[kChunk];
#pragma unroll
    for (int e = 0; e < kChunk; ++e) x[e] = s_row[d + e];
    StoreEncoded<Traits>(side, row, d, encoder, fp8_scale, x);
  }
  __syncwarp();  // the row is free for the next one
}

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

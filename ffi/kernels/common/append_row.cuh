// One new row of keys or values: bias, RoPE, one rounding to E, encode, store. For append_kv, and for the fused step
// inside the decode kernel. Traits has E, kKvDType and kBits, those of a code of int8 and int4.
#ifndef TURBOATTN_KERNELS_COMMON_APPEND_ROW_CUH_
#define TURBOATTN_KERNELS_COMMON_APPEND_ROW_CUH_

#include "core/params.h"
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

// Elements d .. d + 7 of a row, with their bias, into s_row[width].
template <class E>
__device__ inline void PutChunk(const AppendParams& params, const Side& side, int64_t head, int64_t d,
                                const Chunk<E>& chunk, float* s_row) {
  float x[kChunk];
#pragma unroll
  for (int e = 0; e < kChunk; ++e) x[e] = ToFloat(chunk.e[e]);
  AddBias<E>(side, params.bias_dtype, head * side.width + d, x);
#pragma unroll
  for (int e = 0; e < kChunk; ++e) s_row[d + e] = x[e];
}

// The rest of the way, by the warp that put s_row there: into row `row` of [L,N,K,P], which is kv head `head` of
// `layer`. turn(j): the SinCos of pair j.
template <class Traits, class Turn>
__device__ inline void FinishRow(const AppendParams& params, bool is_key, int64_t row, int64_t layer, int64_t head,
                                 Turn turn, float* s_row) {
  using E = typename Traits::E;
  constexpr DType kKv = Traits::kKvDType;
  const RopeParams& rope = params.rope;
  const int lane = threadIdx.x % kWarp;
  const Side side = SideOf(params, is_key);
  __syncwarp();
  if (is_key) {
    for (int64_t j = lane; j < rope.dim / 2; j += kWarp) {
      RopeRotate(turn(j), &s_row[RopeFirst(rope, j)], &s_row[RopeSecond(rope, j)]);
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
  [[maybe_unused]] RowScale scale{};
  if constexpr (kHasRowParams<kKv>) {
    scale = GroupRowScale<E, Traits::kBits, kWarp>(min, max, poison);
    if (lane == 0) StoreRowScale<E>(side, row, scale);
  }
  [[maybe_unused]] float fp8_scale = 0.f;
  if constexpr (kKv == DType::kFloat8E4M3) {
    fp8_scale = static_cast<const float*>(side.params)[layer * params.cache.num_kv_heads + head];
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

// One row through s_row[width], by one warp. place: its page, slot and layer; turns: of its token.
template <class Traits, class Place>
__device__ inline void MoveRow(const AppendParams& params, bool is_key, int64_t source_row, int64_t head,
                               const Place& place, const SinCos* turns, float* s_row) {
  using E = typename Traits::E;
  const Side side = SideOf(params, is_key);
  for (int64_t d = threadIdx.x % kWarp * kChunk; d < side.width; d += kWarp * kChunk) {
    PutChunk(params, side, head, d, LoadChunk<E>(side.source, source_row * side.width + d), s_row);
  }
  const int64_t row = CacheRow(params.cache, place.page, head, place.slot);
  FinishRow<Traits>(params, is_key, row, place.layer, head, [&](int64_t j) { return turns[j]; }, s_row);
}

}  // namespace turboattn::append

#endif  // TURBOATTN_KERNELS_COMMON_APPEND_ROW_CUH_

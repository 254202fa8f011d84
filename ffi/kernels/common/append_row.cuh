// One new row of keys or values: bias, RoPE, one rounding to E, encode, store. For append_kv, and for the fused step
// inside the decode kernel. Traits has E, kKvDType and kBits, those of a code of int8 and int4.
#ifndef TURBOATTN_KERNELS_COMMON_APPEND_ROW_CUH_
#define TURBOATTN_KERNELS_COMMON_APPEND_ROW_CUH_

#include <type_traits>

#include "core/params.h"
#include "kernels/common/append_pairs.cuh"
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

// 1 / s as the sum of two floats, so that x / s is one rounding of x * high + x * low, but for less than 2^-18 of the
// distance between two floats before that rounding. s is far from both ends of the floats' range.
struct Reciprocal {
  float high, low;

  // less: how much the high part is less, in units of its last place. 2 make it less than 1 / s.
  __device__ explicit Reciprocal(float s, uint32_t less = 0) {
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(high) : "f"(s));
    high = BitsToFloat(FloatToBits(high) - less);
    low = MulRn(fmaf(-s, high, 1.f), high);
  }
  __device__ float Times(float x) const { return fmaf(x, high, MulRn(x, low)); }
};

// Codes of the elements of one row: those of EncodeCode, without its division. The product with the reciprocal is the
// rounded quotient itself: s has at most 11 significant bits, so a / s is never a tie between two floats, and never
// closer to one than 2^-12 of their distance.
template <int kBits>
class RowEncoder {
 public:
  __device__ explicit RowEncoder(RowScale row)
      // Extreme rows are scaled. A row with small steps is small itself, nothing overflows; with large steps, what is
      // lost of small elements is nothing to their codes.
      : power_(row.scale < 0x1p-64f  ? 0x1p64f
               : row.scale > 0x1p64f ? 0x1p-64f
                                     : 1.f),
        zero_(MulRn(row.zero, power_)),
        inverse_(MulRn(row.scale, power_)) {
    // Without a usable scale (0, Inf, NaN) every code is 0.
    mask_ = row.scale > 0.f && IsFinite(row.scale) ? ~0u : 0u;
  }

  // Two codes of kBits each, beside each other.
  __device__ uint32_t Pair(float low, float high) const { return Put(Code(high), Code(low), 0) & mask_; }

  // Eight, in the order of the cache.
  __device__ std::conditional_t<kBits == 4, uint32_t, uint2> Chunk(const float (&x)[kChunk]) const {
    uint32_t c[kChunk];
#pragma unroll
    for (int e = 0; e < kChunk; ++e) c[e] = Code(x[e]);
    if constexpr (kBits == 4) {
      return Put(c[2], c[0], Put(c[6], c[4], Put(c[3], c[1], Put(c[7], c[5], 0)))) & mask_;  // see Int4Shift
    } else {
      return {Put(c[1], c[0], Put(c[3], c[2], 0)) & mask_, Put(c[5], c[4], Put(c[7], c[6], 0)) & mask_};
    }
  }

 private:
  // Two codes below those that are there, limited: the largest may exceed the last code, as the scale is rounded, and
  // that of -0 is -0.
  static __device__ uint32_t Put(uint32_t high, uint32_t low, uint32_t codes) {
    uint32_t all;
    if constexpr (kBits == 4) {
      asm("cvt.pack.sat.u4.s32.b32 %0, %1, %2, %3;" : "=r"(all) : "r"(high), "r"(low), "r"(codes));
    } else {
      asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(all) : "r"(high), "r"(low), "r"(codes));
    }
    return all;
  }

  // Of a row with a usable scale, not yet limited.
  __device__ uint32_t Code(float x) const {
    const float a = fmaf(x, power_, -zero_);  // the product is exact: one rounding, that of x - zero
    // The bits of a subnormal float are a number: this rounds half to even.
    return FloatToBits(MulRn(inverse_.Times(a), 0x1p-149f));
  }

  float power_, zero_;
  Reciprocal inverse_;
  uint32_t mask_;
};

// Codes of EncodeFp8, without its division where neither scale nor elements are extreme.
//
// The product with the reciprocal may be the wrong neighbour of a quotient that is nearly a tie between two floats, as
// a scale has 24 significant bits. fp8 can tell the two apart only if one of them is a tie t between two fp8, which has
// at most 5 bits. Written as integers (s of 24 bits, t of 5, an element of 11 and then zeros), such a quotient needs
// s (2^20 t +- 1) within 2^8 of a number with 36 zeros at its end, which only s = 2^24 - 1 can meet.
class Fp8Encoder {
 public:
  __device__ explicit Fp8Encoder(float scale) : scale_(scale), inverse_(scale, 2) {  // low > 0: -0 stays -0
    constexpr uint32_t kMantissa = 0x7fffffu;
    limit_ = scale > 0x1p-60f && scale < 0x1p60f && (FloatToBits(scale) & kMantissa) != kMantissa ? 0x1p60f : 0.f;
  }

  // Whether Pair() will do for elements of which this is the largest magnitude, or NaN.
  __device__ bool IsUsual(float largest) const {
#if __CUDA_ARCH__ >= 890
    return largest < limit_;
#else
    return false;
#endif
  }

  // Two codes, a byte each.
  __device__ uint32_t Pair(float low, float high) const {
    uint16_t codes = 0;
#if __CUDA_ARCH__ >= 890
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(inverse_.Times(high)), "f"(inverse_.Times(low)));
#endif
    return codes;
  }
  __device__ uint32_t AnyPair(float low, float high) const {
    return EncodeFp8(low, scale_).bits | static_cast<uint32_t>(EncodeFp8(high, scale_).bits) << 8;
  }

  __device__ uint2 Chunk(const float (&x)[kChunk]) const {
    return {Pair(x[0], x[1]) | Pair(x[2], x[3]) << 16, Pair(x[4], x[5]) | Pair(x[6], x[7]) << 16};
  }
  __device__ uint2 AnyChunk(const float (&x)[kChunk]) const {
    uint32_t words[2] = {};
#pragma unroll
    for (int e = 0; e < kChunk; e += 2) words[e / 4] |= AnyPair(x[e], x[e + 1]) << e % 4 * 8;
    return {words[0], words[1]};
  }

 private:
  float scale_, limit_;
  Reciprocal inverse_;
};

// Encodes x, E values, as elements d .. d + 7 of row `row` of [L,N,K,P]. `scale` is for int8 and int4, `fp8_scale` for
// fp8.
template <class Traits>
__device__ inline void StoreEncoded(const Side& side, int64_t row, int64_t d, RowScale scale, float fp8_scale,
                                    const float (&x)[kChunk]) {
  constexpr DType kKv = Traits::kKvDType;
  const int64_t element = row * side.width + d;
  if constexpr (kHasRowParams<kKv>) {
    const auto codes = RowEncoder<Traits::kBits>(scale).Chunk(x);
    static_cast<std::remove_const_t<decltype(codes)>*>(side.pool)[element / kChunk] = codes;
  } else if constexpr (kKv == DType::kFloat8E4M3) {
    float largest = 0.f;
#pragma unroll
    for (int e = 0; e < kChunk; ++e) largest = fmaxf(largest, fabsf(x[e]));  // passes over NaN, whose code is right
    const Fp8Encoder encoder(fp8_scale);
    static_cast<uint2*>(side.pool)[element / kChunk] =
        encoder.IsUsual(largest) ? encoder.Chunk(x) : encoder.AnyChunk(x);
  } else {
    Chunk<Element<kKv>> chunk;
#pragma unroll
    for (int e = 0; e < kChunk; ++e) chunk.e[e] = FromFloat<typename Traits::E>(x[e]);
    StoreChunk(side.pool, element, chunk);
  }
}

template <class E>
__device__ inline void StoreRowScale(const Side& side, int64_t row, RowScale scale) {
  constexpr uint32_t kNanPair = std::is_same_v<E, bf16> ? 0x7fc07fc0u : 0x7e007e00u;  // scale and zero are NaN together
  static_cast<uint32_t*>(side.params)[row] = IsNan(scale.scale) ? kNanPair : RoundPair<E>(scale.scale, scale.zero);
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
// `layer`. turn(j): the SinCos of pair j. Loops stay loops: their instructions take longer to arrive than to run.
template <class Traits, class Turn>
__device__ inline void FinishRow(const AppendParams& params, bool is_key, int64_t row, int64_t layer, int64_t head,
                                 Turn turn, float* s_row) {
  using E = typename Traits::E;
  constexpr DType kKv = Traits::kKvDType;
  const RopeParams& rope = params.rope;
  const int lane = threadIdx.x % kWarp;
  const Side side = SideOf(params, is_key);
  const int width = static_cast<int>(side.width);
  __syncwarp();
  if (is_key) {
#pragma unroll 1
    for (int j = lane; j < rope.dim / 2; j += kWarp) {
      RopeRotate(turn(j), &s_row[RopeFirst(rope, j)], &s_row[RopeSecond(rope, j)]);
    }
    __syncwarp();
  }
  [[maybe_unused]] float min = Infinity(), max = -Infinity(), poison = 0.f;
  if constexpr (kHasRowParams<kKv> || kKv == DType::kFloat8E4M3) {
#pragma unroll 1
    for (int d = lane; d < width; d += kWarp) {
      const float x = RoundTo<E>(s_row[d]);
      s_row[d] = x;
      min = fminf(min, x);
      max = fmaxf(max, x);
      poison = fmaf(x, 0.f, poison);
    }
    __syncwarp();
  }
  [[maybe_unused]] RowScale scale{};
  if constexpr (kHasRowParams<kKv>) {
    scale = GroupRowScale<E, Traits::kBits, kWarp>(min, max, poison);
    if (lane == 0) StoreRowScale<E>(side, row, scale);
  }
  [[maybe_unused]] float fp8_scale = 0.f;
  if constexpr (kKv == DType::kFloat8E4M3) {
    fp8_scale = static_cast<const float*>(side.params)[layer * params.cache.num_kv_heads + head];
  }
#pragma unroll 1
  for (int d = lane * kChunk; d < width; d += kWarp * kChunk) {
    float x[kChunk];
#pragma unroll
    for (int e = 0; e < kChunk; ++e) x[e] = s_row[d + e];
    StoreEncoded<Traits>(side, row, d, scale, fp8_scale, x);
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

// One row of kWidth elements by a warp, in registers, into row `row` of [L,N,K,P], which is kv head `head` of `layer`.
// Short: its instructions take longer to arrive than to run. turn(j): the SinCos of pair j. s_row[kWidth]: for rows of
// which RoPE turns a part.
template <class Traits, int kWidth, class Turn>
__device__ inline void StoreWarpRow(const AppendParams& params, bool is_key, int64_t row, int64_t layer, int64_t head,
                                    const WarpRow<kWidth>& loaded, Turn turn, float* s_row) {
  using E = typename Traits::E;
  using Row = WarpRow<kWidth>;
  constexpr DType kKv = Traits::kKvDType;
  constexpr int kPairs = Row::kPairs, kColumns = 2 * kPairs, kHalf = kWidth / 2;
  const RopeParams& rope = params.rope;
  const Side side = SideOf(params, is_key);
  const int lane = Row::Lane(), column = lane * kColumns;  // of either half
  [[maybe_unused]] float fp8_scale = 0.f;
  if constexpr (kKv == DType::kFloat8E4M3) {
    fp8_scale = static_cast<const float*>(side.params)[layer * params.cache.num_kv_heads + head];
  }

  uint32_t pairs[2 * kPairs];
#pragma unroll
  for (int i = 0; i < 2 * kPairs; ++i) pairs[i] = loaded.half[i / kPairs].pairs[i % kPairs];
  const bool rotated = is_key && rope.dim != 0;
  if (rotated || side.bias != nullptr) {
    float x[2][kColumns];
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
      x[i / kPairs][i % kPairs * 2] = Low<E>(pairs[i]);
      x[i / kPairs][i % kPairs * 2 + 1] = High<E>(pairs[i]);
    }
    if (side.bias != nullptr) {
#pragma unroll
      for (int e = 0; e < 2 * kColumns; ++e) {
        const int64_t i = head * kWidth + e / kColumns * kHalf + column + e % kColumns;
        const float bias = params.bias_dtype == DType::kFloat32 ? static_cast<const float*>(side.bias)[i]
                                                                : ToFloat(static_cast<const E*>(side.bias)[i]);
        x[e / kColumns][e % kColumns] = AddRn(x[e / kColumns][e % kColumns], bias);
      }
    }
    if (rotated && rope.dim == kWidth) {
      SinCos turns[kColumns];
#pragma unroll
      for (int e = 0; e < kColumns; ++e) {
        turns[e] = turn(rope.interleaved ? e / kPairs * (kHalf / 2) + column / 2 + e % kPairs : column + e);
      }
      if (rope.interleaved) {
#pragma unroll
        for (int e = 0; e < kColumns; ++e) {
          RopeRotate(turns[e], &x[e / kPairs][e % kPairs * 2], &x[e / kPairs][e % kPairs * 2 + 1]);
        }
      } else {
#pragma unroll
        for (int e = 0; e < kColumns; ++e) RopeRotate(turns[e], &x[0][e], &x[1][e]);
      }
    } else if (rotated) {
#pragma unroll
      for (int e = 0; e < 2 * kColumns; ++e) {
        s_row[e / kColumns * kHalf + column + e % kColumns] = x[e / kColumns][e % kColumns];
      }
      __syncwarp();
#pragma unroll 1
      for (int j = threadIdx.x % kWarp; j < rope.dim / 2; j += kWarp) {
        RopeRotate(turn(j), &s_row[RopeFirst(rope, j)], &s_row[RopeSecond(rope, j)]);
      }
      __syncwarp();
#pragma unroll
      for (int e = 0; e < 2 * kColumns; ++e) {
        x[e / kColumns][e % kColumns] = s_row[e / kColumns * kHalf + column + e % kColumns];
      }
      __syncwarp();  // the row is free for the next one
    }
#pragma unroll
    for (int i = 0; i < 2 * kPairs; ++i) {
      pairs[i] = RoundPair<E>(x[i / kPairs][i % kPairs * 2], x[i / kPairs][i % kPairs * 2 + 1]);
    }
  }

  const bool stores = kWarp == Row::kLanes || threadIdx.x % kWarp < Row::kLanes;
  if constexpr (!kHasRowParams<kKv> && kKv != DType::kFloat8E4M3) {
    NormaliseNans<E>(pairs);
    if (!stores) return;
    typename Row::Half* to = static_cast<typename Row::Half*>(side.pool) + row * (2 * Row::kLanes) + lane;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      typename Row::Half half;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) half.pairs[i] = pairs[h * kPairs + i];
      to[h * Row::kLanes] = half;
    }
  } else {
    [[maybe_unused]] RowScale scale{};
    [[maybe_unused]] float largest = 0.f;
    if constexpr (kHasRowParams<kKv>) {
      scale = PairsRowScale<E, Traits::kBits, Row::kLanes>(pairs);
      if (threadIdx.x % kWarp == 0) StoreRowScale<E>(side, row, scale);
    } else {
      largest = LargestMagnitude<E>(pairs);
    }
    uint32_t codes[2];
    const auto encode = [&](auto pair) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        uint32_t found[kPairs];
#pragma unroll
        for (int i = 0; i < kPairs; ++i) {
          found[i] = pair(Low<E>(pairs[h * kPairs + i]), High<E>(pairs[h * kPairs + i]));
        }
        codes[h] = found[0];
        if constexpr (kKv == DType::kInt4) {
          // The order of Int4Shift: even elements in the low half of a word, odd ones in the high half.
          if constexpr (kPairs == 2) codes[h] += found[1] << 4;
          codes[h] <<= lane % (4 / kPairs) * (4 * kPairs);
#pragma unroll
          for (int step = 1; step < 4 / kPairs; step *= 2) codes[h] |= __shfl_xor_sync(~0u, codes[h], step);
        } else if constexpr (kPairs == 2) {
          codes[h] += found[1] << 16;
        }
      }
    };
    if constexpr (kHasRowParams<kKv>) {
      const RowEncoder<Traits::kBits> encoder(scale);
      encode([&](float low, float high) {
        const uint32_t pair = encoder.Pair(low, high);
        return Traits::kBits == 8 ? pair : (pair | pair << 12) & 0xf000fu;
      });
    } else {
      const Fp8Encoder encoder(fp8_scale);
      if (encoder.IsUsual(largest)) {
        encode([&](float low, float high) { return encoder.Pair(low, high); });
      } else {
        encode([&](float low, float high) { return encoder.AnyPair(low, high); });
      }
    }
    if constexpr (kKv == DType::kInt4) {
      // Eight codes a word: of a word's lanes one stores it.
      constexpr int kSharing = 4 / kPairs;
      uint32_t* to = static_cast<uint32_t*>(side.pool) + row * (kWidth / 8) + lane / kSharing;
      if (stores && lane % kSharing == 0) {
        to[0] = codes[0];
        to[kWidth / 16] = codes[1];
      }
    } else if (stores) {
      using Code = std::conditional_t<kPairs == 2, uint32_t, uint16_t>;
      Code* to = static_cast<Code*>(side.pool) + row * (2 * Row::kLanes) + lane;
      to[0] = static_cast<Code>(codes[0]);
      to[Row::kLanes] = static_cast<Code>(codes[1]);
    }
  }
}

}  // namespace turboattn::append

#endif  // TURBOATTN_KERNELS_COMMON_APPEND_ROW_CUH_

// Two E in 32 bits, and some such pairs: what a lane holds of a row.
#ifndef TURBOATTN_KERNELS_COMMON_APPEND_PAIRS_CUH_
#define TURBOATTN_KERNELS_COMMON_APPEND_PAIRS_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/common/chunk.cuh"
#include "kernels/common/dtypes.h"
#include "kernels/common/kv_codec.h"

namespace turboattn::append {

template <class E>
__device__ inline float Low(uint32_t pair) {
  return ToFloat(E{static_cast<uint16_t>(pair)});
}
template <class E>
__device__ inline float High(uint32_t pair) {
  return ToFloat(E{static_cast<uint16_t>(pair >> 16)});
}

// Two floats, each rounded to E. Any NaN will do for NaN.
template <class E>
__device__ inline uint32_t RoundPair(float low, float high) {
#if __CUDA_ARCH__ >= 800
  uint32_t pair;
  if constexpr (std::is_same_v<E, bf16>) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  }
  return pair;
#else
  return FromFloat<E>(low).bits | static_cast<uint32_t>(FromFloat<E>(high).bits) << 16;
#endif
}

// The lesser of either half; NaN where one of the two is NaN.
template <class E>
__device__ inline uint32_t MinPair(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 800
  uint32_t pair;
  if constexpr (std::is_same_v<E, bf16>) {
    asm("min.NaN.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  } else {
    asm("min.NaN.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  }
  return pair;
#else
  const auto min = [](float x, float y) { return IsNan(x) || x < y ? x : y; };
  return RoundPair<E>(min(Low<E>(a), Low<E>(b)), min(High<E>(a), High<E>(b)));
#endif
}

template <class E>
__device__ inline uint32_t MaxPair(uint32_t a, uint32_t b) {
#if __CUDA_ARCH__ >= 800
  uint32_t pair;
  if constexpr (std::is_same_v<E, bf16>) {
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(pair) : "r"(a), "r"(b));
  }
  return pair;
#else
  return MinPair<E>(a ^ 0x80008000u, b ^ 0x80008000u) ^ 0x80008000u;
#endif
}

// Every NaN with the bits that FromFloat gives it.
template <class E, int kPairs>
__device__ inline void NormaliseNans(uint32_t (&pairs)[kPairs]) {
  uint32_t any = pairs[0];
#pragma unroll
  for (int i = 1; i < kPairs; ++i) any = MaxPair<E>(any, pairs[i]);
  if (!IsNan(Low<E>(any)) && !IsNan(High<E>(any))) return;
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const uint32_t low = FromFloat<E>(Low<E>(pairs[i])).bits, high = FromFloat<E>(High<E>(pairs[i])).bits;
    pairs[i] = low | high << 16;
  }
}

// The largest magnitude; NaN if an element is.
template <class E, int kPairs>
__device__ inline float LargestMagnitude(const uint32_t (&pairs)[kPairs]) {
  constexpr uint32_t kMagnitudes = 0x7fff7fffu;
  uint32_t largest = pairs[0] & kMagnitudes;
#pragma unroll
  for (int i = 1; i < kPairs; ++i) largest = MaxPair<E>(largest, pairs[i] & kMagnitudes);
  return Low<E>(MaxPair<E>(largest, largest >> 16));
}

// Scale and zero of a row of which each lane has some pairs. Run by a whole warp, in groups of kLanes consecutive lanes
// with a row each; every lane gets its row's result.
template <class E, int kBits, int kLanes, int kPairs>
__device__ inline RowScale PairsRowScale(const uint32_t (&pairs)[kPairs]) {
  uint32_t min = pairs[0], max = pairs[0];
#pragma unroll
  for (int i = 1; i < kPairs; ++i) {
    min = MinPair<E>(min, pairs[i]);
    max = MaxPair<E>(max, pairs[i]);
  }
  // One pair from here on, of the minimum and the negative maximum. Both are NaN if an element is, one is infinite if
  // an element is.
  constexpr uint32_t kHighSign = 0x80000000u;
  uint32_t both = MinPair<E>(__byte_perm(min, max, 0x5410) ^ kHighSign, __byte_perm(min, max, 0x7632) ^ kHighSign);
#pragma unroll
  for (int step = kLanes / 2; step > 0; step /= 2) both = MinPair<E>(both, __shfl_xor_sync(~0u, both, step));
  const float least = Low<E>(both), largest = -High<E>(both);
  const RowScale row = MakeRowScale<E, kBits>(least, largest, true);
  if (row.scale > 0.f && row.scale < Infinity()) return row;  // then all is finite
  return MakeRowScale<E, kBits>(least, largest, IsFinite(least) && IsFinite(largest));
}

}  // namespace turboattn::append

#endif  // TURBOATTN_KERNELS_COMMON_APPEND_PAIRS_CUH_

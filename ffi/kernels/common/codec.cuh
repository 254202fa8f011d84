// How stored codes of quantised keys and values become E in registers, as kv_codec.h decodes them. One struct a format
// (int8.cuh, int4.cuh, fp8.cuh), which has
//
//   Scale                               what the decoding of a row takes
//   kPerWord                            codes in 32 bits
//   Neighbours(word, scale, pairs)      kPerWord neighbouring elements of a row, two a pair, in their order
//   MaySaturate(scale)                  whether codes of such a row may pass what E or Shrunk() can hold, or are NaN
//   Shrunk(word, scale, pairs)          of rows that do not saturate: the same divided by kShrink, a power of two, in
//                                       fewer instructions and with one rounding to E, not of the float32 sum
//   kMiddle                             int8, int4: the middle code
//   KeyCodes(word, pairs)               as Neighbours, but the codes themselves, less kMiddle, in fp16
//   ValueCodes(word, pairs)             codes in fp16, pair i code i of both rows that the word's halves are of; int8
//                                       and int4 as subnormal numbers, 2^-24 times the code, and 2^-20 times that of an
//                                       int4 pair with i odd
//   UnitElement(unit, i)                which element of a 16-byte chunk is code i of its 16-bit unit `unit`, as
//                                       ValueCodes counts codes
//
// Codes that are not scaled take a quarter of the instructions of decoded ones or less; scales and zeros are then
// factors of scores and of probabilities. Tensor cores take subnormal fp16 as they are and at full speed, so that the
// bits of a code are a number where they lie.
#ifndef TURBOATTN_KERNELS_COMMON_CODEC_CUH_
#define TURBOATTN_KERNELS_COMMON_CODEC_CUH_

#include <cstdint>
#include <type_traits>

#include "core/params.h"
#include "kernels/common/dtypes.h"
#include "kernels/common/kv_codec.h"
#include "kernels/common/ptx.cuh"

namespace turboattn {

template <class E, DType kKv>
struct Codec {  // unquantised: nothing to decode
  struct Scale {};
  static constexpr float kShrink = 1.f;
};

// (scale, zero) as they are stored, two E.
template <class E>
__device__ __forceinline__ RowScale UnpackRowScale(uint32_t packed) {
  E scale, zero;
  scale.bits = static_cast<uint16_t>(packed);
  zero.bits = static_cast<uint16_t>(packed >> 16);
  return {ToFloat(scale), ToFloat(zero)};
}

// The largest finite E, twice.
template <class E>
constexpr uint32_t kMaxFinitePair = std::is_same_v<E, bf16> ? 0x7f7f7f7fu : 0x7bff7bffu;

// For factors of the scale up to `largest`.
template <class E>
__device__ __forceinline__ bool MaySaturate(RowScale row, float largest) {
  return !(fabsf(row.scale) * largest + fabsf(row.zero) <= MaxFinite<E>());
}

// Two codes, as floats, of a row with these parameters. The product of a code of up to 8 bits and a scale of at most 11
// significant bits is exact in float32, so one fma rounds like the multiplication and the addition. Decoded rows are
// finite or all NaN: Inf is an overflow, which saturates.
template <class E>
__device__ __forceinline__ uint32_t DecodePair(float low, float high, RowScale row) {
  const uint32_t pair = Pack<E>(__fmaf_rn(low, row.scale, row.zero), __fmaf_rn(high, row.scale, row.zero));
  return ClampPair<E>(pair, kMaxFinitePair<E>);
}

// int8 and int4 as bf16. The bits of a code are, as bf16, 2^-133 times the code, from 128 up too: subnormal numbers and
// the smallest normal ones are equally far apart. One fma then makes the element, but for scales from 2^-5 up its
// factor would pass bf16: elements are made 2^12 times smaller. Those below 2^-114 become subnormal numbers and lose
// bits; rows with scales from 2^7 up, of 2,000 from their least to their largest element at int4, are not easy ones.
constexpr float kShrinkBf16 = 0x1p12f, kFactorBf16 = 0x1p133 / kShrinkBf16;

}  // namespace turboattn

#endif  // TURBOATTN_KERNELS_COMMON_CODEC_CUH_

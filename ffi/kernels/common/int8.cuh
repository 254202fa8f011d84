// int8 codes to E, exactly as the contract decodes them: E(code * scale + zero). The product of an 8-bit code and a
// scale of at most 11 significant bits is exact in float32, so one fma rounds like the multiplication and the addition.
#ifndef TURBOATTN_KERNELS_COMMON_INT8_CUH_
#define TURBOATTN_KERNELS_COMMON_INT8_CUH_

#include <cstdint>

#include "kernels/common/dtypes.h"
#include "kernels/common/kv_codec.h"

namespace turboattn {

// (scale, zero) as they are stored, two E.
template <class E>
__device__ __forceinline__ RowScale UnpackRowScale(uint32_t packed) {
  E scale, zero;
  scale.bits = static_cast<uint16_t>(packed);
  zero.bits = static_cast<uint16_t>(packed >> 16);
  return {ToFloat(scale), ToFloat(zero)};
}

// Byte `kByte` of four codes as a float: under the exponent of 2^23 the code is the low mantissa byte.
template <int kByte>
__device__ __forceinline__ float CodeToFloat(uint32_t codes) {
  return __uint_as_float(__byte_perm(codes, 0x4b000000u, 0x7650 | kByte)) - 8388608.f;
}

template <class E>
__device__ __forceinline__ uint32_t PackSaturated(float low, float high);
template <>
__device__ __forceinline__ uint32_t PackSaturated<bf16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  // Decoded rows are finite or all NaN: Inf is an overflow, which saturates.
  asm("{ .reg .b32 top, bottom; mov.b32 top, 0x7f7f7f7f; mov.b32 bottom, 0xff7fff7f;\n"
      "min.NaN.bf16x2 %0, %0, top; max.NaN.bf16x2 %0, %0, bottom; }"
      : "+r"(packed));
  return packed;
}
template <>
__device__ __forceinline__ uint32_t PackSaturated<fp16>(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  asm("{ .reg .b32 top, bottom; mov.b32 top, 0x7bff7bff; mov.b32 bottom, 0xfbfffbff;\n"
      "min.NaN.f16x2 %0, %0, top; max.NaN.f16x2 %0, %0, bottom; }"
      : "+r"(packed));
  return packed;
}

// Bytes kLow and kHigh of `codes`, of rows with these parameters.
template <class E, int kLow, int kHigh>
__device__ __forceinline__ uint32_t DecodeCodes(uint32_t codes, RowScale low, RowScale high) {
  return PackSaturated<E>(__fmaf_rn(CodeToFloat<kLow>(codes), low.scale, low.zero),
                          __fmaf_rn(CodeToFloat<kHigh>(codes), high.scale, high.zero));
}

}  // namespace turboattn

#endif  // TURBOATTN_KERNELS_COMMON_INT8_CUH_

// Element types and their conversions to and from float32, for host and device. All conversions round half to even and
// keep subnormals; the integer paths give the same bits whatever the flush-to-zero state of the thread. The GPU's own
// conversions give the same bits too, but for NaN, whose bits are set apart.
#ifndef TURBOATTN_KERNELS_COMMON_DTYPES_H_
#define TURBOATTN_KERNELS_COMMON_DTYPES_H_

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define TA_HD __host__ __device__ __forceinline__
#else
#define TA_HD inline
#endif

namespace turboattn {

struct bf16 {
  uint16_t bits;
};
struct fp16 {
  uint16_t bits;
};
struct fp8_e4m3 {
  uint8_t bits;
};

TA_HD float BitsToFloat(uint32_t bits) {
#if defined(__CUDA_ARCH__)
  return __uint_as_float(bits);
#else
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
#endif
}

TA_HD uint32_t FloatToBits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_uint(x);
#else
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits;
#endif
}

TA_HD bool IsFinite(float x) { return (FloatToBits(x) & 0x7f800000u) != 0x7f800000u; }
TA_HD bool IsNan(float x) { return x != x; }
TA_HD float QuietNan() { return BitsToFloat(0x7fc00000u); }
TA_HD float Infinity() { return BitsToFloat(0x7f800000u); }

TA_HD float ToFloat(float x) { return x; }

TA_HD float ToFloat(bf16 x) { return BitsToFloat(static_cast<uint32_t>(x.bits) << 16); }

TA_HD float ToFloat(fp16 x) {
#if defined(__CUDA_ARCH__)
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
#else
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t body = static_cast<uint32_t>(x.bits & 0x7fffu) << 13;  // exponent and mantissa at their float32 places
  const uint32_t exponent = body & 0x0f800000u;
  const uint32_t normal = body + (112u << 23);   // bias 15 -> 127
  const uint32_t special = body + (224u << 23);  // Inf and NaN: exponent 31 -> 255
  // m * 2^-24 for a subnormal: put m under the exponent of 2^-14, subtract 2^-14. Both are float32 normals, so no flush
  // can touch them.
  const uint32_t subnormal = FloatToBits(BitsToFloat(body + (113u << 23)) - BitsToFloat(113u << 23));
  const uint32_t magnitude = exponent == 0x0f800000u ? special : exponent == 0u ? subnormal : normal;
  return BitsToFloat(sign | magnitude);
#endif
}

TA_HD float ToFloat(fp8_e4m3 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x80u) << 24;
  const uint32_t body = static_cast<uint32_t>(x.bits & 0x7fu);
  const uint32_t normal = (body << 20) + (120u << 23);                                               // bias 7 -> 127
  const uint32_t subnormal = FloatToBits(static_cast<float>(static_cast<int32_t>(body)) * 0x1p-9f);  // m / 8 * 2^-6
  const uint32_t magnitude = body == 0x7fu ? 0x7fc00000u : body < 8u ? subnormal : normal;  // no Inf; 0x7f is NaN
  return BitsToFloat(sign | magnitude);
}

#if defined(__CUDA_ARCH__)
// The bits of the nearest fp16 or bf16; NaN has other bits than FromFloat gives it. From sm_80 on by the instruction
// that converts two values, which is faster than the one for one.
__device__ __forceinline__ uint16_t HardwareFp16(float x) {
#if __CUDA_ARCH__ >= 800
  uint32_t bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(0.f), "f"(x));
  return static_cast<uint16_t>(bits);
#else
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
#endif
}
#if __CUDA_ARCH__ >= 800
#define TA_HARDWARE_BF16 1
__device__ __forceinline__ uint16_t HardwareBf16(float x) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(0.f), "f"(x));
  return static_cast<uint16_t>(bits);
}
#endif
#endif

// FromFloat<E>(x): the E nearest to x, ties to even; a value past the largest E becomes Inf (fp8: NaN, it has no Inf);
// NaN stays NaN.
template <class E>
TA_HD E FromFloat(float x);

template <>
TA_HD float FromFloat<float>(float x) {
  return x;
}

template <>
TA_HD bf16 FromFloat<bf16>(float x) {
  const uint32_t bits = FloatToBits(x);
  const uint32_t nan = ((bits >> 16) & 0x8000u) | 0x7fc0u;
#if defined(TA_HARDWARE_BF16)
  const uint32_t rounded = HardwareBf16(x);
#else
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
#endif
  return bf16{static_cast<uint16_t>(IsNan(x) ? nan : rounded)};
}

template <>
TA_HD fp16 FromFloat<fp16>(float x) {
  const uint32_t bits = FloatToBits(x);
  const uint32_t sign = (bits >> 16) & 0x8000u;
#if defined(__CUDA_ARCH__)
  return fp16{static_cast<uint16_t>(IsNan(x) ? sign | 0x7e00u : HardwareFp16(x))};
#else
  const uint32_t magnitude = bits & 0x7fffffffu;
  // Normal result: drop 13 mantissa bits with ties to even, rebias 127 -> 15. A carry out of the mantissa gives the
  // next exponent, at the top Inf.
  const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
  // Subnormal result: adding 0.5 leaves the float32 sum with an ulp of 2^-24, fp16's step there, so the addition itself
  // rounds to even.
  const uint32_t subnormal = FloatToBits(BitsToFloat(magnitude) + 0.5f) - FloatToBits(0.5f);
  const uint32_t value = magnitude > 0x7f800000u ? 0x7e00u
                         : magnitude >= 0x47800000u
                             ? 0x7c00u  // 2^16 and above, and Inf; 65520 .. 65536 carry into Inf by themselves
                         : magnitude < 0x38800000u ? subnormal  // below 2^-14
                                                   : normal;
  return fp16{static_cast<uint16_t>(sign | value)};
#endif
}

template <>
TA_HD fp8_e4m3 FromFloat<fp8_e4m3>(float x) {
  const uint32_t bits = FloatToBits(x);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude + 0x7ffffu + ((magnitude >> 20) & 1u) - (120u << 23)) >> 20;
  // As for fp16: 2^14 has an ulp of 2^-9, the step of the subnormals.
  const uint32_t subnormal = FloatToBits(BitsToFloat(magnitude) + 0x1p14f) - FloatToBits(0x1p14f);
  const uint32_t value = magnitude > 0x43e80000u
                             ? 0x7fu  // above 464, the tie between 448 and the absent 480, and Inf and NaN
                         : magnitude < 0x3c800000u ? subnormal  // below 2^-6
                                                   : normal;
  return fp8_e4m3{static_cast<uint8_t>(sign | value)};
}

// The E nearest to x, as a float32. Any NaN will do for NaN.
template <class E>
TA_HD float RoundTo(float x) {
  return ToFloat(FromFloat<E>(x));
}
#if defined(__CUDACC__)
template <>
TA_HD float RoundTo<bf16>(float x) {
#if defined(TA_HARDWARE_BF16)
  return ToFloat(bf16{HardwareBf16(x)});
#else
  return ToFloat(FromFloat<bf16>(x));
#endif
}
template <>
TA_HD float RoundTo<fp16>(float x) {
#if defined(__CUDA_ARCH__)
  return ToFloat(fp16{HardwareFp16(x)});
#else
  return ToFloat(FromFloat<fp16>(x));
#endif
}
#endif

// The largest finite E, as a float32.
template <class E>
TA_HD float MaxFinite();
template <>
TA_HD float MaxFinite<float>() {
  return BitsToFloat(0x7f7fffffu);
}
template <>
TA_HD float MaxFinite<bf16>() {
  return BitsToFloat(0x7f7f0000u);
}
template <>
TA_HD float MaxFinite<fp16>() {
  return 65504.f;
}

// One float32 operation, rounded once, that no compiler may merge with its neighbour. The host side relies on
// -ffp-contract=off.
TA_HD float MulRn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
TA_HD float AddRn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}
TA_HD float SubRn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fsub_rn(a, b);
#else
  return a - b;
#endif
}
TA_HD float DivRn(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

}  // namespace turboattn

#endif  // TURBOATTN_KERNELS_COMMON_DTYPES_H_

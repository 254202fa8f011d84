// Encoding and decoding of quantised keys and values. Every float32 operation is rounded once (MulRn, AddRn, ...), so
// that CPU, CUDA and the numpy codec write the same bytes.
//
// int8, int4 (n bits): zero = E(min), scale = E((max - min) * c), c = float32(1 / (2^n - 1)), code =
// clamp(round_half_even((x - zero) / scale)), value = E(code * scale + zero). fp8 e4m3: code = fp8(clip(x / scale)),
// value = E(code * scale).
#ifndef TURBOATTN_KERNELS_COMMON_KV_CODEC_H_
#define TURBOATTN_KERNELS_COMMON_KV_CODEC_H_

#include <cstdint>

#include "kernels/common/dtypes.h"

namespace turboattn {

// (scale, zero) of one row as they will be read back, that is after rounding to E. A row with a NaN or Inf in it has
// NaN for both.
struct RowScale {
  float scale;
  float zero;
};

// `min` and `max` over the row's elements, which are E values; `all_finite`: none of them is NaN or Inf (min and max
// are not used if one is).
template <class E, int kBits>
TA_HD RowScale MakeRowScale(float min, float max, bool all_finite) {
  if (!all_finite) return {QuietNan(), QuietNan()};
  constexpr float kStep = static_cast<float>(1.0 / ((1 << kBits) - 1));
  float scale = RoundTo<E>(MulRn(SubRn(max, min), kStep));
  // bf16 and float32 scales below 2^-126 would be subnormal floats, which XLA's CPU and GPU code may flush: store 0 so
  // that all agree. fp16 subnormals are normal float32 values and stay.
  if (scale < 0x1p-126f) scale = 0.f;
  return {scale, min == 0.f ? 0.f : min};  // a minimum over +0 and -0 depends on the order: both are stored as +0
}

template <int kBits>
TA_HD uint8_t EncodeCode(float x, RowScale row) {
  constexpr float kMaxCode = static_cast<float>((1 << kBits) - 1);
  const float steps = DivRn(SubRn(x, row.zero), row.scale);
  const float clamped = steps > 0.f ? (steps < kMaxCode ? steps : kMaxCode) : 0.f;  // NaN (a NaN row) ends at 0
  // 2^23 has an ulp of 1: the addition rounds half to even, and the code is in the low mantissa bits.
  const uint32_t code = FloatToBits(AddRn(clamped, 0x1p23f)) & 0xffu;
  return row.scale == 0.f ? uint8_t{0} : static_cast<uint8_t>(code);
}

// The largest magnitude of a decoded value: E's largest when the row was finite (as finite parameters show), else no
// bound.
template <class E>
TA_HD float DecodeLimit(bool finite) {
  return finite ? MaxFinite<E>() : Infinity();
}

template <class E>
TA_HD float DecodeCode(uint8_t code, RowScale row) {
  const float x = AddRn(MulRn(static_cast<float>(static_cast<int32_t>(code)), row.scale), row.zero);
  const float limit = DecodeLimit<E>(IsFinite(row.scale) && IsFinite(row.zero));
  return RoundTo<E>(x > limit ? limit : x < -limit ? -limit : x);
}

TA_HD fp8_e4m3 EncodeFp8(float x, float scale) {
  if (scale == 0.f) return fp8_e4m3{0};
  const float y = DivRn(x, scale);
  if (!IsFinite(y)) return fp8_e4m3{0x7f};
  return FromFloat<fp8_e4m3>(y > 448.f ? 448.f : y < -448.f ? -448.f : y);
}

template <class E>
TA_HD float DecodeFp8(fp8_e4m3 code, float scale) {
  const float x = MulRn(ToFloat(code), scale);
  const float limit = DecodeLimit<E>(IsFinite(scale));
  return RoundTo<E>(x > limit ? limit : x < -limit ? -limit : x);
}

// int4 order: 8 consecutive elements e0..e7 fill one little-endian uint32, nibbles from the low end: e0 e2 e4 e6 e1 e3
// e5 e7.
TA_HD constexpr int Int4Shift(int element) { return 4 * ((element & 1) * 4 + (element >> 1)); }  // element in [0, 8)

// Where element d of an int4 row is: byte d/8*4 + Int4Shift(d%8)/8, high or low nibble.
TA_HD uint8_t Int4Code(const uint8_t* row, int64_t d) {
  const int shift = Int4Shift(static_cast<int>(d & 7));
  return static_cast<uint8_t>((row[(d >> 3) * 4 + (shift >> 3)] >> (shift & 4)) & 0xf);
}

TA_HD uint32_t PackInt4(const uint8_t codes[8]) {
  uint32_t packed = 0;
  for (int e = 0; e < 8; ++e) packed |= static_cast<uint32_t>(codes[e] & 0xf) << Int4Shift(e);
  return packed;
}

}  // namespace turboattn

#endif  // TURBOATTN_KERNELS_COMMON_KV_CODEC_H_

// int4 codes to E: see codec.cuh. The order of nibbles (kv_codec.h) puts neighbours 2 i and 2 i + 1 of eight elements
// into nibble i of the low and of the high half of a word, so both ways of decoding a word are one.
#ifndef TURBOATTN_KERNELS_COMMON_INT4_CUH_
#define TURBOATTN_KERNELS_COMMON_INT4_CUH_

#include "kernels/common/codec.cuh"

namespace turboattn {

template <class E>
struct Codec<E, DType::kInt4> {
  using Scale = RowScale;
  static constexpr int kPerWord = 8;
  static constexpr int kMiddle = 8;

  static constexpr bool kIsBf16 = std::is_same_v<E, bf16>;
  static constexpr float kShrink = kIsBf16 ? kShrinkBf16 : 1.f;

  static __device__ __forceinline__ bool MaySaturate(Scale scale) {
    return turboattn::MaySaturate<E>(scale, kIsBf16 ? kFactorBf16 : 16.f);
  }

  static __device__ __forceinline__ void Neighbours(uint32_t word, Scale scale, uint32_t (&pairs)[4]) {
    const uint32_t top = word >> 16;
    pairs[0] = DecodePair<E>(ToFloat<0>(word), ToFloat<0>(top), scale);
    pairs[1] = DecodePair<E>(ToFloat<1>(word), ToFloat<1>(top), scale);
    pairs[2] = DecodePair<E>(ToFloat<2>(word), ToFloat<2>(top), scale);
    pairs[3] = DecodePair<E>(ToFloat<3>(word), ToFloat<3>(top), scale);
  }

  static __device__ __forceinline__ void Shrunk(uint32_t word, Scale scale, uint32_t (&pairs)[4]) {
    constexpr float kFactor = kIsBf16 ? kFactorBf16 : 1.f;
    const auto twice = [](float x) { return Pack<E>(x, x); };
    const uint32_t factor = twice(kFactor * scale.scale), zero = twice(scale.zero / kShrink);
    if constexpr (kIsBf16) {
      ValueCodes(word, pairs);
      const uint32_t sixteenth = twice(kFactor / 16 * scale.scale);
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = FmaPair<E>(pairs[i], i % 2 == 0 ? factor : sixteenth, zero);
    } else {
      ToFp16(word, kMinus1024, kMinus64, pairs);
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = FmaPair<E>(pairs[i], factor, zero);
    }
  }

  static __device__ __forceinline__ void KeyCodes(uint32_t word, uint32_t (&pairs)[4]) {
    ToFp16(word, kMinus1032, kMinus72, pairs);
  }

  static __device__ __forceinline__ void ValueCodes(uint32_t word, uint32_t (&pairs)[4]) {
    const uint32_t rest = word >> 8;
    pairs[0] = word & 0x000f000fu;
    pairs[1] = word & 0x00f000f0u;
    pairs[2] = rest & 0x000f000fu;
    pairs[3] = rest & 0x00f000f0u;
  }

  // Units 2 j and 2 j + 1 are the halves of word j.
  static __device__ __forceinline__ int UnitElement(int unit, int i) { return unit / 2 * 8 + unit % 2 + 2 * i; }

 private:
  static constexpr uint32_t kMinus1024 = 0xe400e400u, kMinus1032 = 0xe408e408u;  // fp16, twice
  static constexpr uint32_t kMinus64 = 0xd400d400u, kMinus72 = 0xd480d480u;

  // Under fp16's exponent of 1024 the nibble in bits 0 .. 3 counts 1, that in bits 4 .. 7 counts 16. minus: -1024 and
  // -1024 / 16, and what else is to be taken off.
  static __device__ __forceinline__ void ToFp16(uint32_t word, uint32_t minus, uint32_t minus_sixteenth,
                                                uint32_t (&pairs)[4]) {
    constexpr uint32_t k1024 = 0x64006400u, kSixteenth = 0x2c002c00u;
    const uint32_t rest = word >> 8;
    pairs[0] = AddPair(AndOr(word, 0x000f000fu, k1024), minus);
    pairs[1] = FmaPair<fp16>(AndOr(word, 0x00f000f0u, k1024), kSixteenth, minus_sixteenth);
    pairs[2] = AddPair(AndOr(rest, 0x000f000fu, k1024), minus);
    pairs[3] = FmaPair<fp16>(AndOr(rest, 0x00f000f0u, k1024), kSixteenth, minus_sixteenth);
  }

  // A nibble stays where it is, under the exponent that makes its lowest bit worth 1: 2^(23 - 4 kNibble).
  template <int kNibble>
  static __device__ __forceinline__ float ToFloat(uint32_t word) {
    static_assert(kNibble < 4);  // nibble 5 would reach into the exponent
    constexpr uint32_t kExponent = (150u - 4 * kNibble) << 23;
    return __uint_as_float(AndOr(word, 0xfu << (4 * kNibble), kExponent)) - __uint_as_float(kExponent);
  }
};

}  // namespace turboattn

#endif  // TURBOATTN_KERNELS_COMMON_INT4_CUH_

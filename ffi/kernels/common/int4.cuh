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

  // bf16: neither may 64 times the scale, see Neighbours<false>.
  static __device__ __forceinline__ bool MaySaturate(Scale scale) {
    return turboattn::MaySaturate<E>(scale, std::is_same_v<E, bf16> ? 64.f : 16.f);
  }

  template <bool kSaturates = true>
  static __device__ __forceinline__ void Neighbours(uint32_t word, Scale scale, uint32_t (&pairs)[4]) {
    if constexpr (!kSaturates) {
      constexpr float kUnit = std::is_same_v<E, bf16> ? 64.f : 1.f;  // 1 / kUnit of the codes
      const uint32_t factor = Pack<E>(kUnit * scale.scale, kUnit * scale.scale), zero = Pack<E>(scale.zero, scale.zero);
      if constexpr (std::is_same_v<E, bf16>) {
        SixtyFourths(word, pairs);
      } else {
        ToFp16(word, kMinus1024, kMinus64, pairs);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[i] = FmaPair<E>(pairs[i], factor, zero);
      return;
    }
    const uint32_t top = word >> 16;
    pairs[0] = DecodePair<E, kSaturates>(ToFloat<0>(word), ToFloat<0>(top), scale);
    pairs[1] = DecodePair<E, kSaturates>(ToFloat<1>(word), ToFloat<1>(top), scale);
    pairs[2] = DecodePair<E, kSaturates>(ToFloat<2>(word), ToFloat<2>(top), scale);
    pairs[3] = DecodePair<E, kSaturates>(ToFloat<3>(word), ToFloat<3>(top), scale);
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

  // 1/64 of the codes, in bf16, as in int8.cuh. Bits 4 .. 7 count 16 times as much.
  static __device__ __forceinline__ void SixtyFourths(uint32_t word, uint32_t (&pairs)[4]) {
    constexpr uint32_t k127 = 0x7f007f00u, k123 = 0x7d007d00u;  // 2^127, 2^123
    const uint32_t rest = word >> 8;
    pairs[0] = FmaPair<bf16>(word & 0x000f000fu, k127, 0);
    pairs[1] = FmaPair<bf16>(word & 0x00f000f0u, k123, 0);
    pairs[2] = FmaPair<bf16>(rest & 0x000f000fu, k127, 0);
    pairs[3] = FmaPair<bf16>(rest & 0x00f000f0u, k123, 0);
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

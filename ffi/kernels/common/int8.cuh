// int8 codes to E: see codec.cuh.
#ifndef TURBOATTN_KERNELS_COMMON_INT8_CUH_
#define TURBOATTN_KERNELS_COMMON_INT8_CUH_

#include "kernels/common/codec.cuh"

namespace turboattn {

template <class E>
struct Codec<E, DType::kInt8> {
  using Scale = RowScale;
  static constexpr int kPerWord = 4;
  static constexpr int kMiddle = 128;

  static __device__ __forceinline__ bool MaySaturate(Scale scale) { return turboattn::MaySaturate<E>(scale, 256.f); }

  template <bool kSaturates = true>
  static __device__ __forceinline__ void Neighbours(uint32_t word, Scale scale, uint32_t (&pairs)[2]) {
    if constexpr (!kSaturates) {
      constexpr float kUnit = std::is_same_v<E, bf16> ? 64.f : 1.f;  // 1 / kUnit of the codes
      const uint32_t factor = Pack<E>(kUnit * scale.scale, kUnit * scale.scale), zero = Pack<E>(scale.zero, scale.zero);
      if constexpr (std::is_same_v<E, bf16>) {
        pairs[0] = SixtyFourths<0x4140>(word);
        pairs[1] = SixtyFourths<0x4342>(word);
      } else {
        pairs[0] = ToFp16<0x4140>(word, kMinus1024);
        pairs[1] = ToFp16<0x4342>(word, kMinus1024);
      }
      pairs[0] = FmaPair<E>(pairs[0], factor, zero);
      pairs[1] = FmaPair<E>(pairs[1], factor, zero);
      return;
    }
    pairs[0] = DecodePair<E, kSaturates>(ToFloat<0>(word), ToFloat<1>(word), scale);
    pairs[1] = DecodePair<E, kSaturates>(ToFloat<2>(word), ToFloat<3>(word), scale);
  }

  static __device__ __forceinline__ int UnitElement(int unit, int i) { return 2 * unit + i; }

  static __device__ __forceinline__ void KeyCodes(uint32_t word, uint32_t (&pairs)[2]) {
    pairs[0] = ToFp16<0x4140>(word, kMinus1152);
    pairs[1] = ToFp16<0x4342>(word, kMinus1152);
  }

  static __device__ __forceinline__ void ValueCodes(uint32_t word, uint32_t (&pairs)[2]) {
    pairs[0] = __byte_perm(word, 0, 0x4240);
    pairs[1] = __byte_perm(word, 0, 0x4341);
  }

 private:
  static constexpr uint32_t kMinus1024 = 0xe400e400u, kMinus1152 = 0xe480e480u;  // fp16, twice

  // Under the exponent of 2^23 a byte is the low mantissa byte.
  template <int kByte>
  static __device__ __forceinline__ float ToFloat(uint32_t word) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7650 | kByte)) - 0x1p23f;
  }

  // Two bytes. Those of kSelector that are 4 are the exponent byte of fp16's 1024, under which a byte is the low one of
  // the mantissa. minus: -1024 and what else is to be taken off.
  template <int kSelector>
  static __device__ __forceinline__ uint32_t ToFp16(uint32_t word, uint32_t minus) {
    return AddPair(__byte_perm(word, 0x64646464u, kSelector), minus);
  }

  // 1/64 of two bytes, in bf16. The bits of a byte are, as bf16, 2^-133 times the byte, from 128 up too: subnormal
  // numbers and the smallest normal ones are equally far apart. 2^127 is the largest power of two there is. 3 of the 5
  // instructions a pair that float32 and packing take.
  template <int kSelector>
  static __device__ __forceinline__ uint32_t SixtyFourths(uint32_t word) {
    return FmaPair<bf16>(__byte_perm(word, 0, kSelector), 0x7f007f00u, 0);
  }
};

}  // namespace turboattn

#endif  // TURBOATTN_KERNELS_COMMON_INT8_CUH_

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

  static constexpr bool kIsBf16 = std::is_same_v<E, bf16>;
  static constexpr float kShrink = kIsBf16 ? kShrinkBf16 : 1.f;

  static __device__ __forceinline__ bool MaySaturate(Scale scale) {
    return turboattn::MaySaturate<E>(scale, kIsBf16 ? kFactorBf16 : 256.f);
  }

  static __device__ __forceinline__ void Neighbours(uint32_t word, Scale scale, uint32_t (&pairs)[2]) {
    pairs[0] = DecodePair<E>(ToFloat<0>(word), ToFloat<1>(word), scale);
    pairs[1] = DecodePair<E>(ToFloat<2>(word), ToFloat<3>(word), scale);
  }

  static __device__ __forceinline__ void Shrunk(uint32_t word, Scale scale, uint32_t (&pairs)[2]) {
    constexpr float kFactor = kIsBf16 ? kFactorBf16 : 1.f;
    const uint32_t factor = Pack<E>(kFactor * scale.scale, kFactor * scale.scale);
    const uint32_t zero = Pack<E>(scale.zero / kShrink, scale.zero / kShrink);
    if constexpr (kIsBf16) {
      pairs[0] = __byte_perm(word, 0, 0x4140);
      pairs[1] = __byte_perm(word, 0, 0x4342);
    } else {
      pairs[0] = ToFp16<0x4140>(word, kMinus1024);
      pairs[1] = ToFp16<0x4342>(word, kMinus1024);
    }
    pairs[0] = FmaPair<E>(pairs[0], factor, zero);
    pairs[1] = FmaPair<E>(pairs[1], factor, zero);
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
};

}  // namespace turboattn

#endif  // TURBOATTN_KERNELS_COMMON_INT8_CUH_

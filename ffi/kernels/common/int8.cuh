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

  // bf16: neither may the offset of Neighbours<false>.
  static __device__ __forceinline__ bool MaySaturate(Scale scale) {
    return turboattn::MaySaturate<E>(scale, std::is_same_v<E, bf16> ? 65536.f : 256.f);
  }

  template <bool kSaturates = true>
  static __device__ __forceinline__ void Neighbours(uint32_t word, Scale scale, uint32_t (&pairs)[2]) {
    if constexpr (!kSaturates) {
#if I8_HF == 2
      if constexpr (std::is_same_v<E, bf16>) {
        const float factor64 = scale.scale * 64.f;
        const uint32_t factor = Pack<E>(factor64, factor64), zero = Pack<E>(scale.zero, scale.zero);
        constexpr uint32_t k127 = 0x7f007f00u;
        pairs[0] = FmaPair<E>(FmaPair<E>(__byte_perm(word, 0, 0x4140), k127, 0), factor, zero);
        pairs[1] = FmaPair<E>(FmaPair<E>(__byte_perm(word, 0, 0x4342), k127, 0), factor, zero);
        return;
      }
#elif I8_HF == 1
      if constexpr (std::is_same_v<E, bf16>) {
        const uint32_t factor = Pack<E>(scale.scale, scale.scale), zero = Pack<E>(scale.zero, scale.zero);
        pairs[0] = FmaPair<E>(ToBf16<0x4140>(word), factor, zero);
        pairs[1] = FmaPair<E>(ToBf16<0x4342>(word), factor, zero);
        return;
      }
#endif
      if constexpr (std::is_same_v<E, bf16>) {
        // The offset is off by up to scale / 512, where the largest codes are rounded to a multiple of scale.
        const float offset = __fmaf_rn(-32768.f, scale.scale, scale.zero);
        const auto decode = [&](float x) { return __fmaf_rn(x, scale.scale, offset); };
        pairs[0] = Pack<E>(decode(Plus32768<0>(word)), decode(Plus32768<1>(word)));
        pairs[1] = Pack<E>(decode(Plus32768<2>(word)), decode(Plus32768<3>(word)));
      } else {
        const uint32_t factor = Pack<E>(scale.scale, scale.scale), zero = Pack<E>(scale.zero, scale.zero);
        pairs[0] = FmaPair<E>(ToFp16<0x4140>(word, kMinus1024), factor, zero);
        pairs[1] = FmaPair<E>(ToFp16<0x4342>(word, kMinus1024), factor, zero);
      }
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

  template <int kSelector>
  static __device__ __forceinline__ uint32_t ToBf16(uint32_t word) {
    constexpr uint32_t kOne = 0x3f803f80u, kMinus256 = 0xc380c380u, k128 = 0x43004300u;
    const uint32_t x = __byte_perm(word, 0x43434343u, kSelector);
    return FmaPair<bf16>(FmaPair<bf16>(x, kOne, kMinus256), AndXor(x, 0x00800080u, kOne), k128);
  }

  // Under the exponent of 2^15 it is the middle one.
  template <int kByte>
  static __device__ __forceinline__ float Plus32768(uint32_t word) {
    return __uint_as_float(__byte_perm(word, 0x47000000u, 0x7404 | kByte << 4));
  }
};

}  // namespace turboattn

#endif  // TURBOATTN_KERNELS_COMMON_INT8_CUH_

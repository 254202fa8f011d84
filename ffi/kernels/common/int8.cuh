// int8 codes to E: see codec.cuh.
#ifndef TURBOATTN_KERNELS_COMMON_INT8_CUH_
#define TURBOATTN_KERNELS_COMMON_INT8_CUH_

#include "kernels/common/codec.cuh"

namespace turboattn {

template <class E>
struct Codec<E, DType::kInt8> {
  using Scale = RowScale;
  static constexpr int kPerWord = 4;

  static __device__ __forceinline__ bool MaySaturate(Scale scale) { return turboattn::MaySaturate<E>(scale); }

  template <bool kSaturates = true>
  static __device__ __forceinline__ void Neighbours(uint32_t word, Scale scale, uint32_t (&pairs)[2]) {
    pairs[0] = DecodePair<E, kSaturates>(ToFloat<0>(word), ToFloat<1>(word), scale);
    pairs[1] = DecodePair<E, kSaturates>(ToFloat<2>(word), ToFloat<3>(word), scale);
  }

  static __device__ __forceinline__ int UnitElement(int unit, int i) { return 2 * unit + i; }

  static __device__ __forceinline__ void KeyCodes(uint32_t word, uint32_t (&pairs)[2]) {
    pairs[0] = __byte_perm(word, 0, 0x4140);
    pairs[1] = __byte_perm(word, 0, 0x4342);
  }

  static __device__ __forceinline__ void ValueCodes(uint32_t word, uint32_t (&pairs)[2]) {
    pairs[0] = __byte_perm(word, 0, 0x4240);
    pairs[1] = __byte_perm(word, 0, 0x4341);
  }

 private:
  // Under the exponent of 2^23 a byte is the low mantissa byte.
  template <int kByte>
  static __device__ __forceinline__ float ToFloat(uint32_t word) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7650 | kByte)) - 0x1p23f;
  }
};

}  // namespace turboattn

#endif  // TURBOATTN_KERNELS_COMMON_INT8_CUH_

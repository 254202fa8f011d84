// int8 codes to E: see codec.cuh.
#ifndef TURBOATTN_KERNELS_COMMON_INT8_CUH_
#define TURBOATTN_KERNELS_COMMON_INT8_CUH_

#include "kernels/common/codec.cuh"

namespace turboattn {

template <class E>
struct Codec<E, DType::kInt8> {
  using Scale = RowScale;
  static constexpr int kPerWord = 4;

  static __device__ __forceinline__ void Neighbours(uint32_t word, Scale scale, uint32_t (&pairs)[2]) {
    pairs[0] = DecodePair<E>(ToFloat<0>(word), ToFloat<1>(word), scale, scale);
    pairs[1] = DecodePair<E>(ToFloat<2>(word), ToFloat<3>(word), scale, scale);
  }

  static __device__ __forceinline__ void AcrossRows(uint32_t word, Scale low, Scale high, uint32_t (&pairs)[2]) {
    pairs[0] = DecodePair<E>(ToFloat<0>(word), ToFloat<2>(word), low, high);
    pairs[1] = DecodePair<E>(ToFloat<1>(word), ToFloat<3>(word), low, high);
  }

  static __device__ __forceinline__ int UnitElement(int unit, int i) { return 2 * unit + i; }

  // Under fp16's exponent of 1024 a byte is the low mantissa byte.
  static constexpr float kKeyOffset = 1024.f;
  static __device__ __forceinline__ float KeyWeight(int) { return 1.f; }

  static __device__ __forceinline__ void KeyCodes(uint32_t word, uint32_t (&pairs)[2]) {
    pairs[0] = __byte_perm(word, 0x64646464u, 0x4140);
    pairs[1] = __byte_perm(word, 0x64646464u, 0x4342);
  }

  static __device__ __forceinline__ void ValueCodes(uint32_t word, uint32_t (&pairs)[2]) {
    pairs[0] = AddPair(__byte_perm(word, 0x64646464u, 0x4240), kMinus1024);
    pairs[1] = AddPair(__byte_perm(word, 0x64646464u, 0x4341), kMinus1024);
  }

 private:
  static constexpr uint32_t kMinus1024 = 0xe400e400u;  // fp16, twice

  // Under the exponent of 2^23 a byte is the low mantissa byte.
  template <int kByte>
  static __device__ __forceinline__ float ToFloat(uint32_t word) {
    return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7650 | kByte)) - 0x1p23f;
  }
};

}  // namespace turboattn

#endif  // TURBOATTN_KERNELS_COMMON_INT8_CUH_

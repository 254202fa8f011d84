// fp8 e4m3 codes to E: see codec.cuh. One scale for all rows of a kv head, so a NaN code spoils its own element only.
#ifndef TURBOATTN_KERNELS_COMMON_FP8_CUH_
#define TURBOATTN_KERNELS_COMMON_FP8_CUH_

#include "kernels/common/codec.cuh"

namespace turboattn {

template <class E>
struct Codec<E, DType::kFloat8E4M3> {
  struct Scale {
    float scale;
    uint32_t limit;  // of decoded values, two E: see DecodeLimit
  };
  static constexpr int kPerWord = 4;
  static constexpr float kShrink = 1.f;

  static __device__ __forceinline__ Scale MakeScale(float scale) {
    return {scale, IsFinite(scale) ? kMaxFinitePair<E> : std::is_same_v<E, bf16> ? 0x7f807f80u : 0x7c007c00u};
  }

  static __device__ __forceinline__ bool MaySaturate(Scale scale) {
    return !(fabsf(scale.scale) * 448.f <= MaxFinite<E>());
  }

  static __device__ __forceinline__ void Neighbours(uint32_t word, Scale scale, uint32_t (&pairs)[2]) {
    Shrunk(word, scale, pairs);
    for (uint32_t& pair : pairs) pair = ClampPair<E>(pair, scale.limit);
  }

  static __device__ __forceinline__ void Shrunk(uint32_t word, Scale scale, uint32_t (&pairs)[2]) {
    const uint32_t first = Fp8ToFp16(word), second = Fp8ToFp16(word >> 16);
    pairs[0] = Decode(Low(first), High(first), scale.scale);
    pairs[1] = Decode(Low(second), High(second), scale.scale);
  }

  static __device__ __forceinline__ int UnitElement(int unit, int i) { return 2 * unit + i; }

  static __device__ __forceinline__ void KeyCodes(uint32_t word, uint32_t (&pairs)[2]) {
    pairs[0] = Fp8ToFp16(word);
    pairs[1] = Fp8ToFp16(word >> 16);
  }

  static __device__ __forceinline__ void ValueCodes(uint32_t word, uint32_t (&pairs)[2]) {
    KeyCodes(__byte_perm(word, 0, 0x3120), pairs);
  }

 private:
  static __device__ __forceinline__ float Low(uint32_t pair) { return ToFloat(fp16{static_cast<uint16_t>(pair)}); }
  static __device__ __forceinline__ float High(uint32_t pair) { return Low(pair >> 16); }

  static __device__ __forceinline__ uint32_t Decode(float low, float high, float scale) {
    return Pack<E>(__fmul_rn(low, scale), __fmul_rn(high, scale));
  }
};

}  // namespace turboattn

#endif  // TURBOATTN_KERNELS_COMMON_FP8_CUH_

// attention_tile.inl, once for each instruction set. A pragma with namespaces does what target_clones would, which
// cannot clone templates nor functions that take vectors.
#include "kernels/cpu/attention_tile.h"

#include <cmath>
#include <cstring>
#include <type_traits>

#include "kernels/common/dtypes.h"
#include "kernels/common/kv_codec.h"

// Tests build with 256 and 128, to run here what machines with narrower vectors would.
#if !defined(TURBOATTN_WIDEST_VECTOR)
#define TURBOATTN_WIDEST_VECTOR 512
#endif

#define TA_INLINE static inline __attribute__((always_inline))

namespace turboattn::cpu {
typedef float Vec4 __attribute__((vector_size(16)));
typedef float Vec8 __attribute__((vector_size(32)));
typedef int32_t IVec8 __attribute__((vector_size(32)));
}  // namespace turboattn::cpu

#if defined(__x86_64__)
#include <immintrin.h>

namespace turboattn::cpu::baseline {
constexpr int kLanes = 4;
typedef float Vec __attribute__((vector_size(16)));
typedef int32_t IVec __attribute__((vector_size(16)));
TA_INLINE Vec Fma(Vec a, Vec b, Vec c) { return a * b + c; }
TA_INLINE IVec LoadCodes(const void* codes) {
  const uint8_t* bytes = static_cast<const uint8_t*>(codes);
  return IVec{bytes[0], bytes[1], bytes[2], bytes[3]};
}
template <class Op>
TA_INLINE Vec4 Fold(Vec v, Op) {
  return v;
}
constexpr int kGemmRows = 4, kGemmVectors = 2;  // 8 accumulators + 2 + 1 of 16 registers
#include "kernels/cpu/attention_tile.inl"
}  // namespace turboattn::cpu::baseline

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c,bmi2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2")
#endif
namespace turboattn::cpu::avx2 {
constexpr int kLanes = 8;
typedef float Vec __attribute__((vector_size(32)));
typedef int32_t IVec __attribute__((vector_size(32)));
TA_INLINE Vec Fma(Vec a, Vec b, Vec c) { return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
TA_INLINE IVec LoadCodes(const void* codes) {
  return (IVec)_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(codes)));
}
template <class Op>
TA_INLINE Vec4 Fold(Vec v, Op op) {
  return op(__builtin_shufflevector(v, v, 0, 1, 2, 3), __builtin_shufflevector(v, v, 4, 5, 6, 7));
}
constexpr int kGemmRows = 6, kGemmVectors = 2;  // 12 accumulators + 2 + 1 of 16 registers
#include "kernels/cpu/attention_tile.inl"
}  // namespace turboattn::cpu::avx2
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2"))), \
                             apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2,prefer-vector-width=512")
#endif
namespace turboattn::cpu::avx512 {
constexpr int kLanes = 16;
typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IVec __attribute__((vector_size(64)));
TA_INLINE Vec Fma(Vec a, Vec b, Vec c) { return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
TA_INLINE IVec LoadCodes(const void* codes) {
  return (IVec)_mm512_maskz_cvtepu8_epi32(
      0xffff, _mm_loadu_si128(static_cast<const __m128i*>(codes)));  // maskz: without -Wuninitialized noise
}
template <class Op>
TA_INLINE Vec4 Fold(Vec v, Op op) {
  const Vec8 half = op(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7),
                       __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15));
  return op(__builtin_shufflevector(half, half, 0, 1, 2, 3), __builtin_shufflevector(half, half, 4, 5, 6, 7));
}
constexpr int kGemmRows = 6, kGemmVectors = 4;  // 24 accumulators + 4 + 1 of 32 registers
#include "kernels/cpu/attention_tile.inl"
}  // namespace turboattn::cpu::avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

namespace turboattn::cpu {
TakeBlock SelectTakeBlock() {
  __builtin_cpu_init();
  if (TURBOATTN_WIDEST_VECTOR >= 512 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return avx512::Take;
  }
  if (TURBOATTN_WIDEST_VECTOR >= 256 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"))
    return avx2::Take;
  return baseline::Take;
}
}  // namespace turboattn::cpu

#else  // aarch64 (NEON) and anything else with GCC's vector types

#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif

namespace turboattn::cpu::baseline {
constexpr int kLanes = 4;
typedef float Vec __attribute__((vector_size(16)));
typedef int32_t IVec __attribute__((vector_size(16)));
#if defined(__ARM_NEON)
TA_INLINE Vec Fma(Vec a, Vec b, Vec c) { return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
TA_INLINE Vec Fma(Vec a, Vec b, Vec c) { return a * b + c; }
#endif
TA_INLINE IVec LoadCodes(const void* codes) {
  const uint8_t* bytes = static_cast<const uint8_t*>(codes);
  return IVec{bytes[0], bytes[1], bytes[2], bytes[3]};
}
template <class Op>
TA_INLINE Vec4 Fold(Vec v, Op) {
  return v;
}
constexpr int kGemmRows = 6, kGemmVectors = 4;  // 24 accumulators + 4 + 1 of 32 registers
#include "kernels/cpu/attention_tile.inl"
}  // namespace turboattn::cpu::baseline

namespace turboattn::cpu {
TakeBlock SelectTakeBlock() { return baseline::Take; }
}  // namespace turboattn::cpu

#endif

// attention_tile.inl, once for each instruction set. A pragma with namespaces does what target_clones would, which cannot clone templates nor
// functions that take vectors.
#include "kernels/cpu/attention_tile.h"

#include <cmath>
#include <cstring>

#include "kernels/common/dtypes.h"
#include "kernels/common/kv_codec.h"

#if defined(__x86_64__)
#include <immintrin.h>

namespace turboattn::cpu::baseline {
constexpr int kLanes = 4;
typedef float Vec __attribute__((vector_size(16)));
typedef int32_t IVec __attribute__((vector_size(16)));
static inline __attribute__((always_inline)) Vec Fma(Vec a, Vec b, Vec c) { return a * b + c; }
constexpr int kGemmRows = 4, kGemmVectors = 2;  // 8 accumulators + 2 + 1 of 16 registers
#include "kernels/cpu/attention_tile.inl"
}  // namespace turboattn::cpu::baseline

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,bmi2")
namespace turboattn::cpu::avx2 {
constexpr int kLanes = 8;
typedef float Vec __attribute__((vector_size(32)));
typedef int32_t IVec __attribute__((vector_size(32)));
static inline __attribute__((always_inline)) Vec Fma(Vec a, Vec b, Vec c) { return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c); }
constexpr int kGemmRows = 6, kGemmVectors = 2;  // 12 accumulators + 2 + 1 of 16 registers
#include "kernels/cpu/attention_tile.inl"
}  // namespace turboattn::cpu::avx2
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c,bmi2,prefer-vector-width=512")
namespace turboattn::cpu::avx512 {
constexpr int kLanes = 16;
typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IVec __attribute__((vector_size(64)));
static inline __attribute__((always_inline)) Vec Fma(Vec a, Vec b, Vec c) { return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }
constexpr int kGemmRows = 6, kGemmVectors = 4;  // 24 accumulators + 4 + 1 of 32 registers
#include "kernels/cpu/attention_tile.inl"
}  // namespace turboattn::cpu::avx512
#pragma GCC pop_options

namespace turboattn::cpu {
TakeBlock SelectTakeBlock() {
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return avx512::Take;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2::Take;
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
static inline __attribute__((always_inline)) Vec Fma(Vec a, Vec b, Vec c) { return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b); }
#else
static inline __attribute__((always_inline)) Vec Fma(Vec a, Vec b, Vec c) { return a * b + c; }
#endif
constexpr int kGemmRows = 6, kGemmVectors = 4;  // 24 accumulators + 4 + 1 of 32 registers
#include "kernels/cpu/attention_tile.inl"
}  // namespace turboattn::cpu::baseline

namespace turboattn::cpu {
TakeBlock SelectTakeBlock() { return baseline::Take; }
}  // namespace turboattn::cpu

#endif

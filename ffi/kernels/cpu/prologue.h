// The prologue of new tokens on the CPU: bias and RoPE in float32, for queries and keys alike.
#ifndef TURBOATTN_KERNELS_CPU_PROLOGUE_H_
#define TURBOATTN_KERNELS_CPU_PROLOGUE_H_

#include <cstdint>

#include "core/params.h"
#include "kernels/common/dtypes.h"
#include "kernels/common/rope.h"

namespace turboattn::cpu {

// out[i] = row[i] (+ bias[i]). row: [elements] E. bias: [elements] of bias_dtype (float32 or E), may be null.
template <class E>
void LoadWithBias(const E* row, const void* bias, int64_t bias_offset, DType bias_dtype, int64_t elements, float* out) {
  for (int64_t d = 0; d < elements; ++d) out[d] = ToFloat(row[d]);
  if (bias == nullptr) return;
  if (bias_dtype == DType::kFloat32) {
    const float* b = static_cast<const float*>(bias) + bias_offset;
    for (int64_t d = 0; d < elements; ++d) out[d] = AddRn(out[d], b[d]);
  } else {
    const E* b = static_cast<const E*>(bias) + bias_offset;
    for (int64_t d = 0; d < elements; ++d) out[d] = AddRn(out[d], ToFloat(b[d]));
  }
}

// Turns of all pairs for one token, shared by its heads. turns: [rope.dim / 2].
inline void MakeTurns(const RopeParams& rope, int64_t b, int64_t token, int64_t position, SinCos* turns) {
  for (int64_t j = 0; j < rope.dim / 2; ++j) turns[j] = RopeSinCos(rope, b, j, token, position);
}

inline void Rotate(const RopeParams& rope, const SinCos* turns, float* head) {
  for (int64_t j = 0; j < rope.dim / 2; ++j)
    RopeRotate(turns[j], head + RopeFirst(rope, j), head + RopeSecond(rope, j));
}

}  // namespace turboattn::cpu

#endif  // TURBOATTN_KERNELS_CPU_PROLOGUE_H_

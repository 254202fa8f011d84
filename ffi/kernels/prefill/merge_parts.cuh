// One row from the partial results of its keys' parts, by one warp: what split-KV ends with.
#ifndef TURBOATTN_KERNELS_PREFILL_MERGE_PARTS_CUH_
#define TURBOATTN_KERNELS_PREFILL_MERGE_PARTS_CUH_

#include <cstdint>

#include "kernels/common/chunk.cuh"
#include "kernels/common/dtypes.h"
#include "kernels/common/ptx.cuh"
#include "kernels/common/score.cuh"

namespace turboattn::prefill {

// Where a part has this row: kDim floats of its unnormalised value sum, the origin of its exponents of 2 (-Inf: the
// part saw no key) and their sum.
struct PartRow {
  const float* data;
  const float* max;
  const float* sum;
};

// Parts 0 .. parts - 1 are added in their order, so the result does not depend on which block made which. Writes the
// row's output and lse.
template <class E, int kDim, class Params, class PartOf>
__device__ void MergeParts(const Params& params, int parts, PartOf part_of, int64_t token, int head) {
  constexpr int kColumns = kDim / kWarp;  // of a lane
  const int lane = threadIdx.x % kWarp;
  // A lane has the states of every 32nd part; those of the first it keeps.
  const PartRow first = part_of(lane < parts ? lane : 0);
  const float first_max = *first.max, first_sum = *first.sum;
  float max = first_max;
  for (int i = lane + kWarp; i < parts; i += kWarp) max = fmaxf(max, *part_of(i).max);
  for (int step = kWarp / 2; step > 0; step /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
  float sum = 0.f, x[kColumns] = {};
  for (int base = 0; base < parts; base += kWarp) {
    // A lane weighs a part, then all lanes add the parts up.
    float weight = 0.f, part_sum = 0.f;
    if (base + lane < parts) {
      const float part_max = base == 0 ? first_max : *part_of(base + lane).max;
      weight = part_max == -Infinity() ? 0.f : Exp2(part_max - max);
      part_sum = base == 0 ? first_sum : *part_of(base + lane).sum;
    }
    const int count = min(kWarp, parts - base);
#pragma unroll 8
    for (int i = 0; i < count; ++i) {
      const float* data = part_of(base + i).data + lane * kColumns;
      const float w = __shfl_sync(~0u, weight, i);
      sum += w * __shfl_sync(~0u, part_sum, i);
#pragma unroll
      for (int c = 0; c < kColumns; ++c) x[c] += w * data[c];
    }
  }
  const RowEnd end = EndRow(max, sum, params.score.sinks, head);
  const int64_t out_row = token * params.num_heads + head;
#pragma unroll
  for (int c = 0; c < kColumns; c += 2) {
    StorePair<E>(params.out, params.out_dtype, out_row * kDim + lane * kColumns + c, x[c] * end.factor,
                 x[c + 1] * end.factor);
  }
  if (lane == 0) params.lse[out_row] = end.lse;
}

}  // namespace turboattn::prefill

#endif  // TURBOATTN_KERNELS_PREFILL_MERGE_PARTS_CUH_

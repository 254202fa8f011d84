// One row from the partial results of its keys' parts, by one warp: what split-KV ends with.
#ifndef TURBOATTN_KERNELS_COMMON_MERGE_PARTS_CUH_
#define TURBOATTN_KERNELS_COMMON_MERGE_PARTS_CUH_

#include <cstdint>

#include "kernels/common/chunk.cuh"
#include "kernels/common/dtypes.h"
#include "kernels/common/ptx.cuh"
#include "kernels/common/score.cuh"

namespace turboattn {

// Where a part has this row: kDim floats of its unnormalised value sum, the origin of its exponents of 2 (-Inf: the
// part saw no key) and their sum.
struct PartRow {
  const float* data;
  const float* max;
  const float* sum;
};

// Parts 0 .. parts - 1 are added in their order, so the result does not depend on which block made which. Writes
// columns column .. column + kColumns - 1 of the row's output, and with the first of them its lse.
template <class E, int kDim, int kColumns = kDim, class Params, class PartOf>
__device__ void MergeParts(const Params& params, int parts, PartOf part_of, int64_t token, int head, int column = 0) {
  constexpr int kLaneColumns = kColumns / kWarp;  // neighbours, of a lane
  constexpr int kAhead = 64 / kLaneColumns < kWarp ? 64 / kLaneColumns : kWarp;  // parts whose values are on their way
  const int lane = threadIdx.x % kWarp;
  // A lane has the states of every 32nd part; those of the first it keeps.
  const PartRow first = part_of(lane < parts ? lane : 0);
  const float first_max = *first.max, first_sum = *first.sum;
  float max = first_max;
  for (int i = lane + kWarp; i < parts; i += kWarp) max = fmaxf(max, *part_of(i).max);
  for (int step = kWarp / 2; step > 0; step /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
  float sum = 0.f, x[kLaneColumns] = {};
  for (int base = 0; base < parts; base += kWarp) {
    // A lane weighs a part, then all lanes add the parts up.
    float weight = 0.f, part_sum = 0.f;
    if (base + lane < parts) {
      const float part_max = base == 0 ? first_max : *part_of(base + lane).max;
      weight = part_max == -Infinity() ? 0.f : Exp2(part_max - max);
      part_sum = base == 0 ? first_sum : *part_of(base + lane).sum;
    }
#pragma unroll 1
    for (int begin = 0; begin < kWarp && base + begin < parts; begin += kAhead) {
      float values[kAhead][kLaneColumns];
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int part = base + begin + i;
        const float* data = part_of(part < parts ? part : 0).data + column + lane * kLaneColumns;
#pragma unroll
        for (int c = 0; c < kLaneColumns; ++c) values[i][c] = part < parts ? data[c] : 0.f;
      }
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        if (base + begin + i >= parts) break;
        const float w = __shfl_sync(~0u, weight, begin + i);
        sum += w * __shfl_sync(~0u, part_sum, begin + i);
#pragma unroll
        for (int c = 0; c < kLaneColumns; ++c) x[c] += w * values[i][c];
      }
    }
  }
  const RowEnd end = EndRow(max, sum, params.score.sinks, head);
  const int64_t out_row = token * params.num_heads + head;
#pragma unroll
  for (int c = 0; c < kLaneColumns; c += 2) {
    StorePair<E>(params.out, params.out_dtype, out_row * kDim + column + lane * kLaneColumns + c, x[c] * end.factor,
                 x[c + 1] * end.factor);
  }
  if (column == 0 && lane == 0) params.lse[out_row] = end.lse;
}

}  // namespace turboattn

#endif  // TURBOATTN_KERNELS_COMMON_MERGE_PARTS_CUH_

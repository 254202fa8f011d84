// merge_partials on the GPU: the softmax-weighted sum of partial results.
#ifndef TURBOATTN_KERNELS_MERGE_KERNEL_CUH_
#define TURBOATTN_KERNELS_MERGE_KERNEL_CUH_

#include "core/params.h"
#include "kernels/common/softmax.h"
#include "kernels/merge/traits.h"

namespace turboattn::merge {

// The softmax state of row `row` over all parts and the sink. Its value sums are relative to the state's maximum.
__device__ inline SoftmaxState RowState(const MergeParams& params, int64_t rows, int64_t row) {
  SoftmaxState state = EmptySoftmax();
  for (int64_t r = 0; r < params.num_parts; ++r) MergeSoftmax(&state, {params.lses[r * rows + row], 1.f});
  if (params.sinks != nullptr) AddSink(&state, params.sinks[row % params.num_heads]);
  return state;
}

// Grid-stride over the T * H rows; `row_threads` threads work on a row, blockDim.x is a multiple of it.
template <class Traits>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    MergeKernel(const __grid_constant__ MergeParams params, int row_threads) {
  using In = typename Traits::In;
  using Out = typename Traits::Out;
  constexpr int kElements = Traits::kElements;
  const int64_t rows = params.num_tokens * params.num_heads, dim = params.value_dim;
  const int block_rows = blockDim.x / row_threads;
  const int column_thread = threadIdx.x % row_threads;
  const In* outs = static_cast<const In*>(params.outs);

  for (int64_t row = static_cast<int64_t>(blockIdx.x) * block_rows + threadIdx.x / row_threads; row < rows;
       row += static_cast<int64_t>(gridDim.x) * block_rows) {
    const SoftmaxState state = RowState(params, rows, row);
    const float inverse = InverseSum(state);
    if (column_thread == 0) params.lse[row] = LogSumExp(state);
    for (int64_t d = int64_t{column_thread} * kElements; d < dim; d += int64_t{row_threads} * kElements) {
      float acc[kElements] = {};
#pragma unroll 4  // loads of four parts in flight
      for (int64_t r = 0; r < params.num_parts; ++r) {
        const auto piece = *reinterpret_cast<const Piece<In, kElements>*>(outs + (r * rows + row) * dim + d);
        const float lse = params.lses[r * rows + row];
        const float weight = ExpRelative(lse, state.max);
        const bool empty = lse == -Infinity();  // its out may hold NaN, which a weight of 0 would let through
#pragma unroll
        for (int e = 0; e < kElements; ++e) acc[e] += empty ? 0.f : ToFloat(piece.e[e]) * weight;
      }
      Piece<Out, kElements> merged;
#pragma unroll
      for (int e = 0; e < kElements; ++e) merged.e[e] = FromFloat<Out>(acc[e] * inverse);
      *reinterpret_cast<Piece<Out, kElements>*>(static_cast<Out*>(params.out) + row * dim + d) = merged;
    }
  }
}

}  // namespace turboattn::merge

#endif  // TURBOATTN_KERNELS_MERGE_KERNEL_CUH_

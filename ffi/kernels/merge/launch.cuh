// Grid of the merge kernel, and the choice of its output type and of the width of an access.
#ifndef TURBOATTN_KERNELS_MERGE_LAUNCH_CUH_
#define TURBOATTN_KERNELS_MERGE_LAUNCH_CUH_

#include <algorithm>
#include <climits>

#include "core/cuda_launch.h"
#include "kernels/merge/kernel.cuh"

namespace turboattn::merge {

template <class Traits>
cudaError_t LaunchPieces(const MergeParams& params, cudaStream_t stream) {
  const int64_t rows = params.num_tokens * params.num_heads;
  if (rows == 0) return cudaSuccess;  // an empty grid is an error
  const int64_t pieces = params.value_dim / Traits::kElements;
  const int row_threads = static_cast<int>(std::clamp<int64_t>(pieces, 1, kThreads));
  const int64_t block_rows = kThreads / row_threads;
  const int blocks = static_cast<int>(std::min<int64_t>((rows + block_rows - 1) / block_rows, INT_MAX));
  const int threads = static_cast<int>(block_rows * row_threads);
  MergeKernel<Traits><<<blocks, threads, 0, stream>>>(params, row_threads);
  return cudaGetLastError();
}

template <DType kIn, DType kOut>
cudaError_t LaunchTo(const MergeParams& params, cudaStream_t stream) {
  constexpr int kElements = 16 / sizeof(Element<kIn>);
  return params.value_dim % kElements == 0 ? LaunchPieces<Traits<kIn, kOut, kElements>>(params, stream)
                                           : LaunchPieces<Traits<kIn, kOut, 1>>(params, stream);
}

template <DType kIn>
cudaError_t Launch(const MergeParams& params, cudaStream_t stream) {
  switch (params.out_dtype) {
    case DType::kBfloat16:
      return LaunchTo<kIn, DType::kBfloat16>(params, stream);
    case DType::kFloat16:
      return LaunchTo<kIn, DType::kFloat16>(params, stream);
    case DType::kFloat32:
      return LaunchTo<kIn, DType::kFloat32>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace turboattn::merge

#endif  // TURBOATTN_KERNELS_MERGE_LAUNCH_CUH_

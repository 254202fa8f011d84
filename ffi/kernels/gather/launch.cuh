// Grid of the gather kernel, and the choice of its output type.
#ifndef TURBOATTN_KERNELS_GATHER_LAUNCH_CUH_
#define TURBOATTN_KERNELS_GATHER_LAUNCH_CUH_

#include <algorithm>
#include <climits>

#include "core/cuda_launch.h"
#include "kernels/gather/kernel.cuh"

namespace turboattn::gather {

template <class Traits>
cudaError_t LaunchTo(const GatherParams& params, cudaStream_t stream) {
  const int64_t items = params.seqs.batch * params.seqs.max_pages * params.cache.page_size;
  const int64_t rows = 2 * params.cache.num_kv_heads;
  if (items == 0 || rows == 0) return cudaSuccess;  // an empty grid is an error
  if (params.cache.head_dim % kChunk != 0 || params.cache.value_dim % kChunk != 0) return cudaErrorInvalidValue;
  const int blocks = static_cast<int>(std::min<int64_t>(items, INT_MAX));
  const int warps = static_cast<int>(std::min<int64_t>(kMaxWarps, rows));
  GatherKernel<Traits><<<blocks, warps * kWarp, 0, stream>>>(params);
  return cudaGetLastError();
}

template <DType kE, DType kKv>
cudaError_t Launch(const GatherParams& params, cudaStream_t stream) {
  switch (params.out_dtype) {
    case DType::kBfloat16:
      return LaunchTo<Traits<kE, kKv, DType::kBfloat16>>(params, stream);
    case DType::kFloat16:
      return LaunchTo<Traits<kE, kKv, DType::kFloat16>>(params, stream);
    case DType::kFloat32:
      return LaunchTo<Traits<kE, kKv, DType::kFloat32>>(params, stream);
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace turboattn::gather

#endif  // TURBOATTN_KERNELS_GATHER_LAUNCH_CUH_

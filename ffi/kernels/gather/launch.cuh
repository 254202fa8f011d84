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
  const KvCache& cache = params.cache;
  const int64_t chunks = cache.num_kv_heads * std::max(cache.head_dim, cache.value_dim) / kChunk;  // a position
  if (items == 0 || chunks == 0) return cudaSuccess;  // an empty grid is an error
  if (cache.head_dim % kChunk != 0 || cache.value_dim % kChunk != 0 || chunks > INT_MAX) return cudaErrorInvalidValue;
  const int blocks = static_cast<int>(std::min<int64_t>(items, INT_MAX));
  const int threads = static_cast<int>(std::min<int64_t>(kMaxThreads, (chunks + kWarp - 1) / kWarp * kWarp));
  GatherKernel<Traits><<<blocks, threads, 0, stream>>>(params);
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

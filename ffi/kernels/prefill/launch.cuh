// Grid and shared memory of the prefill kernels.
#ifndef TURBOATTN_KERNELS_PREFILL_LAUNCH_CUH_
#define TURBOATTN_KERNELS_PREFILL_LAUNCH_CUH_

#include <climits>

#include "core/cuda_launch.h"
#include "kernels/prefill/kernel.cuh"

namespace turboattn::prefill {

template <class Traits, class Params>
cudaError_t Launch(const Params& params, cudaStream_t stream) {
  if (QueryRows(params) == 0 || params.num_heads == 0) return cudaSuccess;
  if constexpr (std::is_same_v<Params, PagedAttentionParams>) {
    if (!HasGroups(params.cache)) return cudaErrorInvalidValue;
  }
  int64_t blocks = MaxTiles<Traits::kRows>(params) * KvHeadsOf(params);
  if (blocks == 0) blocks = 1;  // no sequence: only empty rows to write
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  constexpr int kBytes = sizeof(SharedSm80<Traits>);
  const auto kernel = &PrefillSm80<Traits, Params>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<int>(blocks), Traits::kThreads, kBytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace turboattn::prefill

#endif  // TURBOATTN_KERNELS_PREFILL_LAUNCH_CUH_

// Grid and shared memory of the sm80 prefill kernels.
#ifndef TURBOATTN_KERNELS_PREFILL_LAUNCH_SM80_CUH_
#define TURBOATTN_KERNELS_PREFILL_LAUNCH_SM80_CUH_

#include <climits>
#include <type_traits>
#include <utility>

#include "core/cuda_launch.h"
#include "core/registry.h"
#include "kernels/prefill/kernel_sm80.cuh"

namespace turboattn::prefill {

template <class Traits, class Params>
cudaError_t LaunchSm80(const Params& params, cudaStream_t stream) {
  if (QueryRows(params) == 0 || params.num_heads == 0) return cudaSuccess;
  if constexpr (std::is_same_v<Params, PagedAttentionParams>) {
    if (params.workspace.bytes < params.plan.workspace_bytes || !HasGroups(params.cache)) return cudaErrorInvalidValue;
  }
  Params tiled = params;
  tiled.max_tiles = MaxTiles<Traits::kRows>(params);
  int64_t blocks = tiled.max_tiles * KvHeadsOf(params);
  blocks *= SplitsOf(params);
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  constexpr int kBytes = sizeof(SharedSm80<Traits>);
  const auto kernel = &PrefillSm80<Traits, Params>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<int>(blocks), Traits::kThreads, kBytes, stream>>>(tiled);
  if constexpr (std::is_same_v<Params, PagedAttentionParams>) {
    if (SplitsOf(params) > 1 && params.seqs.batch > 0) {
      const cudaError_t launched = cudaGetLastError();
      if (launched != cudaSuccess) return launched;
      return LaunchMerge<Traits>(params, params.plan.prefill_tiles, false, stream);
    }
  }
  return cudaGetLastError();
}

namespace sm80 {

template <DType kEType, DType kKv, int kHeadDim, int kValueDim, class Params>
Kernel MakeKernel(KernelDesc desc) {
  static_assert(kHeadDim == kValueDim);
  return {std::move(desc), &LaunchSm80<TraitsSm80<kEType, kKv, kHeadDim>, Params>};
}

}  // namespace sm80
}  // namespace turboattn::prefill

#endif  // TURBOATTN_KERNELS_PREFILL_LAUNCH_SM80_CUH_

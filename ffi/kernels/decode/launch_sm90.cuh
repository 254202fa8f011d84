// Grid and shared memory of the sm90 decode kernels.
#ifndef TURBOATTN_KERNELS_DECODE_LAUNCH_SM90_CUH_
#define TURBOATTN_KERNELS_DECODE_LAUNCH_SM90_CUH_

#include <utility>

#include "core/cuda_launch.h"
#include "core/registry.h"
#include "kernels/decode/kernel_sm90.cuh"
#include "kernels/decode/launch_sm80.cuh"

namespace turboattn::decode {

template <class Traits>
cudaError_t LaunchTileSm90(const PagedAttentionParams& params, cudaStream_t stream) {
  constexpr int kBytes = sizeof(SharedSm90<Traits>);
  static_assert((kBytes + 2 * 1024) * Traits::kBlocks <= 228 * 1024, "with what is static and what the system takes");
  Grid grid = {};
  const cudaError_t error = GridOf<Traits>(params, &DecodeSm90<Traits>, kBytes, &grid);
  if (error != cudaSuccess) return error;
  return LaunchList<Traits>(params, FactsOf(params), &DecodeSm90<Traits>, kBytes, grid, true, stream);
}

namespace sm90 {

template <DType kE, DType kKv, int kHeadDim>
cudaError_t Launch(const PagedAttentionParams& params, cudaStream_t stream) {
  if (!CanLaunch(params)) return cudaErrorInvalidValue;
  if (IsEmpty(params)) return cudaSuccess;
  return params.plan.row_tile == 8 ? LaunchTileSm90<TraitsSm90<kE, kKv, kHeadDim, 8>>(params, stream)
                                   : LaunchTileSm90<TraitsSm90<kE, kKv, kHeadDim, 16>>(params, stream);
}

// On the card that the family is compiled for. Clusters have a few steps for each block, and units of 16 rows leave no
// registers for two tiles of keys: those are sm80's.
inline bool SuitsSm90(const PagedAttentionParams& params) {
  return DeviceIsSm90() && params.plan.row_tile == 8 && params.plan.decode_cluster == 0;
}

template <DType kE, DType kKv, int kHeadDim>
Kernel MakeKernel(KernelDesc desc) {
  return {std::move(desc), &Launch<kE, kKv, kHeadDim>, &SuitsSm90};
}

}  // namespace sm90
}  // namespace turboattn::decode

#endif  // TURBOATTN_KERNELS_DECODE_LAUNCH_SM90_CUH_

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
  constexpr int kBytes = sizeof(SharedOfSm90<Traits>);
  static_assert((kBytes + 2 * 1024) * Traits::kBlocks <= 228 * 1024, "with what is static and what the system takes");
  Grid grid = {};
  const cudaError_t error = GridOf<Traits>(params, &DecodeSm90<Traits>, kBytes, &grid);
  if (error != cudaSuccess) return error;
  return LaunchList<Traits>(params, FactsOf<Traits>(params), &DecodeSm90<Traits>, kBytes, grid, true, stream);
}

namespace sm90 {

// Units of 16 rows. Codes of 8 bits gained nothing with all columns in a warp: 64 x 4096 int8 took 153.0 us instead of
// sm80's 147.4, fp8 144.4 instead of 143.9; int4 124.9 instead of 137.6, and takes 116.1 with its columns split (H200).
template <DType kKv>
constexpr bool kHas16Rows = kKv == DType::kInt4;

template <DType kE, DType kKv, int kHeadDim>
cudaError_t Launch(const PagedAttentionParams& params, cudaStream_t stream) {
  if (!CanLaunch(params)) return cudaErrorInvalidValue;
  if (IsEmpty(params)) return cudaSuccess;
  if constexpr (kHas16Rows<kKv>) {
    if (params.plan.row_tile == 16) return LaunchTileSm90<TraitsSm90Columns<kE, kKv, kHeadDim, 16>>(params, stream);
  }
  return LaunchTileSm90<TraitsSm90<kE, kKv, kHeadDim, 8>>(params, stream);
}

// On the card that the family is compiled for. Clusters have a few steps for each block: those are sm80's.
template <DType kKv>
bool SuitsSm90(const PagedAttentionParams& params) {
  return DeviceIsSm90() && params.plan.decode_cluster == 0 && (params.plan.row_tile == 8 || kHas16Rows<kKv>);
}

template <DType kE, DType kKv, int kHeadDim>
Kernel MakeKernel(KernelDesc desc) {
  return {std::move(desc), &Launch<kE, kKv, kHeadDim>, &SuitsSm90<kKv>};
}

}  // namespace sm90
}  // namespace turboattn::decode

#endif  // TURBOATTN_KERNELS_DECODE_LAUNCH_SM90_CUH_

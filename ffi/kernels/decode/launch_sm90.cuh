// Grid and shared memory of the sm90 decode kernels.
#ifndef TURBOATTN_KERNELS_DECODE_LAUNCH_SM90_CUH_
#define TURBOATTN_KERNELS_DECODE_LAUNCH_SM90_CUH_

#include <algorithm>
#include <climits>

#include "core/cuda_launch.h"
#include "kernels/decode/kernel_sm90.cuh"
#include "kernels/decode/launch_sm80.cuh"

namespace turboattn::decode {

template <class Traits>
cudaError_t LaunchTileSm90(const PagedAttentionParams& params, cudaStream_t stream) {
  // One sequence that has clusters of blocks for its units: a block has a few steps.
  if (params.plan.decode_cluster > 0) return LaunchTile<typename Traits::Base>(params, stream);
  constexpr int kBytes = sizeof(SharedSm90<Traits>);
  static_assert((kBytes + 1024 + 512) * Traits::kBlocks <= 228 * 1024);
  const auto kernel = &DecodeSm90<Traits>;
  int blocks = 0;
  cudaError_t error = GridOf<Traits>(params, kernel, kBytes, &blocks);
  if (error != cudaSuccess) return error;
  CallFacts facts = FactsOf(params);
  if (!params.batch_invariant) facts.even = EvenCut::Of(params.seqs.batch * params.cache.num_kv_heads, blocks);
  if (params.new_schedule != nullptr) {
    PlanSm80<Traits><<<static_cast<unsigned>(kMaxDecodeBlocks), Traits::kBlockThreads, 0, stream>>>(params, facts, blocks);
    return cudaGetLastError();
  }
  if (facts.plain && !params.batch_invariant) facts.schedule = params.schedule;
  kernel<<<blocks, Traits::kBlockThreads, kBytes, stream>>>(params, facts);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  return LaunchMerge<typename Traits::Base>(params, facts, blocks, true, stream);
}

namespace sm90 {

template <DType kE, DType kKv, int kHeadDim>
cudaError_t Launch(const PagedAttentionParams& params, cudaStream_t stream) {
  if (!CanLaunch(params)) return cudaErrorInvalidValue;
  if (IsEmpty(params)) return cudaSuccess;
  return params.plan.row_tile == 8 ? LaunchTileSm90<TraitsSm90<kE, kKv, kHeadDim, 8>>(params, stream)
                                   : LaunchTileSm90<TraitsSm90<kE, kKv, kHeadDim, 16>>(params, stream);
}

template <DType kE, DType kKv, int kHeadDim>
Kernel MakeKernel(KernelDesc desc) {
  return {std::move(desc), &Launch<kE, kKv, kHeadDim>,
          +[](const PagedAttentionParams&) { return DeviceIsSm90(); }};
}

}  // namespace sm90
}  // namespace turboattn::decode

#endif  // TURBOATTN_KERNELS_DECODE_LAUNCH_SM90_CUH_

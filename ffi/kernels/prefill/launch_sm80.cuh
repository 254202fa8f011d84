// Grid and shared memory of the sm80 prefill kernels.
#ifndef TURBOATTN_KERNELS_PREFILL_LAUNCH_SM80_CUH_
#define TURBOATTN_KERNELS_PREFILL_LAUNCH_SM80_CUH_

#include <algorithm>
#include <climits>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "core/cuda_launch.h"
#include "core/registry.h"
#include "kernels/prefill/kernel_sm80.cuh"

namespace turboattn::prefill {

// Pairs of a sequence and a kv head whose tiles are taken together, by the bytes of their keys and values and of L2.
// Causal tiles have many lengths, and the more of them a section has, the better they fill a card: on an H200, whose L2
// has 60 MB, 32 MB were 6 to 7 % faster than pair after pair, 1 to 3 % than 16 MB and up to 2 % than 64. Other tiles
// are all alike, and what L2 loses is read again: 8 MB were 1 to 4 % faster than 64, and than pair after pair.
template <class Traits, class Params>
int ChooseSection(const Params& params, int l2) {
  const int64_t bytes = params.score.is_causal ? int64_t{l2} * 2 / 3 : l2 / 6;
  const int64_t pair_bytes = std::max<int64_t>(MaxKeysOf(params), 1) * 2 * Traits::kStoredBytes;
  const int64_t pairs = std::max<int64_t>(BatchOf(params) * KvHeadsOf(params), 1);
  const int64_t most = std::clamp<int64_t>(bytes / pair_bytes, 1, pairs);
  // All of one size, or nearly: a last section of few pairs has too few tiles for the card, and begins with the
  // longest. Causal calls gained 2 to 16 % on an H200: 16 pairs as 6, 6 and 4 took 1,714 us, as 5, 5, 5 and 1 1,938.
  const int64_t sections = std::max<int64_t>((pairs + most / 2) / most, 1);
  return static_cast<int>((pairs + sections - 1) / sections);
}

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
  int device = 0, l2 = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&l2, cudaDevAttrL2CacheSize, device);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  }
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<int>(blocks), Traits::kThreads, kBytes, stream>>>(tiled, ChooseSection<Traits>(params, l2));
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

// Grids and shared memory of the decode kernels.
#ifndef TURBOATTN_KERNELS_DECODE_LAUNCH_CUH_
#define TURBOATTN_KERNELS_DECODE_LAUNCH_CUH_

#include <algorithm>

#include "core/cuda_launch.h"
#include "kernels/decode/kernel.cuh"

namespace turboattn::decode {

template <class Traits>
cudaError_t LaunchTile(const PagedAttentionParams& params, cudaStream_t stream) {
  constexpr int kBytes = sizeof(SharedSm80<Traits>);
  static_assert(kBytes <= kMaxSharedBytes<Traits::kBlocks, Traits::kDim>);
  const auto kernel = &DecodeSm80<Traits>;
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  int device = 0, multiprocessors = 0, major = 0, resident = 0;
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, Traits::kThreads, kBytes);
  }
  if (error != cudaSuccess) return error;
  const int blocks =
      static_cast<int>(std::min<int64_t>(static_cast<int64_t>(multiprocessors) * resident, kMaxDecodeBlocks));
  if (blocks == 0) return cudaErrorInvalidConfiguration;
  kernel<<<blocks, Traits::kThreads, kBytes, stream>>>(params);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  // A unit of several parts has one block that has its first. Fixed parts: their slots are dealt out. No sequence: one
  // block that finds nothing.
  const int64_t merging =
      params.batch_invariant ? std::clamp<int64_t>(params.plan.slots, 1, 2 * static_cast<int64_t>(multiprocessors))
                             : blocks;
  cudaLaunchAttribute dependent;
  dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  dependent.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(merging));
  config.blockDim = dim3(kMergeThreads);
  config.stream = stream;
  config.attrs = &dependent;
  config.numAttrs = major >= 9 ? 1 : 0;
  return cudaLaunchKernelEx(&config, &MergeSm80<Traits>, params);
}

template <DType kE, DType kKv, int kHeadDim>
cudaError_t Launch(const PagedAttentionParams& params, cudaStream_t stream) {
  if (params.workspace.bytes < params.plan.workspace_bytes || !HasGroups(params.cache)) return cudaErrorInvalidValue;
  if (params.seqs.num_tokens == 0 || params.num_heads == 0) return cudaSuccess;
  return params.plan.row_tile == 8 ? LaunchTile<TraitsSm80<kE, kKv, kHeadDim, 8>>(params, stream)
                                   : LaunchTile<TraitsSm80<kE, kKv, kHeadDim, 16>>(params, stream);
}

}  // namespace turboattn::decode

#endif  // TURBOATTN_KERNELS_DECODE_LAUNCH_CUH_

// Tensor maps, grid and shared memory of the sm90 decode kernels.
#ifndef TURBOATTN_KERNELS_DECODE_LAUNCH_SM90_CUH_
#define TURBOATTN_KERNELS_DECODE_LAUNCH_SM90_CUH_

#include <cuda.h>

#include <algorithm>
#include <climits>

#include "core/cuda_launch.h"
#include "core/tensor_map.h"
#include "kernels/decode/kernel_sm90.cuh"
#include "kernels/decode/launch_sm80.cuh"

namespace turboattn::decode {

template <class Traits>
cudaError_t EncodeRows(const PagedAttentionParams& params, const void* array, int box, CUtensorMap* map) {
  const KvCache& cache = params.cache;
  const int64_t rows = cache.num_layers * cache.num_pages * cache.num_kv_heads * cache.page_size;
  constexpr int kBytes = Traits::kStoredBytes, kPanel = kBytes < 128 ? kBytes : 128;
  return EncodeTensorMap<3>(map, DType::kInt8, array != nullptr ? array : params.query, {kPanel, rows, kBytes / kPanel},
                            {kBytes, kPanel}, {kPanel, box, kBytes / kPanel});
}

template <class Traits>
cudaError_t LaunchTileSm90(const PagedAttentionParams& params, cudaStream_t stream) {
  // One sequence that has clusters of blocks for its units.
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
  TensorMaps maps = {};
  const int box = static_cast<int>(std::min<int64_t>(params.cache.page_size, kDecodeKeys));
  while (1 << maps.box_shift < box) ++maps.box_shift;
  error = EncodeRows<Traits>(params, params.cache.key, box, &maps.key);
  if (error == cudaSuccess) error = EncodeRows<Traits>(params, params.cache.value, box, &maps.value);
  if (error != cudaSuccess) return error;
  kernel<<<blocks, Traits::kBlockThreads, kBytes, stream>>>(params, facts, maps);
  error = cudaGetLastError();
  if (error != cudaSuccess) return error;
  return LaunchMerge<typename Traits::Base>(params, facts, blocks, true, stream);
}

}  // namespace turboattn::decode

#endif  // TURBOATTN_KERNELS_DECODE_LAUNCH_SM90_CUH_

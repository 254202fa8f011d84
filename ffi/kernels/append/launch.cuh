// Grid and shared memory of the append kernel.
#ifndef TURBOATTN_KERNELS_APPEND_LAUNCH_CUH_
#define TURBOATTN_KERNELS_APPEND_LAUNCH_CUH_

#include <algorithm>
#include <climits>

#include "core/cuda_launch.h"
#include "kernels/append/kernel.cuh"

namespace turboattn::append {

template <class Traits>
cudaError_t Launch(const AppendParams& params, cudaStream_t stream) {
  const KvCache& cache = params.cache;
  const int64_t tokens = params.seqs.num_tokens;
  if (tokens == 0 || params.seqs.batch == 0 || params.seqs.max_pages == 0 || cache.num_pages == 0) return cudaSuccess;
  const bool has_value = params.value != nullptr;  // else the values are the first columns of the keys (MLA)
  if (cache.head_dim % kChunk != 0 || (has_value && cache.value_dim % kChunk != 0)) return cudaErrorInvalidValue;
  const int64_t row_bytes = RowWidth(params) * static_cast<int64_t>(sizeof(float));
  const int64_t turn_bytes = params.rope.dim / 2 * static_cast<int64_t>(sizeof(SinCos));
  // Shared memory without an opt-in ends at 48 KB: 8 warps fit up to D = 1,200 with a full rotation (40 KB of rows and
  // turns); wider rows get fewer warps, never a failure below D = 6,000.
  constexpr int64_t kSharedBytes = 47 * 1024;
  const int64_t fitting = (kSharedBytes - turn_bytes) / row_bytes;
  if (fitting < 1) return cudaErrorInvalidConfiguration;
  const int64_t rows = cache.num_kv_heads * (has_value ? 2 : 1);
  const int64_t warps = std::min({static_cast<int64_t>(kMaxWarps), rows, fitting});
  const int blocks = static_cast<int>(std::min<int64_t>(tokens, INT_MAX));
  AppendKernel<Traits><<<blocks, static_cast<int>(warps * kWarp), turn_bytes + warps * row_bytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace turboattn::append

#endif  // TURBOATTN_KERNELS_APPEND_LAUNCH_CUH_

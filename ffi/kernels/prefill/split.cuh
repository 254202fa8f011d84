// Tiles whose keys are cut in parts: what the parts leave in the workspace, and the kernel that adds them up.
#ifndef TURBOATTN_KERNELS_PREFILL_SPLIT_CUH_
#define TURBOATTN_KERNELS_PREFILL_SPLIT_CUH_

#include <cuda_runtime_api.h>

#include <algorithm>

#include "core/cuda_launch.h"
#include "core/params.h"
#include "kernels/common/page_walk.h"
#include "kernels/common/sequence.cuh"
#include "kernels/prefill/merge_parts.cuh"

namespace turboattn::prefill {

struct SplitHeader {
  int tiles;  // 0: no tile has been cut
  int unused[3];
};
static_assert(sizeof(SplitHeader) == kSplitInts * sizeof(int32_t));

struct alignas(16) TileInfo {
  int b;
  int head;       // kv head
  int first_row;  // of the sequence; long tiles are few
  int rows;       // 0: there is no such tile, or it is whole
  int parts;
  int first_part, stride;  // where its parts are
  int unused;
};
static_assert(sizeof(TileInfo) == kTileInts * sizeof(int32_t));

template <int kRows, int kDim>
struct SplitWorkspace {
  SplitHeader* header;
  TileInfo* info;
  float* data;

  __device__ explicit SplitWorkspace(const PagedAttentionParams& params) {
    header = reinterpret_cast<SplitHeader*>(static_cast<char*>(params.workspace.data) + params.plan.prefill_offset);
    info = reinterpret_cast<TileInfo*>(header + 1);
    data = reinterpret_cast<float*>(info + kMaxCutTiles);
  }
  __device__ explicit SplitWorkspace(const LinearAttentionParams&) : header(nullptr), info(nullptr), data(nullptr) {}
  __device__ float* Part(int64_t part) const { return data + part * (kRows * (kDim + 2)); }
  __device__ PartRow Row(int64_t part, int row) const {
    const float* at = Part(part);
    return {at + row * kDim, at + kRows * kDim + row, at + kRows * kDim + kRows + row};
  }
};

constexpr int kMergeWarps = 4;

// One warp a row of a split tile. Grid-stride over (tile, row).
template <class Traits>
__global__ void __launch_bounds__(kMergeWarps* kWarp) MergeSplits(const __grid_constant__ PagedAttentionParams params) {
  constexpr int kRows = Traits::kRows;
  LaunchDependents();  // decode
  WaitForPrerequisites();
  const SplitWorkspace<kRows, Traits::kValueDim> workspace(params);
  const int tiles = workspace.header->tiles, group = GroupOf(params);
  for (int item = blockIdx.x * kMergeWarps + threadIdx.x / kWarp; item < tiles * kRows;
       item += gridDim.x * kMergeWarps) {
    const int tile = item / kRows, row = item % kRows;
    const TileInfo info = workspace.info[tile];
    if (row >= info.rows) continue;
    const auto part_of = [&](int part) { return workspace.Row(info.first_part + part * info.stride, row); };
    const int r = info.first_row + row, i = r / group;
    MergeParts<typename Traits::E, Traits::kValueDim>(
        params, info.parts, part_of, QueryRange(params.seqs, info.b).lo + i, info.head * group + (r - i * group));
  }
}

// After the kernel that made the parts of up to max_tiles tiles. dependent: that one says LaunchDependents().
template <class Traits>
cudaError_t LaunchMerge(const PagedAttentionParams& params, int64_t max_tiles, bool dependent, cudaStream_t stream) {
  constexpr int64_t kMaxBlocks = 1024;  // 16 of them reside on an SM
  cudaLaunchAttribute serialization = DependentLaunch();
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(std::min(max_tiles * Traits::kRows / kMergeWarps, kMaxBlocks)));
  config.blockDim = dim3(kMergeWarps * kWarp);
  config.stream = stream;
  config.attrs = &serialization;
  config.numAttrs = dependent ? 1 : 0;
  return cudaLaunchKernelEx(&config, &MergeSplits<Traits>, params);
}

}  // namespace turboattn::prefill

#endif  // TURBOATTN_KERNELS_PREFILL_SPLIT_CUH_

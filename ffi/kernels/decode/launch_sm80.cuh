// Grids and shared memory of the decode kernels.
#ifndef TURBOATTN_KERNELS_DECODE_LAUNCH_SM80_CUH_
#define TURBOATTN_KERNELS_DECODE_LAUNCH_SM80_CUH_

#include <algorithm>
#include <climits>
#include <tuple>
#include <utility>

#include "core/cuda_launch.h"
#include "core/registry.h"
#include "kernels/decode/kernel.cuh"

namespace turboattn::decode {

inline bool SameRope(const RopeParams& a, const RopeParams& b) {
  const auto all = [](const RopeParams& x) {
    return std::tie(x.turns, x.base, x.positions, x.position_axes, x.dim, x.offset, x.interleaved, x.attention_factor,
                    x.section_t, x.section_h, x.section_w, x.sections_interleaved);
  };
  return all(a) == all(b);
}

template <class Traits>
CallFacts FactsOf(const PagedAttentionParams& params) {
  constexpr int64_t kIds = int64_t{INT_MAX} + 1;
  const KvCache& cache = params.cache;
  const Sequences& seqs = params.seqs;
  CallFacts facts = {};
  facts.group = static_cast<int>(params.num_heads / cache.num_kv_heads);
  facts.decode_q_len = static_cast<int>(std::min<int64_t>(params.plan.decode_q_len, INT_MAX));
  facts.max_keys = static_cast<int>(std::min<int64_t>(seqs.max_pages * cache.page_size, INT_MAX));
  while (int64_t{1} << facts.page_shift < cache.page_size) ++facts.page_shift;
  facts.layers = static_cast<unsigned>(std::min(cache.num_layers, kIds));
  facts.pages = static_cast<unsigned>(std::min(cache.num_pages, kIds));
  facts.cluster_shift = -1;
  facts.plain =
      seqs.prefix_len == nullptr && seqs.cp_rank == nullptr && seqs.cp_size == 1 && params.score.window == nullptr;
  const int64_t q_len = seqs.q_ranges == nullptr ? seqs.uniform_q_len : 0;
  if (facts.plain && !params.batch_invariant && q_len > 0 && q_len <= facts.decode_q_len) {
    facts.units = static_cast<int>(cache.num_kv_heads * ((q_len * facts.group + Traits::kRows - 1) / Traits::kRows));
  }
  facts.each_thread = static_cast<int>((seqs.batch + Traits::kBlockThreads - 1) / Traits::kBlockThreads);
  facts.table_entries = static_cast<int>(std::min<int64_t>(seqs.batch * seqs.max_pages, INT_MAX));
  facts.turns = params.prologue.rope.dim > 0;
  facts.by_table = facts.turns && params.prologue.rope.turns != nullptr;
  facts.appends = params.append.key != nullptr;
  facts.same_rope = SameRope(params.prologue.rope, params.append.rope);
  return facts;
}

struct Grid {
  int blocks;
  int multiprocessors;
};

// Of a kernel whose blocks share a list: as many as the card holds.
template <class Traits, class Kernel>
cudaError_t GridOf(const PagedAttentionParams& params, Kernel kernel, int bytes, Grid* grid) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  int device = 0, resident = 0;
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  if (error == cudaSuccess) {
    error = cudaDeviceGetAttribute(&grid->multiprocessors, cudaDevAttrMultiProcessorCount, device);
  }
  if (error == cudaSuccess) {
    error = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, Traits::kBlockThreads, bytes);
  }
  if (error != cudaSuccess) return error;
  grid->blocks = static_cast<int>(std::min<int64_t>(int64_t{grid->multiprocessors} * resident, kMaxDecodeBlocks));
  // Sequences, tokens and a token's rows are counted in 32 bits.
  const int64_t most_rows = params.seqs.num_tokens * params.num_heads / params.cache.num_kv_heads;
  if (grid->blocks == 0 || std::max(params.seqs.batch, most_rows) > INT_MAX - Traits::kBlockThreads) {
    return cudaErrorInvalidConfiguration;
  }
  return cudaSuccess;
}

template <class Traits>
cudaError_t LaunchMerge(const PagedAttentionParams& params, const CallFacts& facts, Grid grid, bool hopper,
                        cudaStream_t stream) {
  // A unit of several parts has one block that has its first. Fixed parts: their slots are dealt out. No sequence: one
  // block that finds nothing.
  const int64_t merging = params.batch_invariant
                              ? std::clamp<int64_t>(params.plan.slots, 1, 2 * int64_t{grid.multiprocessors})
                              : grid.blocks;
  cudaLaunchAttribute dependent = DependentLaunch();
  cudaLaunchConfig_t config = {};
  const int64_t q_len = params.seqs.uniform_q_len > 0 ? params.seqs.uniform_q_len : facts.decode_q_len;
  const int64_t rows = q_len * facts.group;
  config.gridDim = dim3(static_cast<unsigned>(merging), static_cast<unsigned>(std::min<int64_t>(rows, Traits::kRows)));
  config.blockDim = dim3(kMergeThreads);
  config.stream = stream;
  config.attrs = &dependent;
  config.numAttrs = hopper ? 1 : 0;
  return cudaLaunchKernelEx(&config, &MergeDecode<Traits>, params, facts);
}

// The kernel, whose blocks share a list, and the merge, if it is not theirs; or, where a schedule is asked for, what
// makes it.
template <class Traits, class Kernel>
cudaError_t LaunchList(const PagedAttentionParams& params, CallFacts facts, Kernel kernel, int bytes, Grid grid,
                       bool hopper, cudaStream_t stream) {
  const int blocks = grid.blocks;
  if (!params.batch_invariant) facts.even = EvenCut::Of(params.seqs.batch * params.cache.num_kv_heads, blocks);
  if (params.new_schedule != nullptr) {
    PlanDecode<Traits>
        <<<static_cast<unsigned>(kMaxDecodeBlocks), Traits::kBlockThreads, 0, stream>>>(params, facts, blocks);
    return cudaGetLastError();
  }
  if (facts.plain && !params.batch_invariant) facts.schedule = params.schedule;
  // Behind prefill, whose last blocks leave SMs to it; both write rows of their own. It waits for prefill at its end.
  cudaLaunchAttribute dependent = DependentLaunch();
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(Traits::kBlockThreads);
  config.dynamicSmemBytes = static_cast<size_t>(bytes);
  config.stream = stream;
  config.attrs = &dependent;
  config.numAttrs = hopper && params.plan.runs_prefill ? 1 : 0;
  const cudaError_t error = cudaLaunchKernelEx(&config, kernel, params, facts);
  if constexpr (Traits::kMerges) {
    return error;
  } else {
    return error == cudaSuccess ? LaunchMerge<Traits>(params, facts, grid, hopper, stream) : error;
  }
}

template <class Traits>
cudaError_t LaunchTile(const PagedAttentionParams& params, cudaStream_t stream) {
  constexpr int kBytes = sizeof(SharedSm80<Traits>);
  static_assert(kBytes <= kMaxSharedBytes<Traits::kBlocks, Traits::kDim>);
  const auto kernel = &DecodeSm80<Traits>;
  Grid grid = {};
  int device = 0, major = 0;
  cudaError_t error = GridOf<Traits>(params, kernel, kBytes, &grid);
  if (error == cudaSuccess) error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  if (error != cudaSuccess) return error;
  // Clusters and dependent launches: code for older cards does neither, and may run on newer ones.
  cudaFuncAttributes code;
  error = cudaFuncGetAttributes(&code, kernel);
  if (error != cudaSuccess) return error;
  const bool hopper = major == 9 && code.ptxVersion >= 90;
  CallFacts facts = FactsOf<Traits>(params);
  if (params.plan.decode_cluster > 0 && hopper) {
    const int cluster = params.plan.decode_cluster;
    cudaLaunchAttribute of_cluster;
    of_cluster.id = cudaLaunchAttributeClusterDimension;
    of_cluster.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(params.plan.decode_units * cluster));
    config.blockDim = dim3(Traits::kThreads);
    config.dynamicSmemBytes = kBytes;
    config.stream = stream;
    config.attrs = &of_cluster;
    config.numAttrs = 1;
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    int clusters = 0;
    if (error == cudaSuccess) error = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config);
    if (error != cudaSuccess) return error;
    if (clusters >= params.plan.decode_units) {
      if (params.new_schedule != nullptr) {  // they need none
        return cudaMemsetAsync(params.new_schedule, 0, kMaxDecodeBlocks * sizeof(ScheduledPart), stream);
      }
      while (1 << (facts.cluster_shift + 1) <= cluster) ++facts.cluster_shift;
      return cudaLaunchKernelEx(&config, kernel, params, facts);
    }
  }
  // With as many units as blocks, few are cut, and a merge kernel mostly finds nothing.
  if constexpr (kMergesManyUnits<Traits::kQuantised, Traits::kDim>) {
    if (!params.batch_invariant && params.seqs.batch * params.cache.num_kv_heads >= grid.blocks) {
      using Many = Merging<Traits>;
      constexpr int kManyBytes = sizeof(SharedSm80<Many>);
      static_assert(kManyBytes <= kMaxSharedBytes<Traits::kBlocks, Traits::kDim>);
      error = GridOf<Many>(params, &DecodeSm80<Many>, kManyBytes, &grid);
      if (error != cudaSuccess) return error;
      return LaunchList<Many>(params, facts, &DecodeSm80<Many>, kManyBytes, grid, hopper, stream);
    }
  }
  return LaunchList<Traits>(params, facts, kernel, kBytes, grid, hopper, stream);
}

// Whether there is a workspace and pages that the kernels take.
inline bool CanLaunch(const PagedAttentionParams& params) {
  const bool has_room = params.new_schedule != nullptr || params.workspace.bytes >= params.plan.workspace_bytes;
  return has_room && HasGroups(params.cache);
}
inline bool IsEmpty(const PagedAttentionParams& params) { return params.seqs.num_tokens == 0 || params.num_heads == 0; }

namespace sm80 {

template <DType kE, DType kKv, int kHeadDim>
cudaError_t Launch(const PagedAttentionParams& params, cudaStream_t stream) {
  if (!CanLaunch(params)) return cudaErrorInvalidValue;
  if (IsEmpty(params)) return cudaSuccess;
  return params.plan.row_tile == 8 ? LaunchTile<TraitsSm80<kE, kKv, kHeadDim, 8>>(params, stream)
                                   : LaunchTile<TraitsSm80<kE, kKv, kHeadDim, 16>>(params, stream);
}

template <DType kE, DType kKv, int kHeadDim>
Kernel MakeKernel(KernelDesc desc) {
  return {std::move(desc), &Launch<kE, kKv, kHeadDim>};
}

}  // namespace sm80
}  // namespace turboattn::decode

#endif  // TURBOATTN_KERNELS_DECODE_LAUNCH_SM80_CUH_

// Attention of a tile of (token, head of the group) rows over its keys: from pages or from plain arrays.
#ifndef TURBOATTN_KERNELS_PREFILL_KERNEL_SM80_CUH_
#define TURBOATTN_KERNELS_PREFILL_KERNEL_SM80_CUH_

#include "kernels/prefill/mainloop_sm80.cuh"
#include "kernels/prefill/split.cuh"
#include "kernels/prefill/tile_count.cuh"

namespace turboattn::prefill {

// Parts that the keys of a tile are cut in.
TA_HD int SplitsOf(const PagedAttentionParams& params) { return params.plan.prefill_splits; }
TA_HD int SplitsOf(const LinearAttentionParams&) { return 1; }

// Blocks: parts of a tile fastest, kv head major, tiles of a head in descending order within a sequence, so that the
// longest causal tiles of a sequence start first.
template <class Traits, class Params>
__global__ void __launch_bounds__(Traits::kThreads, 2) PrefillSm80(const __grid_constant__ Params params) {
  using E = typename Traits::E;
  constexpr int kRows = Traits::kRows;
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  SharedSm80<Traits>& shared = *reinterpret_cast<SharedSm80<Traits>*>(s_bytes);

  if (SkippedLength(params) == 0) {  // else the decode kernel writes them
    FillUnownedRows(params, static_cast<int64_t>(blockIdx.x) * Traits::kWarps + threadIdx.x / 32,
                    static_cast<int64_t>(gridDim.x) * Traits::kWarps);
  }
  if (BatchOf(params) == 0) return;
  if (threadIdx.x == 0) shared.extra = 0;
  __syncthreads();
  // Ranges that overlap make more tiles than the grid holds: the last block of a head takes them one by one, not split.
  for (;;) {
    // Opaque: nothing of this is worth a register over the mainloop.
    const int block = static_cast<int>(Opaque(blockIdx.x)), splits = SplitsOf(params), split = block % splits;
    const int64_t tile_index = block / splits, group = GroupOf(params);
    const SplitWorkspace<kRows, Traits::kDim> workspace(params);
    const int64_t head = Divide(tile_index, params.max_tiles);
    const int64_t number = tile_index - head * params.max_tiles + shared.extra;
    if (shared.extra > 0 && split != 0) return;
    const int parts = shared.extra > 0 ? 1 : splits;
    if (parts > 1 && block == 0 && threadIdx.x == 0) {
      *workspace.header = {static_cast<int>(params.max_tiles * KvHeadsOf(params)), splits};
    }
    const int64_t uniform = UniformQueryLength(params), skipped = SkippedLength(params);
    FoundTile found;
    int64_t length;  // tokens whose rows this kernel writes
    if (uniform > 0) {
      const int64_t tiles = Divide(params.max_tiles, BatchOf(params)), b = Divide(number, tiles);
      found = {b, tiles - 1 - (number - b * tiles)};
      length = uniform;
    } else {
      const int32_t* ranges = QueryRanges(params);
      const int64_t rows = QueryRows(params);
      const auto tokens = [&](int64_t b) {
        const TokenRange range = ClampRange(ranges, b, rows);
        return range.hi - range.lo > skipped ? range.hi - range.lo : 0;
      };
      const auto tiles = [&](int64_t b) { return (tokens(b) * group + kRows - 1) / kRows; };
      found = FindTile<Traits::kThreads>(BatchOf(params), number, tiles);
      if (found.b >= BatchOf(params)) {
        if (parts > 1 && split == 0 && threadIdx.x == 0) workspace.info[tile_index] = TileInfo{};
        return;
      }
      length = tokens(found.b);
      found.index = tiles(found.b) - 1 - found.index;
    }
    const SequenceView view = ViewSequence(params, found.b);
    const int64_t first_row = found.index * kRows;
    const int rows = static_cast<int>(length * group - first_row < kRows ? length * group - first_row : kRows);
    const int64_t first_token = Divide(first_row, group), last_token = Divide(first_row + rows - 1, group);
    if (threadIdx.x == 0) {
      shared.view = view;
      shared.b = found.b;
      shared.head = head;
      if constexpr (Traits::kKvDType == DType::kFloat8E4M3) {
        shared.head_scale[0] = HeadScale(params, params.cache.key_params, found.b, head);
        shared.head_scale[1] = HeadScale(params, params.cache.value_params, found.b, head);
      }
      shared.blocks = BlockList<Traits::kKeys>(view, first_token, min(last_token, view.q_len - 1));
      shared.begin = static_cast<int>(static_cast<int64_t>(shared.blocks.total()) * split / parts);
      shared.end = static_cast<int>(static_cast<int64_t>(shared.blocks.total()) * (split + 1) / parts);
      shared.num_rows = rows;
      shared.first_key_row = FirstKeyRow(params, found.b, head);
      shared.parts = parts;
      if (last_token >= view.q_len) shared.blocks.ForgetCommon();
      if (parts > 1 && split == 0) {
        workspace.info[tile_index] = {static_cast<int>(found.b), static_cast<int>(head), static_cast<int>(first_row),
                                      rows};
      }
    }
    FillTileRows<kRows>(params, view, head, first_row, rows, &shared.rows);
    __syncthreads();
    LoadQueryTile<E, kRows, Traits::kDim, Traits::kThreads>(params, found.b, shared.rows, rows, shared.query);

    MainloopSm80<Traits, Params> mainloop(params, shared);
    mainloop.Run();

    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int f = 0; f < Traits::kFragments; ++f) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = mainloop.sum[f][half];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        const int row = mainloop.WarpRow() + 16 * f + 8 * half + lane / 4;
        if (row >= shared.num_rows) continue;
        if (shared.parts > 1) {
          float* part = SplitWorkspace<kRows, Traits::kDim>(params).Part(static_cast<int>(Opaque(blockIdx.x)));
#pragma unroll
          for (int d = 0; d < Traits::kDim / 8; ++d) {
            *reinterpret_cast<float2*>(part + row * Traits::kDim + 8 * d + lane % 4 * 2) = {
                mainloop.o[f][d][2 * half], mainloop.o[f][d][2 * half + 1]};
          }
          if (lane % 4 == 0) {
            part[kRows * Traits::kDim + row] = mainloop.max[f][half] * mainloop.rule.to_log2;
            part[kRows * Traits::kDim + kRows + row] = sum;
          }
          continue;
        }
        // Dense rows past query_lens have no denominator, not even the sink.
        const float* sinks =
            shared.rows.token[row] < shared.view.first_token + shared.view.q_len ? params.score.sinks : nullptr;
        const RowEnd end = EndRow(mainloop.max[f][half] * mainloop.rule.to_log2, sum, sinks, shared.rows.head[row]);
        const int64_t out_row = shared.rows.token[row] * params.num_heads + shared.rows.head[row];
        if (lane % 4 == 0) params.lse[out_row] = end.lse;
#pragma unroll
        for (int d = 0; d < Traits::kDim / 8; ++d) {
          StorePair<E>(params.out, params.out_dtype, out_row * Traits::kDim + 8 * d + lane % 4 * 2,
                       mainloop.o[f][d][2 * half] * end.factor, mainloop.o[f][d][2 * half + 1] * end.factor);
        }
      }
    }
    const int64_t next = static_cast<int64_t>(Opaque(blockIdx.x)) / SplitsOf(params) + 1;
    if (UniformQueryLength(params) > 0 || next % params.max_tiles != 0) return;
    __syncthreads();  // shared memory has been read
    if (threadIdx.x == 0) ++shared.extra;
    __syncthreads();
  }
}

}  // namespace turboattn::prefill

#endif  // TURBOATTN_KERNELS_PREFILL_KERNEL_SM80_CUH_

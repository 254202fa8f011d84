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

// Leaves a warp's rows of a part in the workspace.
template <class Traits, class Params>
__device__ __forceinline__ void StorePart(const MainloopSm80<Traits, Params>& mainloop, float* part) {
  constexpr int kRows = Traits::kRows, kDim = Traits::kDim;
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int f = 0; f < Traits::kFragments; ++f) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = mainloop.RowSum(f, half);
      const int row = mainloop.Row(f, half);
      if (row >= mainloop.shared.num_rows) continue;
#pragma unroll
      for (int d = 0; d < kDim / 8; ++d) {
        *reinterpret_cast<float2*>(part + row * kDim + 8 * d + lane % 4 * 2) = {mainloop.o[f][d][2 * half],
                                                                                mainloop.o[f][d][2 * half + 1]};
      }
      if (lane % 4 == 0) {
        part[kRows * kDim + row] = mainloop.max[f][half] * mainloop.rule.to_log2;
        part[kRows * kDim + kRows + row] = sum;
      }
    }
  }
}

// Writes a warp's rows.
template <class Traits, class Params>
__device__ __forceinline__ void StoreRows(const Params& params, const MainloopSm80<Traits, Params>& mainloop) {
  using E = typename Traits::E;
  constexpr int kDim = Traits::kDim, kFragments = Traits::kFragments;
  const SharedSm80<Traits>& shared = mainloop.shared;
  const int column = threadIdx.x % 4;
  // A quad has 2 kFragments rows: each lane sees to the end of one.
  int row = 0;
  float max = 0.f, sum = 0.f;
#pragma unroll
  for (int i = 0; i < 2 * kFragments; ++i) {
    const bool mine = column % (2 * kFragments) == i;
    const float row_max = mainloop.max[i / 2][i % 2], row_sum = mainloop.RowSum(i / 2, i % 2);
    row = mine ? mainloop.Row(i / 2, i % 2) : row;
    max = mine ? row_max : max;
    sum = mine ? row_sum : sum;
  }
  const bool exists = row < shared.num_rows;
  const int64_t token = shared.rows.token[row];
  const int head = shared.rows.head[row];
  // Dense rows past query_lens have no denominator, not even the sink.
  const float* sinks = exists && token < shared.view.first_token + shared.view.q_len ? params.score.sinks : nullptr;
  const RowEnd end = EndRow(max * mainloop.rule.to_log2, sum, sinks, head);
  const int64_t out_row = exists ? token * params.num_heads + head : -1;
  if (exists && column < 2 * kFragments) params.lse[out_row] = end.lse;
#pragma unroll
  for (int i = 0; i < 2 * kFragments; ++i) {
    const int f = i / 2, half = i % 2;
    const int64_t to = __shfl_sync(~0u, out_row, i, 4);
    const float factor = __shfl_sync(~0u, end.factor, i, 4);
    if (params.out_dtype == DType::kFloat32) {
      if (to < 0) continue;
#pragma unroll
      for (int d = 0; d < kDim / 8; ++d) {
        StorePair<E>(params.out, params.out_dtype, to * kDim + 8 * d + column * 2, mainloop.o[f][d][2 * half] * factor,
                     mainloop.o[f][d][2 * half + 1] * factor);
      }
    } else {
#pragma unroll
      for (int d = 0; d < kDim / 8; d += 4) {
        uint32_t w[4];
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          w[k] = Pack<E>(mainloop.o[f][d + k][2 * half] * factor, mainloop.o[f][d + k][2 * half + 1] * factor);
        }
        const uint4 chunk = TransposeQuad({w[0], w[1], w[2], w[3]});
        if (to >= 0) *reinterpret_cast<uint4*>(static_cast<E*>(params.out) + to * kDim + 8 * (d + column)) = chunk;
      }
    }
  }
}

// A block a tile, parts of a tile fastest. Uniform calls: by sections of `section` pairs of a sequence and a kv head,
// the last tiles of all pairs of a section first, so that the longest causal ones start first. Others: kv head major,
// the last tiles of a sequence first.
template <class Traits, class Params>
__global__ void __launch_bounds__(Traits::kThreads, 2)
    PrefillSm80(const __grid_constant__ Params params, const __grid_constant__ int section) {
  using E = typename Traits::E;
  constexpr int kRows = Traits::kRows;
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  SharedSm80<Traits>& shared = *reinterpret_cast<SharedSm80<Traits>*>(s_bytes);

  LaunchDependents();  // decode
  if (SkippedLength(params) == 0) {  // else the decode kernel writes them
    FillUnownedRows(params, static_cast<int64_t>(blockIdx.x) * Traits::kWarps + threadIdx.x / 32,
                    static_cast<int64_t>(gridDim.x) * Traits::kWarps);
  }
  if (BatchOf(params) == 0) return;
  // Ranges that overlap make more tiles than the grid holds: the last block of a head takes those one by one, uncut.
  int64_t extra = 0;  // tiles past those of the grid that this block has reached
  for (;;) {
    // Opaque: nothing of this is worth a register over the mainloop.
    const int block = static_cast<int>(Opaque(blockIdx.x)), splits = SplitsOf(params), split = block % splits;
    const uint32_t tile_index = block / splits, max_tiles = static_cast<uint32_t>(params.max_tiles);
    const int64_t group = GroupOf(params);
    const SplitWorkspace<kRows, Traits::kDim> workspace(params);
    if (extra > 0 && split != 0) return;
    const int parts = extra > 0 ? 1 : splits;
    if (parts > 1 && block == 0 && threadIdx.x == 0) {
      *workspace.header = {static_cast<int>(params.max_tiles * KvHeadsOf(params))};
    }
    const int64_t uniform = UniformQueryLength(params), skipped = SkippedLength(params);
    FoundTile found;
    int64_t head;
    int64_t length;  // tokens whose rows this kernel writes
    if (uniform > 0) {
      const uint32_t batch = static_cast<uint32_t>(BatchOf(params)), tiles = max_tiles / batch;
      const uint32_t pairs = static_cast<uint32_t>(KvHeadsOf(params)) * batch, number = tile_index / (section * tiles);
      const uint32_t first = number * section, here = min(static_cast<uint32_t>(section), pairs - first);
      const uint32_t i = tile_index - first * tiles, place = i / here, pair = first + i - place * here;
      head = pair / batch;
      found = {pair - static_cast<uint32_t>(head) * batch, tiles - 1 - place};
      length = uniform;
    } else {
      const int32_t* ranges = QueryRanges(params);
      const int64_t rows = QueryRows(params);
      const auto tokens = [&](int64_t b) {
        const TokenRange range = ClampRange(ranges, b, rows);
        return range.hi - range.lo > skipped ? range.hi - range.lo : 0;
      };
      const auto tiles = [&](int64_t b) { return (tokens(b) * group + kRows - 1) / kRows; };
      head = tile_index / max_tiles;
      found = FindTile<Traits::kThreads>(BatchOf(params), tile_index % max_tiles + extra, tiles);
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
    // What the first products wait for is asked for first; what is known of the rows is written down meanwhile.
    CopyQueryTile<E, kRows, Traits::kDim, Traits::kThreads>(params, view.first_token, head, first_row, rows,
                                                            shared.query);
    // By two warps side by side: both are chains of dependent instructions.
    if (threadIdx.x == kWarp) {
      const int64_t first_token = Divide(first_row, group), last_token = Divide(first_row + rows - 1, group);
      shared.blocks = BlockList<Traits::kKeys>(view, first_token, min(last_token, view.q_len - 1));
      const int64_t total = shared.blocks.total();
      shared.begin = static_cast<int>(total * split / parts);
      shared.end = static_cast<int>(total * (split + 1) / parts);
      if constexpr (Traits::kFragments == 2) {
        const int64_t middle_token = Divide(first_row + min(rows, kRows / 2) - 1, group);
        const uint32_t end = view.UnionOf(kOwnRun, first_token, min(middle_token, view.q_len - 1)).hi;
        shared.late = static_cast<int>((end + Traits::kLateKeys - 1) / Traits::kKeys) - shared.blocks.first[kOwnRun] +
                      shared.blocks.count[0];
      }
      if (last_token >= view.q_len) shared.blocks.ForgetCommon();
    }
    if (threadIdx.x == 0) {
      shared.view = view;
      shared.b = found.b;
      shared.head = head;
      if constexpr (Traits::kKvDType == DType::kFloat8E4M3) {
        shared.head_scale[0] = HeadScale(params, params.cache.key_params, found.b, head);
        shared.head_scale[1] = HeadScale(params, params.cache.value_params, found.b, head);
      }
      shared.num_rows = rows;
      shared.first_key_row = FirstKeyRow(params, found.b, head);
      shared.parts = parts;
      shared.extra = extra;
      if (parts > 1 && split == 0) {
        workspace.info[tile_index] = {
            static_cast<int>(found.b), static_cast<int>(head), static_cast<int>(first_row), rows, parts, block, 1};
      }
    }
    __syncthreads();
    MainloopSm80<Traits, Params> mainloop(params, shared);
    mainloop.Start();
    FillTileRows<kRows>(params, view, head, first_row, rows, &shared.rows);
    WaitCopies<0>();
    __syncthreads();
    TurnQueryTile<E, kRows, Traits::kDim, Traits::kThreads>(params, found.b, shared.rows, rows, shared.query);
    mainloop.Run();
    if (shared.parts > 1) {
      StorePart(mainloop, SplitWorkspace<kRows, Traits::kDim>(params).Part(static_cast<int>(Opaque(blockIdx.x))));
    } else {
      StoreRows(params, mainloop);
    }
    const int64_t next = static_cast<int64_t>(Opaque(blockIdx.x)) / SplitsOf(params) + 1;
    if (UniformQueryLength(params) > 0 || next % params.max_tiles != 0) return;
    extra = shared.extra + 1;
    __syncthreads();  // shared memory has been read
  }
}

}  // namespace turboattn::prefill

#endif  // TURBOATTN_KERNELS_PREFILL_KERNEL_SM80_CUH_

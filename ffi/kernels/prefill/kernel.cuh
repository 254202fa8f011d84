// Attention of a tile of (token, head of the group) rows over its keys: from pages or from plain arrays.
#ifndef TURBOATTN_KERNELS_PREFILL_KERNEL_CUH_
#define TURBOATTN_KERNELS_PREFILL_KERNEL_CUH_

#include "kernels/prefill/mainloop_sm80.cuh"

namespace turboattn::prefill {

// Sequences of at most this many tokens are the decode kernel's.
TA_HD int64_t SkippedLength(const PagedAttentionParams& params) {
  return params.plan.runs_decode ? params.plan.decode_q_len : 0;
}
TA_HD int64_t SkippedLength(const LinearAttentionParams&) { return 0; }

// Tiles that one kv head can have at most, from static sizes: exact when all sequences have the same length.
template <int kRows, class Params>
__host__ __device__ int64_t MaxTiles(const Params& params) {
  const int64_t group = params.num_heads / KvHeadsOf(params), uniform = UniformQueryLength(params);
  if (uniform > 0) return BatchOf(params) * ((uniform * group + kRows - 1) / kRows);
  return QueryRows(params) * group / kRows + BatchOf(params);  // each sequence has at most one tile that is not full
}

// Blocks: kv head major, tiles of a head in descending order within a sequence, so that the longest causal tiles of a
// sequence start first.
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
  const int64_t group = GroupOf(params), max_tiles = MaxTiles<kRows>(params);
  const int64_t head = Divide(blockIdx.x, max_tiles), number = blockIdx.x - head * max_tiles;
  const int64_t uniform = UniformQueryLength(params), skipped = SkippedLength(params);
  FoundTile found;
  int64_t length;  // tokens whose rows this kernel writes
  if (uniform > 0) {
    const int64_t tiles = Divide(max_tiles, BatchOf(params)), b = Divide(number, tiles);
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
    if (found.b >= BatchOf(params)) return;
    length = tokens(found.b);
    found.index = tiles(found.b) - 1 - found.index;
  }
  const SequenceView view = ViewSequence(params, found.b);
  const int64_t first_row = found.index * kRows;
  const int rows = static_cast<int>(length * group - first_row < kRows ? length * group - first_row : kRows);
  const int64_t first_token = Divide(first_row, group), last_token = Divide(first_row + rows - 1, group);
  if (threadIdx.x == 0) {
    shared.view = view;
    shared.first_key_row = FirstKeyRow(params, found.b, head);
    shared.blocks = BlockList<Traits::kKeys>(view, first_token, min(last_token, view.q_len - 1));
  }
  FillTileRows<kRows>(params, view, head, first_row, rows, &shared.rows);
  __syncthreads();
  LoadQueryTile<E, kRows, Traits::kDim, Traits::kThreads>(params, found.b, shared.rows, rows, shared.query);

  MainloopSm80<Traits, Params> mainloop(params, shared, found.b, head);
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
      if (row >= rows) continue;
      // Dense rows past query_lens have no denominator, not even the sink.
      const float* sinks = shared.rows.token[row] < view.first_token + view.q_len ? params.score.sinks : nullptr;
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
}

}  // namespace turboattn::prefill

#endif  // TURBOATTN_KERNELS_PREFILL_KERNEL_CUH_

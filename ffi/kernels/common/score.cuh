// From dot products to softmax exponents, and which row sees which key: what the prefill and decode kernels share.
#ifndef TURBOATTN_KERNELS_COMMON_SCORE_CUH_
#define TURBOATTN_KERNELS_COMMON_SCORE_CUH_

#include <cstdint>

#include "core/params.h"
#include "kernels/common/dtypes.h"
#include "kernels/common/ptx.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/common/softmax.h"

namespace turboattn {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// exp(score) = 2^(x * to_log2): in the plain case x is the dot product itself, so that scaling costs nothing; where
// scores are modified, x is the score in natural units.
struct ScoreRule {
  float scale;
  float shrink;  // dot products come divided by this, a power of two
  float soft_cap;
  float to_log2;
  bool modified;
};

__device__ inline ScoreRule MakeScoreRule(const ScoreParams& score, float shrink = 1.f) {
  const float to_log2 = score.scale * shrink * kLog2E;
  // The running maximum is one of the dot products themselves: that needs a positive factor that is a normal number.
  const bool plain =
      score.soft_cap == 0.f && score.alibi_slopes == nullptr && to_log2 >= 0x1p-126f && IsFinite(to_log2);
  return {score.scale, shrink, score.soft_cap, plain ? to_log2 : kLog2E, !plain};
}

// cap * tanh(x / cap), for normal caps within 4e-7 of it, relatively. tanhf would be twice as long and branch.
struct SoftCap {
  float cap;
  float inverse;

  __device__ explicit SoftCap(float cap) : cap(cap) {
    const float near = Reciprocal(cap);
    inverse = fmaf(near, fmaf(-cap, near, 1.f), near);
  }
  __device__ __forceinline__ float Apply(float x) const {
    const float y = x * inverse, z = y * y;
    // Near 0, 1 - 2 / (e^2y + 1) would cancel. From x, since y may be subnormal.
    const float q = fmaf(fmaf(fmaf(0.01477648f, z, -0.05166084f), z, 0.1330235f), z, -0.33332014f);
    const float small = fmaf(q * z, x, x);
    const float large = fmaf(-2.f * cap, Reciprocal(Exp2(fabsf(y) * (2.f * kLog2E)) + 1.f), cap);
    return fabsf(y) < 0.65f ? small : copysignf(large, x);
  }
};

// Dot products to scores, but for ALiBi.
template <int kTiles>
__device__ __forceinline__ void ScaleAndCap(const ScoreRule& rule, float (&s)[kTiles][4]) {
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = s[n][e] * rule.shrink * rule.scale;  // their product may pass float32
  }
  if (rule.soft_cap == 0.f) return;
  const SoftCap cap(rule.soft_cap);
#pragma unroll
  for (int n = 0; n < kTiles; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) s[n][e] = cap.Apply(s[n][e]);
  }
}

// What is known of each row of a tile, in shared memory.
template <int kRows>
struct TileRows {
  int lo[kRuns][kRows];  // keys [lo, hi) of a run that the row sees; empty for rows past the tile's last
  int hi[kRuns][kRows];
  int64_t position[kRows];
  int64_t token[kRows];  // row of the query array, without the head axis
  int head[kRows];       // query head
  float slope[kRows];
  int segment[kRows];
};

__device__ inline const int32_t* SegmentsOfQueries(const LinearAttentionParams& params) { return params.segment_ids_q; }
__device__ inline const int32_t* SegmentsOfQueries(const PagedAttentionParams&) { return nullptr; }
// Segment ids of sequence b's keys; null without segments.
__device__ inline const int32_t* SegmentsOfKeys(const LinearAttentionParams& params, int64_t b) {
  return params.segment_ids_kv != nullptr ? params.segment_ids_kv + b * params.num_keys : nullptr;
}
__device__ inline const int32_t* SegmentsOfKeys(const PagedAttentionParams&, int64_t) { return nullptr; }

// Row r of a tile of rows [first_row, first_row + rows) of sequence `view`, kv head `head`: it is (token r / group,
// query head head * group + r % group).
template <int kRows, class Params>
__device__ void FillTileRow(const Params& params, const SequenceView& view, int64_t head, int64_t first_row, int rows,
                            int r, TileRows<kRows>* tile) {
  const int group = GroupOf(params);
  const int64_t i = Divide(first_row + r, group);
  const int query_head = static_cast<int>(head * group + (first_row + r - i * group));
  const bool exists = r < rows && i < view.q_len;  // dense rows past query_lens see nothing
  for (int run = 0; run < kRuns; ++run) {
    const RunRange seen = exists ? view.UnionOf(run, i, i) : RunRange{0, 0};
    tile->lo[run][r] = seen.lo;
    tile->hi[run][r] = seen.hi;
  }
  tile->position[r] = view.position + i;
  tile->token[r] = view.first_token + i;
  tile->head[r] = query_head;
  tile->slope[r] = exists && params.score.alibi_slopes != nullptr ? params.score.alibi_slopes[query_head] : 0.f;
  tile->segment[r] =
      exists && SegmentsOfQueries(params) != nullptr ? SegmentsOfQueries(params)[view.first_token + i] : 0;
}

// All rows, by the whole block; __syncthreads() before use.
template <int kRows, class Params>
__device__ void FillTileRows(const Params& params, const SequenceView& view, int64_t head, int64_t first_row, int rows,
                             TileRows<kRows>* tile) {
  for (int r = threadIdx.x; r < kRows; r += blockDim.x) {
    FillTileRow<kRows>(params, view, head, first_row, rows, r, tile);
  }
}

// A block of kKeys keys of one run, and how to ask whether a row sees one of them.
struct KeyBlockView {
  KeyRun run;
  int run_index;
  int first_key;
  uint32_t mapped;              // bit g: keys first_key + 8 g .. + 7 lie on a mapped page
  const int32_t* key_segments;  // by key; null without segments
  const uint8_t* tree;          // [rows of the query array, tree_columns]; null without one
  int64_t tree_columns;
  int64_t tree_start;  // position of column 0
};

template <int kRows>
__device__ __forceinline__ bool Sees(const TileRows<kRows>& tile, int row, const KeyBlockView& block, int key) {
  const int j = block.first_key + key;
  if (j < tile.lo[block.run_index][row] || j >= tile.hi[block.run_index][row]) return false;
  if ((block.mapped >> (key >> 3) & 1u) == 0) return false;
  if (block.key_segments != nullptr && block.key_segments[j] != tile.segment[row]) return false;
  if (block.tree != nullptr) {
    const int64_t column = block.run.Position(j) - block.tree_start;
    if (column >= 0 && (column >= block.tree_columns || block.tree[tile.token[row] * block.tree_columns + column] == 0))
      return false;
  }
  return true;
}

// |p - s| of a row at position p and of keys of a block, for ALiBi. 64-bit sums once: keys of a block differ by little.
struct RowDistance {
  int first;  // p - s of the first key, as far as 32 bits hold that of the other keys too
  int stride;
  float beyond;  // the rest, which only meaningless positions have

  // For keys first_key .. first_key + keys - 1 of the block.
  __device__ RowDistance(int64_t position, const KeyBlockView& block, int first_key, int keys)
      : stride(block.run.stride) {
    const int64_t all = position - block.run.Position(block.first_key + first_key);
    const int64_t held = min(max(all, static_cast<int64_t>(stride) * keys - INT_MAX), static_cast<int64_t>(INT_MAX));
    first = static_cast<int>(held);
    beyond = fabsf(static_cast<float>(all - held));
  }
  // To the key `key` places after the first.
  __device__ __forceinline__ float To(int key) const { return static_cast<float>(abs(first - key * stride)) + beyond; }
};

// Scale, soft cap and ALiBi where asked for: of an m16 product's scores, rows `row` and `row` + 8 of the tile. kPart
// n8 tiles, then they move round: code for all at once would be long, and take more registers than there are.
template <int kPart, int kRows, int kTiles>
__device__ __forceinline__ void ModifyScores(const ScoreRule& rule, bool has_alibi, const TileRows<kRows>& rows,
                                             int row, const KeyBlockView& block, float (&s)[kTiles][4]) {
  static_assert(kTiles % kPart == 0);
  const int column = threadIdx.x % 4 * 2;
#pragma unroll 1
  for (int part = 0; part < kTiles / kPart; ++part) {
    float done[kPart][4];
#pragma unroll
    for (int n = 0; n < kPart; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) done[n][e] = s[n][e];
    }
    ScaleAndCap(rule, done);
    if (has_alibi) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float slope = rows.slope[row + 8 * half];
        const RowDistance distance(rows.position[row + 8 * half], block, 8 * kPart * part + column, 8 * kPart);
#pragma unroll
        for (int n = 0; n < kPart; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) done[n][2 * half + e] -= slope * distance.To(8 * n + e);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = n + kPart < kTiles ? s[n + kPart][e] : done[n + kPart - kTiles][e];
    }
  }
}

// The end of a row: from the softmax state in exponents of 2 (`max` = running maximum times to_log2, -Inf: no key) to
// the factor of its unnormalised value sum and its lse.
struct RowEnd {
  float factor;
  float lse;
};

__device__ inline RowEnd EndRow(float max, float sum, const float* sinks, int head) {
  if (sum == 0.f) return {0.f, sinks != nullptr ? sinks[head] : -Infinity()};
  if (sinks == nullptr) return {Reciprocal(sum), fmaf(max, kLn2, logf(sum))};  // rounded once: far from 0 that shows
  SoftmaxState state = {max * kLn2, sum};
  const float weight = AddSink(&state, sinks[head]);
  return {weight * Reciprocal(state.sum), LogSumExp(state)};
}

// Writes a pair of neighbouring columns.
template <class E>
__device__ __forceinline__ void StorePair(void* out, DType out_dtype, int64_t element, float low, float high) {
  if (out_dtype == DType::kFloat32) {
    *reinterpret_cast<float2*>(static_cast<float*>(out) + element) = {low, high};
  } else {
    *reinterpret_cast<uint32_t*>(static_cast<E*>(out) + element) = Pack<E>(low, high);
  }
}

// Four words of each lane of a quad, transposed: word j of lane c becomes word c of lane j.
__device__ __forceinline__ uint4 TransposeQuad(uint4 w) {
  const int lane = threadIdx.x % 32;
  const bool odd = (lane & 1) != 0, high = (lane & 2) != 0;
  const uint32_t own0 = high ? w.z : w.x, own1 = high ? w.w : w.y;
  const uint32_t far0 = __shfl_xor_sync(~0u, high ? w.x : w.z, 2), far1 = __shfl_xor_sync(~0u, high ? w.y : w.w, 2);
  const uint32_t mine = odd ? own1 : own0, its = odd ? far1 : far0;  // of this lane and lane ^ 2
  const uint32_t near = __shfl_xor_sync(~0u, odd ? own0 : own1, 1), cross = __shfl_xor_sync(~0u, odd ? far0 : far1, 1);
  const uint32_t a = odd ? near : mine, b = odd ? mine : near, c = odd ? cross : its, d = odd ? its : cross;
  return high ? uint4{c, d, a, b} : uint4{a, b, c, d};
}

// Writes zeros and -Inf to rows of the packed query array that no sequence owns. Warp `warp` of `warps`.
template <class Params>
__device__ void FillUnownedRows(const Params& params, int64_t warp, int64_t warps) {
  const int32_t* ranges = QueryRanges(params);
  if (ranges == nullptr) return;
  const int lane = threadIdx.x % 32;
  const int64_t rows = QueryRows(params), heads = params.num_heads;
  const int64_t row_words = heads * ValueDimOf(params) / (params.out_dtype == DType::kFloat32 ? 4 : 8);  // of 16 bytes
#pragma unroll 1
  for (int64_t row = warp; row < rows; row += warps) {
    if (row < BatchOf(params)) {  // one token a sequence: row b is sequence b's
      const TokenRange range = ClampRange(ranges, row, rows);
      if (row >= range.lo && row < range.hi) continue;
    }
    bool owned = false;
#pragma unroll 1
    for (int64_t base = 0; base < BatchOf(params) && !owned; base += 32) {
      const int64_t b = base + lane;
      const TokenRange range = b < BatchOf(params) ? ClampRange(ranges, b, rows) : TokenRange{0, 0};
      owned = __any_sync(~0u, row >= range.lo && row < range.hi);
    }
    if (owned) continue;
#pragma unroll 1
    for (int64_t i = lane; i < row_words; i += 32) static_cast<uint4*>(params.out)[row * row_words + i] = {0, 0, 0, 0};
#pragma unroll 1
    for (int64_t h = lane; h < heads; h += 32) params.lse[row * heads + h] = -Infinity();
  }
}

// Finds a tile by its number, when sequence b has count(b) of them (count <= 0: none), in the order of sequences. Run
// by the whole block of kThreads threads; every thread gets the result. found.b == BatchOf(params): there is no such
// tile.
struct FoundTile {
  int64_t b;
  int64_t index;  // within the sequence
};

template <int kThreads, class Count>
__device__ FoundTile FindTile(int64_t batch, int64_t number, Count count) {
  constexpr int kWarps = kThreads / 32;
  __shared__ int64_t s_sums[kWarps];
  __shared__ FoundTile s_found;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) s_found = {batch, 0};
  int64_t before = 0;  // tiles of the sequences before this round's
  for (int64_t base = 0; base < batch; base += kThreads) {
    const int64_t b = base + threadIdx.x;
    const int64_t mine = b < batch ? count(b) : 0;
    int64_t sum = mine;
    for (int step = 1; step < 32; step *= 2) {
      const int64_t other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    __syncthreads();  // the last round's sums have been read
    if (lane == 31) s_sums[warp] = sum;
    __syncthreads();
    int64_t start = before + sum - mine;
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) start += s_sums[w];
      before += s_sums[w];
    }
    if (number >= start && number < start + mine) s_found = {b, number - start};
    if (number < before) break;
  }
  __syncthreads();
  const FoundTile found = s_found;
  __syncthreads();
  return found;
}

// The sum of what the threads before this one have goes to *before; returns that of all. By the whole block; a
// barrier between two scans.
template <int kThreads>
__device__ int64_t ScanOverThreads(int64_t mine, int64_t* before) {
  constexpr int kWarps = kThreads / 32;
  __shared__ int64_t s_sums[kWarps];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int64_t sum = mine;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int64_t other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  if (lane == 31) s_sums[warp] = sum;
  __syncthreads();
  int64_t total = 0;
  *before = sum - mine;
  for (int w = 0; w < kWarps; ++w) {
    if (w < warp) *before += s_sums[w];
    total += s_sums[w];
  }
  return total;
}

}  // namespace turboattn

#endif  // TURBOATTN_KERNELS_COMMON_SCORE_CUH_

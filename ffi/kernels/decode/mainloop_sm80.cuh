// The decode mainloop of the sm80 family: one warp, 16 keys a step, mma m16n8k16 with keys as the 16 rows and query rows
// as the columns, so that a group of up to 8 heads wastes nothing.
//
//   S^T [16 keys, rows] = K [16, D] Q^T          A = K by ldmatrix,             B = Q^T, in registers for the whole unit
//   O^T [D, rows]      += V^T [D, 16] P^T        A = V^T by ldmatrix.trans,     B = P^T, S^T transposed by movmatrix
//
// The columns of S^T and O^T are the same in every lane, so the softmax state of a column lives where its sums do. int8
// codes are decoded in registers between ldmatrix and mma. ldmatrix moves pairs of bytes, so the order of a row's
// elements is permuted: within 16 elements, lane c holds 4 c .. 4 c + 3 of a key (the query's fragments are loaded in the
// same order) and columns 2 g, 2 g + 1 of V^T (rows g and g + 8 of O^T are those: see ValueColumn).
#ifndef TURBOATTN_KERNELS_DECODE_MAINLOOP_SM80_CUH_
#define TURBOATTN_KERNELS_DECODE_MAINLOOP_SM80_CUH_

#include <cstdint>

#include "kernels/common/int8.cuh"
#include "kernels/common/ptx.cuh"
#include "kernels/common/query_tile.cuh"
#include "kernels/common/score.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/decode/traits.h"

namespace turboattn::decode {

// A warp's ring: K and V of 16 keys a step, and their (scale, zero) pairs.
template <class Traits>
struct RingSm80 {
  alignas(128) unsigned char tile[Traits::kSteps][2][Traits::kTileBytes];
  uint32_t row_params[Traits::kSteps][2][Traits::kQuantised ? kWarpKeys : 1];
};

// What the warps leave for each other at the end of a part of a unit.
template <class Traits>
struct WarpResults {
  float o[kWarps][Traits::kRows][Traits::kDim + 4];
  float max[kWarps][Traits::kRows];  // in exponents of 2
  float sum[kWarps][Traits::kRows];
};

template <class Traits>
struct SharedSm80 {
  union {
    RingSm80<Traits> rings[kWarps];
    WarpResults<Traits> results;
    typename Traits::E query[Traits::kRows * Traits::kDim];  // in registers before the first load
  };
  TileRows<Traits::kRows> rows;
  SequenceView view;
  BlockList<kDecodeKeys> blocks;
};

template <class Traits>
struct MainloopSm80 {
  using E = typename Traits::E;
  static constexpr int kDim = Traits::kDim, kColumns = Traits::kColumns, kSteps = Traits::kSteps;
  static constexpr int kStoredChunks = Traits::kStoredChunks;
  static constexpr int kLookUp = 16;  // steps whose two groups of 8 keys the 32 lanes look up together
  static_assert(kSteps <= kLookUp);

  const PagedAttentionParams& params;
  SharedSm80<Traits>& shared;
  RingSm80<Traits>& ring;
  const SequenceView& view;
  const BlockList<kDecodeKeys>& blocks;
  const ScoreRule rule;
  const int64_t b;
  const int64_t head;       // kv head
  const int first_block;    // of this part of the unit
  const int num_blocks;
  const bool rows_differ;   // in what they see
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;

  uint32_t q[kColumns][kDim / 16][2];
  float o[kDim / 16][kColumns][4] = {};
  float max[kColumns][2];  // of x (see ScoreRule), by column 2 c + e
  float sum[kColumns][2] = {};

  int32_t next_entry = 0;
  bool next_present = false;
  int group = kNoGroup;
  uint32_t mapped = 0, mapped_before = 0;  // by lane of the look-up, of the loader's batch of steps and the one before

  __device__ MainloopSm80(const PagedAttentionParams& params, SharedSm80<Traits>& shared, int64_t b, int64_t head,
                          int first_block, int num_blocks, bool rows_differ)
      : params(params),
        shared(shared),
        ring(shared.rings[threadIdx.x / 32]),
        view(shared.view),
        blocks(shared.blocks),
        rule(MakeScoreRule(params.score)),
        b(b),
        head(head),
        first_block(first_block),
        num_blocks(num_blocks),
        rows_differ(rows_differ) {
    for (int n = 0; n < kColumns; ++n) max[n][0] = max[n][1] = -Infinity();
  }

  // ---- loading

  __device__ int FirstKey(int step) const { return blocks.FirstKey(first_block + step) + warp * kWarpKeys; }

  // Reads the page table for steps base .. base + 15, two lanes a step, long before the keys are loaded.
  __device__ void LookUp(int base) {
    const int step = base + lane / 2;
    next_present = false;
    if (step >= num_blocks) return;
    const int run = blocks.RunOf(first_block + step), j = FirstKey(step) + lane % 2 * 8;
    const RunRange seen = blocks.seen[run];
    next_present = seen.Meets(j, 8);
    if (next_present) next_entry = KeysOf(params, b, head, run).Entry(j);
  }

  // K and V of a step into the ring, or nothing past the last step; one group of copies either way.
  __device__ void Load(int step) {
    if (step < num_blocks) {
      if (step % kLookUp == 0) {
        const int mine = step + lane / 2;
        group = kNoGroup;
        if (next_present) {
          const int run = blocks.RunOf(first_block + mine);
          group = KeysOf(params, b, head, run).Group(FirstKey(mine) + lane % 2 * 8, next_entry);
        }
        mapped_before = mapped;
        mapped = __ballot_sync(~0u, group != kNoGroup);
        LookUp(step + kLookUp);
      }
      const int local = step % kLookUp * 2;
      const int groups[2] = {__shfl_sync(~0u, group, local), __shfl_sync(~0u, group, local + 1)};
      const RunRange seen = blocks.seen[blocks.RunOf(first_block + step)];
      const int first_key = FirstKey(step), slot = step % kSteps;
      // A lane copies one chunk of every kRowsPerCopy-th row; these are whole groups or parts of one.
      constexpr int kRowsPerCopy = 32 / kStoredChunks;
      const int r0 = lane / kStoredChunks, chunk = lane % kStoredChunks;
      const char* from[2][2];  // of K and V, of the first row of each group that this lane copies
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int64_t offset = static_cast<int64_t>(groups[h]) * (8 * Traits::kStoredBytes) + r0 * Traits::kStoredBytes + chunk * 16;
        from[0][h] = static_cast<const char*>(params.cache.key) + offset;
        from[1][h] = static_cast<const char*>(params.cache.value) + offset;
      }
      const bool whole = groups[0] != kNoGroup && groups[1] != kNoGroup && seen.HoldsAll(first_key, kWarpKeys);
#pragma unroll
      for (int kv = 0; kv < 2; ++kv) {
        const uint32_t to = SharedAddress(ring.tile[slot][kv]);
#pragma unroll
        for (int i = 0; i < kWarpKeys / kRowsPerCopy; ++i) {
          constexpr int kCopiesPerGroup = 8 / kRowsPerCopy;
          const int h = i / kCopiesPerGroup, r = i * kRowsPerCopy + r0;
          const char* address = from[kv][h] + i % kCopiesPerGroup * kRowsPerCopy * Traits::kStoredBytes;
          const uint32_t at = to + SwizzledChunk<kStoredChunks>(r, chunk) * 16;
          if (whole) {
            CopyAsync16(at, address, true);
          } else {
            const bool valid = groups[h] != kNoGroup && seen.Holds(first_key + r);
            CopyAsync16(at, valid ? address : static_cast<const char*>(params.cache.key), valid);
          }
        }
      }
      if constexpr (Traits::kQuantised) {
        const int r = lane % kWarpKeys, which = lane / kWarpKeys;
        const int g = r < 8 ? groups[0] : groups[1];
        const bool valid = g != kNoGroup && seen.Holds(first_key + r);
        const void* array = which == 0 ? params.cache.key_params : params.cache.value_params;
        const int64_t offset = valid ? (static_cast<int64_t>(g) * 8 + r % 8) * 4 : 0;
        CopyAsync4(SharedAddress(&ring.row_params[slot][which][r]), static_cast<const char*>(array) + offset, valid);
      }
    }
    CommitCopies();
  }

  // ---- fragments

  // Fragments of Q^T from the tile in shared memory.
  __device__ void LoadQuery() {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      const int row = 8 * n + lane / 4;
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int d = 16 * k + (Traits::kQuantised ? lane % 4 * 4 + 2 * i : lane % 4 * 2 + 8 * i);
          const E* element = shared.query + SwizzledChunk<kDim / kChunk>(row, d / kChunk) * kChunk + d % kChunk;
          q[n][k][i] = *reinterpret_cast<const uint32_t*>(element);
        }
      }
    }
  }

  __device__ RowScale Scale(int slot, int which, int key) const {
    return UnpackRowScale<E>(ring.row_params[slot][which][key]);
  }

  // s = K Q^T of one step.
  __device__ void MultiplyKeys(int slot, float (&s)[kColumns][4]) {
    const uint32_t tile = SharedAddress(ring.tile[slot][0]);
    const int row = lane % 16, half = lane / 16;
    if constexpr (Traits::kQuantised) {
      const RowScale low = Scale(slot, 0, lane / 4), high = Scale(slot, 0, lane / 4 + 8);
#pragma unroll
      for (int k = 0; k < kDim / 16; k += 2) {
        uint32_t x[4];
        LoadMatrix4(x, tile + SwizzledChunk<kStoredChunks>(row, k + half) * 16);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t a[4] = {DecodeCodes<E, 0, 1>(x[2 * i], low, low), DecodeCodes<E, 0, 1>(x[2 * i + 1], high, high),
                                 DecodeCodes<E, 2, 3>(x[2 * i], low, low), DecodeCodes<E, 2, 3>(x[2 * i + 1], high, high)};
#pragma unroll
          for (int n = 0; n < kColumns; ++n) Mma<E>(s[n], a, q[n][k + i][0], q[n][k + i][1]);
        }
      }
    } else {
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) {
        uint32_t a[4];
        LoadMatrix4(a, tile + SwizzledChunk<kStoredChunks>(row, 2 * k + half) * 16);
#pragma unroll
        for (int n = 0; n < kColumns; ++n) Mma<E>(s[n], a, q[n][k][0], q[n][k][1]);
      }
    }
  }

  // o += V^T P^T of one step.
  __device__ void MultiplyValues(int slot, const uint32_t (&p)[kColumns][2]) {
    const uint32_t tile = SharedAddress(ring.tile[slot][1]);
    if constexpr (Traits::kQuantised) {
      const int c = lane % 4 * 2;
      const RowScale scale[4] = {Scale(slot, 1, c), Scale(slot, 1, c + 1), Scale(slot, 1, c + 8), Scale(slot, 1, c + 9)};
      const int row = lane % 16, half = lane / 16;
#pragma unroll
      for (int d = 0; d < kDim / 16; d += 2) {
        uint32_t x[4];
        LoadMatrix4Transposed(x, tile + SwizzledChunk<kStoredChunks>(row, d + half) * 16);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const uint32_t a[4] = {DecodeCodes<E, 0, 2>(x[2 * i], scale[0], scale[1]),
                                 DecodeCodes<E, 1, 3>(x[2 * i], scale[0], scale[1]),
                                 DecodeCodes<E, 0, 2>(x[2 * i + 1], scale[2], scale[3]),
                                 DecodeCodes<E, 1, 3>(x[2 * i + 1], scale[2], scale[3])};
#pragma unroll
          for (int n = 0; n < kColumns; ++n) Mma<E>(o[d + i][n], a, p[n][0], p[n][1]);
        }
      }
    } else {
      const int row = lane / 16 * 8 + lane % 8, half = lane / 8 % 2;
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) {
        uint32_t a[4];
        LoadMatrix4Transposed(a, tile + SwizzledChunk<kStoredChunks>(row, 2 * d + half) * 16);
#pragma unroll
        for (int n = 0; n < kColumns; ++n) Mma<E>(o[d][n], a, p[n][0], p[n][1]);
      }
    }
  }

  // Which element of a value row o[d][.][e] belongs to.
  __device__ int ValueColumn(int d, int e) const {
    return 16 * d + (Traits::kQuantised ? lane / 4 * 2 + e / 2 : lane / 4 + e / 2 * 8);
  }

  // ---- softmax

  __device__ void ModifyAndMask(const KeyBlockView& block, bool partial, float (&s)[kColumns][4]) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = 8 * n + lane % 4 * 2 + e % 2, key = lane / 4 + e / 2 * 8;
        if (rule.modified) {
          const float slope = shared.rows.slope[row];
          s[n][e] = ModifyScore(rule, s[n][e], slope, slope != 0.f ? Distance(shared.rows, row, block, key) : 0.f);
        }
        if (partial && !Sees(shared.rows, row, block, key)) s[n][e] = -Infinity();
      }
    }
  }

  // Scores to probabilities, as B fragments of the second product; rescales what there is when a maximum grows.
  __device__ void Softmax(float (&s)[kColumns][4], uint32_t (&p)[kColumns][2]) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      float top[2];
      bool grows = false;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        top[e] = fmaxf(s[n][e], s[n][e + 2]);
        grows = grows || top[e] > max[n][e];
      }
      if (__any_sync(~0u, grows)) {
        float alpha[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          top[e] = fmaxf(top[e], max[n][e]);
#pragma unroll
          for (int step = 4; step < 32; step *= 2) top[e] = fmaxf(top[e], __shfl_xor_sync(~0u, top[e], step));
          alpha[e] = max[n][e] == top[e] ? 1.f
                     : max[n][e] == -Infinity() ? 0.f
                                                : Exp2(__fmul_rn(max[n][e], rule.to_log2) - __fmul_rn(top[e], rule.to_log2));
          max[n][e] = top[e];
          sum[n][e] *= alpha[e];
        }
#pragma unroll
        for (int d = 0; d < kDim / 16; ++d) {
#pragma unroll
          for (int e = 0; e < 4; ++e) o[d][n][e] *= alpha[e % 2];
        }
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        // No key yet: any finite origin will do, and exp(-Inf) must not become exp(-Inf + Inf).
        const float origin = max[n][e % 2] == -Infinity() ? 0.f : __fmul_rn(max[n][e % 2], rule.to_log2);
        s[n][e] = Exp2(fmaf(s[n][e], rule.to_log2, -origin));
        sum[n][e % 2] += s[n][e];
      }
      p[n][0] = TransposeMatrix(Pack<E>(s[n][0], s[n][1]));
      p[n][1] = TransposeMatrix(Pack<E>(s[n][2], s[n][3]));
    }
  }

  // As in prefill: values of Inf or NaN must not meet the probability 0 of a row that does not see their key. They are
  // added to the rows that do and zeroed in the tile. Only needed where rows see different keys: what none of them sees
  // was never loaded.
  __device__ void TakeOutNonFinite(const KeyBlockView& block, int slot) {
    unsigned char* tile = ring.tile[slot][1];
    bool found = false;
    if constexpr (Traits::kQuantised) {  // a row is finite or all NaN, as its parameters are
      const RowScale scale = Scale(slot, 1, lane % kWarpKeys);
      found = !IsFinite(scale.scale) || !IsFinite(scale.zero);
    } else {
      for (int i = lane; i < Traits::kTileBytes / 16; i += 32) {
        found = found || HasNonFinite<E>(reinterpret_cast<const uint4*>(tile)[i]);
      }
    }
    if (!__any_sync(~0u, found)) return;
    const auto element = [&](int key, int d) -> E& {
      return reinterpret_cast<E*>(tile)[SwizzledChunk<kStoredChunks>(key, d / kChunk) * kChunk + d % kChunk];
    };
#pragma unroll 1
    for (int key = 0; key < kWarpKeys; ++key) {
      if constexpr (Traits::kQuantised) {
        const RowScale scale = Scale(slot, 1, key);
        if (IsFinite(scale.scale) && IsFinite(scale.zero)) continue;
      }
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (!Sees(shared.rows, 8 * n + lane % 4 * 2 + e % 2, block, key)) continue;
#pragma unroll
          for (int d = 0; d < kDim / 16; ++d) {
            if constexpr (Traits::kQuantised) {
              o[d][n][e] = QuietNan();
            } else {
              const float v = ToFloat(element(key, ValueColumn(d, e)));
              if (!IsFinite(v)) o[d][n][e] += v;
            }
          }
        }
      }
    }
    __syncwarp();
    if constexpr (Traits::kQuantised) {
      if (found) ring.row_params[slot][1][lane % kWarpKeys] = 0;
    } else {
      for (int i = lane; i < kWarpKeys * kDim; i += 32) {
        E& x = reinterpret_cast<E*>(tile)[i];
        if (!IsFinite(ToFloat(x))) x = E{0};
      }
    }
    __syncwarp();
  }

  // After LoadQuery() and a barrier.
  __device__ void Run() {
    for (int step = 0; step < kSteps - 1; ++step) Load(step);
#pragma unroll 1
    for (int step = 0; step < num_blocks; ++step) {
      WaitCopies<kSteps - 2>();
      __syncwarp();
      const int ahead = step + kSteps - 1;
      Load(ahead);
      const int slot = step % kSteps;
      float s[kColumns][4] = {};
      MultiplyKeys(slot, s);
      const int run = blocks.RunOf(first_block + step), first_key = FirstKey(step);
      // The loader's last batch of look-ups may be the one after this step's.
      const int loaded = ahead < num_blocks ? ahead : num_blocks - 1;
      const uint32_t both = loaded / kLookUp == step / kLookUp ? mapped : mapped_before;
      const uint32_t groups = both >> (step % kLookUp * 2) & 3u;
      const bool partial = !blocks.common[run].HoldsAll(first_key, kWarpKeys) || groups != 3u;
      const KeyBlockView block = {view.runs[run],
                                  run,
                                  first_key,
                                  groups,
                                  nullptr,
                                  view.has_tree ? params.score.tree_mask : nullptr,
                                  params.score.tree_columns,
                                  view.position};
      if (partial || rule.modified) ModifyAndMask(block, partial, s);
      uint32_t p[kColumns][2];
      Softmax(s, p);
      if (partial && rows_differ) TakeOutNonFinite(block, slot);
      MultiplyValues(slot, p);
    }
    WaitCopies<0>();
  }

  // Leaves the warp's results for the block; the rings are no longer used by then.
  __device__ void Publish() {
    WarpResults<Traits>& results = shared.results;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) sum[n][e] += __shfl_xor_sync(~0u, sum[n][e], step);
        const int row = 8 * n + lane % 4 * 2 + e;
        if (lane < 4) {
          results.max[warp][row] = max[n][e] * rule.to_log2;
          results.sum[warp][row] = sum[n][e];
        }
      }
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) {
#pragma unroll
        for (int e = 0; e < 4; ++e) results.o[warp][8 * n + lane % 4 * 2 + e % 2][ValueColumn(d, e)] = o[d][n][e];
      }
    }
  }
};

}  // namespace turboattn::decode

#endif  // TURBOATTN_KERNELS_DECODE_MAINLOOP_SM80_CUH_

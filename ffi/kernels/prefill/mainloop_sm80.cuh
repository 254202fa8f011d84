// The prefill mainloop of the sm80 family: cp.async into a tile of K and a tile of V, mma m16n8k16, online softmax.
//
// Blocks go from the last key to the first. V of a block lands under its QK, and K of the next block under PV. One
// __syncthreads() a tile says both that a tile has landed and that the other is free.
//
// Two warps share a scheduler, and a warp issues in order: while it waits, its half of the products does too. Hence
// what loads need to know is read under the products before them, exponentials are made under the products of earlier
// ones, and what is rare (rescaling, masks, tiles that are not whole) is a branch off a straight path.
#ifndef TURBOATTN_KERNELS_PREFILL_MAINLOOP_SM80_CUH_
#define TURBOATTN_KERNELS_PREFILL_MAINLOOP_SM80_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/common/fp8.cuh"
#include "kernels/common/int4.cuh"
#include "kernels/common/int8.cuh"
#include "kernels/common/ptx.cuh"
#include "kernels/common/query_tile.cuh"
#include "kernels/common/score.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/prefill/traits.h"

namespace turboattn::prefill {

template <class Traits>
struct SharedSm80 {
  using E = typename Traits::E;
  static constexpr int kTileBytes = Traits::kKeys * Traits::kStoredBytes;
  static constexpr int kConverted = Traits::kQuantised ? Traits::kKeys * Traits::kDim : 8;
  alignas(1024) E query[Traits::kRows * Traits::kDim];  // tiles: see FirstChunk
  alignas(1024) unsigned char stored[2][kTileBytes];    // K and V
  alignas(1024) E converted[kConverted];                // quantised: the tile being worked on, decoded
  alignas(16) uint32_t row_params[2][kHasRowParams<Traits::kKvDType> ? Traits::kKeys : 4];
  TileRows<Traits::kRows> rows;
  SequenceView view;
  BlockList<Traits::kKeys> blocks;
  int64_t first_key_row;  // of plain arrays
  int64_t b;              // sequence
  int64_t head;           // kv head
  float head_scale[2];    // fp8: of K and V
  int begin, end;         // blocks [begin, end) of the list are this part's
  int late;               // from this block on, rows of the tile's first half see none of the last kLateKeys keys
  int num_rows;
  int parts;      // that the tile's keys are cut in
  int64_t extra;  // see the kernel
};

// One tile of rows over all its blocks. Accumulators live in the fields, so everything is inlined.
template <class Traits, class Params>
struct MainloopSm80 {
  using E = typename Traits::E;
  using Codes = Codec<E, Traits::kKvDType>;
  static constexpr bool kRowParams = kHasRowParams<Traits::kKvDType>;
  static constexpr int kKeys = Traits::kKeys, kDim = Traits::kDim, kFragments = Traits::kFragments;
  static constexpr int kChunks = Traits::kChunks, kStoredChunks = Traits::kStoredChunks;
  static constexpr int kGroups = kKeys / 8, kGroupBytes = 8 * Traits::kStoredBytes;
  static constexpr int kFragmentRows = Traits::kRows / kFragments, kQuerySteps = Traits::Tiles::kQuerySteps;
  static constexpr float kSlack = 8.f;   // in exponents of 2: probabilities up to 256, far inside E
  static constexpr float kFar = 1024.f;  // exponents of 2; half an ulp there is 2^-14

  const Params& params;
  SharedSm80<Traits>& shared;
  const SequenceView& view;  // these two in shared memory: indexed at run time, and registers are scarce
  const BlockList<kKeys>& blocks;
  const ScoreRule rule;

  // Results: of Row(f, half).
  float o[kFragments][kDim / 8][4] = {};
  float max[kFragments][2];       // origin of the exponents, in x (see ScoreRule): within kSlack of the maximum
  float sum[kFragments][2] = {};  // this thread's columns only
  uint32_t held[kQuerySteps > 0 ? kQuerySteps : 1][kFragments][4];  // the query's columns of its first steps

  static constexpr bool kPaged = std::is_same_v<Params, PagedAttentionParams>;
  // What is known of a block. Bit g below 16: its keys 8 g .. 8 g + 7 lie on a mapped page.
  static constexpr uint32_t kAllMapped = (1u << kGroups) - 1;
  static constexpr uint32_t kPartial = 1u << 16;  // not all rows of the tile see all its keys
  static constexpr uint32_t kWhole = 1u << 17;    // all its keys exist and are seen
  static constexpr uint32_t kEven = 1u << 18;     // and the rows of each 16 are evenly spaced
  uint32_t current;                               // of the block being worked on
  uint32_t next;                                  // of the one that follows, which has the keys before it
  // Pages: lane g of each warp is the g-th 8 keys'.
  int32_t next_entry;  // of the page table, for the block that follows
  int group;           // where the keys are, of the block whose tile is loaded next

  __device__ MainloopSm80(const Params& params, SharedSm80<Traits>& shared)
      : params(params), shared(shared), view(shared.view), blocks(shared.blocks), rule(MakeScoreRule(params.score)) {
    for (int f = 0; f < kFragments; ++f) max[f][0] = max[f][1] = -Infinity();
  }

  // ---- loading

  __device__ int RunOf(int block) const { return kPaged ? blocks.RunOf(block) : kOwnRun; }
  __device__ int FirstKey(int block) const {
    return kPaged ? blocks.FirstKey(block) : (blocks.first[kOwnRun] + block) * kKeys;
  }

  // Reads the page table, well before Prepare.
  __device__ void LookUp(int block) {
    if constexpr (kPaged) {
      const int run = RunOf(block), lane = threadIdx.x % 32, j = FirstKey(block) + 8 * lane;
      const bool present = block >= shared.begin && lane < kGroups && blocks.seen[run].Meets(j, 8);
      next_entry = present ? KeysOf(params, shared.b, shared.head, run).Entry(j) : -1;
    }
  }

  // As RunRange::HoldsAll, without a branch: 1 or 0. first_key is below 0 where there is no such block.
  static __device__ uint32_t Holds(RunRange range, int first_key) {
    const uint32_t keys = static_cast<uint32_t>(range.hi) - static_cast<uint32_t>(first_key);
    return static_cast<uint32_t>(first_key >= range.lo) & static_cast<uint32_t>(static_cast<int32_t>(keys) >= kKeys);
  }

  // Finds `next`, of `block`, and its groups. Called under products, which hide its reads of shared memory.
  __device__ void Prepare(int block) {
    const int run = RunOf(block), first_key = FirstKey(block);
    const uint32_t partial =
        (Holds(blocks.common[run], first_key) ^ 1) | static_cast<uint32_t>(SegmentsOfQueries(params) != nullptr);
    const uint32_t seen = static_cast<uint32_t>(block >= shared.begin) & Holds(blocks.seen[run], first_key);
    if constexpr (kPaged) {
      group = KeysOf(params, shared.b, shared.head, run).Group(first_key + 8 * (threadIdx.x % 32), next_entry);
      const uint32_t mapped = __ballot_sync(~0u, group != kNoGroup), all = static_cast<uint32_t>(mapped == kAllMapped);
      next = mapped | (partial | (all ^ 1)) * kPartial | (seen & all) * kWhole |
             (seen & all & static_cast<uint32_t>(PageSizeOf(params) >= kStripKeys)) * kEven;
    } else {
      next = kAllMapped | partial * kPartial | seen * (kWhole | kEven);
    }
  }

  // A tile is copied in strips of keys. From pages a warp copies strips of 16, 512 bytes a pass: on pages of 16 and
  // more keys a strip is one piece of memory, which one look at `group` finds. When passes went over all warps, each
  // with its own look, pages of 16 were 8 % slower than pages of 64 (H200, head dim 128); now pages of 8 are, by 12 %.
  // Rows of plain arrays are evenly spaced anyway, and there strips of a warp cost 1 to 2 %, whose places in shared
  // memory differ by more than a constant.
  static constexpr int kTeam = kPaged ? kWarp : Traits::kThreads, kStripKeys = kPaged ? 16 : kKeys;
  static constexpr int kPassKeys = kTeam / kStoredChunks, kPasses = kStripKeys / kPassKeys;
  static constexpr int kStripStep = kStripKeys * Traits::kThreads / kTeam;  // to a team's next strip
  static constexpr int kStrips = kKeys / kStripStep;
  static_assert(kKeys % kStripStep == 0 && kStripKeys % kPassKeys == 0);

  // The first row of a tile of which this thread has 16 bytes. Threads by Opaque: made anew for each tile, since
  // registers are scarce; and unsigned, since nothing else tells that they are not negative.
  static __device__ uint32_t FirstRow(uint32_t thread) {
    return thread / kTeam * kStripKeys + thread % kTeam / kStoredChunks;
  }

  // Where these 16 bytes go, and those of a pass of a strip.
  template <bool kValues>
  __device__ uint32_t FirstTo(uint32_t thread) {
    return SharedAddress(shared.stored[kValues]) +
           SwizzledChunk<kStoredChunks>(FirstRow(thread), thread % kStoredChunks) * 16;
  }
  static __device__ uint32_t To(uint32_t first_to, int strip, int pass) {
    const int row = strip * kStripStep + pass * kPassKeys, offset = row * Traits::kStoredBytes;
    return (first_to ^ (SwizzledChunk<kStoredChunks>(row, 0) * 16 - offset)) + offset;
  }

  // A tile of K or V of a block whose state is `state`; nothing if there is no such block. One group of copies either
  // way.
  template <bool kValues>
  __device__ void Load(int block, uint32_t state) {
    const void* array = kValues ? ValueArray(params) : KeyArray(params);
    if ((state & kEven) != 0) {
      CopyEvenTile<kValues>(array, block);
    } else if (block >= shared.begin) {
      if (kPaged && (state & kWhole) != 0) {
        CopyTile<kValues, true>(array, block);
      } else {
        CopyTile<kValues, false>(array, block);
      }
    }
    CommitCopies();
  }

  template <bool kValues>
  __device__ void CopyEvenTile(const void* array, int block) {
    const uint32_t thread = Opaque(threadIdx.x);
    const int64_t step = kPaged ? 16 * kTeam : kPassKeys * KvHeadsOf(params) * Traits::kStoredBytes;
    const uint32_t to = FirstTo<kValues>(thread);
#pragma unroll
    for (int strip = 0; strip < kStrips; ++strip) {
      const char* from = static_cast<const char*>(array);
      if constexpr (kPaged) {
        const int g = __shfl_sync(~0u, group, (strip * Traits::kWarps + thread / kTeam) * (kStripKeys / 8));
        from += static_cast<int64_t>(g) * kGroupBytes + thread % kTeam * 16;
      } else {
        const int key = FirstKey(block) + strip * kStripStep + static_cast<int>(FirstRow(thread));
        from += (shared.first_key_row + static_cast<int64_t>(key) * params.num_kv_heads) * Traits::kStoredBytes +
                thread % kStoredChunks * 16;
      }
#pragma unroll
      for (int pass = 0; pass < kPasses; ++pass) CopyAsync16(To(to, strip, pass), from + pass * step, true);
    }
  }

  // kAll: all keys of the block exist and are seen; else those that are not, or lie on no page, become zeros.
  template <bool kValues, bool kAll>
  __device__ void CopyTile(const void* array, int block) {
    const uint32_t thread = Opaque(threadIdx.x), to = FirstTo<kValues>(thread);
    const int first_row = static_cast<int>(FirstRow(thread)), first_key = FirstKey(block);
    const RunRange seen = blocks.seen[RunOf(block)];
#pragma unroll(kAll ? 4 : 1)
    for (int i = 0; i < kStrips * kPasses; ++i) {
      const int strip = i / kPasses, pass = i % kPasses, row = first_row + strip * kStripStep + pass * kPassKeys;
      bool valid = kAll || seen.Holds(first_key + row);
      int64_t offset;
      if constexpr (kPaged) {
        const int g = __shfl_sync(~0u, group, row / 8);
        if (!kAll) valid = valid && g != kNoGroup;
        offset = static_cast<int64_t>(g) * kGroupBytes + row % 8 * Traits::kStoredBytes;
      } else {
        offset =
            (shared.first_key_row + static_cast<int64_t>(first_key + row) * params.num_kv_heads) * Traits::kStoredBytes;
      }
      const char* from = static_cast<const char*>(array) + offset + thread % kStoredChunks * 16;
      CopyAsync16(To(to, strip, pass), valid ? from : array, valid);
    }
  }

  // (scale, zero) of each key, two E; zeros where there is no key, so that its codes of 0 decode to 0.
  // Part of the group of the Load that follows.
  template <bool kValues>
  __device__ void LoadParams(int block) {
    if constexpr (kRowParams) {
      if (block < shared.begin) return;
      const void* array = kValues ? params.cache.value_params : params.cache.key_params;
      const int r = threadIdx.x, g = __shfl_sync(~0u, group, r / 8 % 32), first_key = FirstKey(block);
      if (r >= kKeys) return;
      const bool valid = g != kNoGroup && blocks.seen[RunOf(block)].Holds(first_key + r);
      const int64_t offset = valid ? (static_cast<int64_t>(g) * 8 + r % 8) * 4 : 0;
      CopyAsync4(SharedAddress(&shared.row_params[kValues][r]), static_cast<const char*>(array) + offset, valid);
    }
  }

  // ---- the tile being worked on, as E

  template <bool kValues>
  __device__ E* Tile() {
    if constexpr (Traits::kQuantised) {
      return shared.converted;
    } else {
      return reinterpret_cast<E*>(shared.stored[kValues]);
    }
  }

  // Waits for the copies of a tile, which is also the end of everybody's work on the other one.
  template <bool kValues>
  __device__ void NextTile() {
    WaitCopies<0>();
    __syncthreads();
    if constexpr (Traits::kQuantised) Decode(kValues);
  }

  // 16 bytes a step. The callers' barriers keep the tile before it alive until all have read it.
  __device__ void Decode(bool values) {
    constexpr int kPairs = Codes::kPerWord / 2;
    for (int i = threadIdx.x; i < kKeys * kStoredChunks; i += Traits::kThreads) {
      const int r = i / kStoredChunks, chunk = i % kStoredChunks;
      const uint4 codes = reinterpret_cast<const uint4*>(shared.stored[values])[SwizzledChunk<kStoredChunks>(r, chunk)];
      typename Codes::Scale scale;
      if constexpr (kRowParams) {
        scale = UnpackRowScale<E>(shared.row_params[values][r]);
      } else {
        scale = Codes::MakeScale(shared.head_scale[values]);
      }
      const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
      uint32_t pairs[4][kPairs];
#pragma unroll
      for (int w = 0; w < 4; ++w) Codes::Neighbours(words[w], scale, pairs[w]);
      const auto pair = [&](int i) { return pairs[i / kPairs][i % kPairs]; };
      uint4* tile = reinterpret_cast<uint4*>(shared.converted);
#pragma unroll
      for (int k = 0; k < kPairs; ++k) {
        tile[SwizzledChunk<kChunks>(r, kPairs * chunk + k)] = {pair(4 * k), pair(4 * k + 1), pair(4 * k + 2),
                                                               pair(4 * k + 3)};
      }
    }
    __syncthreads();
  }

  // ---- arithmetic

  // A warp has 16 rows of each half of a tile, not 32 that follow each other: where the first half sees nothing, on the
  // diagonal, all warps have the same to leave out.
  static __device__ __forceinline__ int Row(int f, int half) {
    return kFragmentRows * f + threadIdx.x / 32 * 16 + 8 * half + threadIdx.x % 32 / 4;
  }

  // c += a b, of fragment f and keys 16 n .. 16 n + 15. early == 0: rows of fragment 0 see none of the last kLateKeys.
  // By a predicate: a path of its own was 2 to 4 % slower on an H200.
  static __device__ __forceinline__ void Multiply(int f, int n, uint32_t early, float (&c)[4], const uint32_t (&a)[4],
                                                  uint32_t b0, uint32_t b1) {
    if (kFragments == 2 && f == 0 && n >= (kKeys - Traits::kLateKeys) / 16) {
      MmaIf<E>(early, c, a, b0, b1);
    } else {
      Mma<E>(c, a, b0, b1);
    }
  }

  // All columns'.
  __device__ __forceinline__ float RowSum(int f, int half) const {
    const float pair = sum[f][half] + __shfl_xor_sync(~0u, sum[f][half], 1);
    return pair + __shfl_xor_sync(~0u, pair, 2);
  }

  // Address of chunk `half` (0 or 1) of a row of a tile of E. Chunk half + 2 k of the same row is at this ^ 32 k: tiles
  // start at multiples of a row's length, kPitch.
  static constexpr int kPitch = 2 * kDim;
  static __device__ uint32_t FirstChunk(const E* tile, int row, int half) {
    return Opaque(SharedAddress(tile) + SwizzledChunk<kChunks>(row, half) * 16);
  }

  // Of the first chunk of the warp's query rows in shared memory.
  __device__ uint32_t QueryAddress() const {
    const int lane = threadIdx.x % 32;
    return FirstChunk(shared.query, threadIdx.x / 32 * 16 + (lane / 8 % 2) * 8 + lane % 8, lane / 16);
  }
  // Its columns of step k.
  static __device__ void LoadQuery(uint32_t query, int k, uint32_t (&q)[kFragments][4]) {
#pragma unroll
    for (int f = 0; f < kFragments; ++f) LoadMatrix4(q[f], (query ^ (32 * k)) + kFragmentRows * f * kPitch);
  }

  // s = Q K^T of the warp's rows, while V of the block is loaded.
  __device__ void MultiplyKeys(int block, float (&s)[kFragments][kKeys / 8][4]) {
    const int lane = threadIdx.x % 32, key_row = lane / 16 * 8 + lane % 8;
    const uint32_t query = QueryAddress();
    const uint32_t keys = FirstChunk(Tile<false>(), key_row, lane / 8 % 2);
    LoadParams<true>(block);
    const uint32_t early = block < shared.late;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      if (k == 1) LookUp(block - 1);
      if (k == kDim / 16 - 1) Prepare(block - 1);
      uint32_t q[kFragments][4], x[kKeys / 16][4];
      if (k >= kQuerySteps) LoadQuery(query, k, q);
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) LoadMatrix4(x[n], (keys ^ (32 * k)) + 16 * n * kPitch);
      if (k == 0) Load<true>(block, current);
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
          const uint32_t (&a)[4] = k < kQuerySteps ? held[k][f] : q[f];
          Multiply(f, n, early, s[f][2 * n], a, x[n][0], x[n][1]);
          Multiply(f, n, early, s[f][2 * n + 1], a, x[n][2], x[n][3]);
        }
      }
    }
  }

  // Soft cap, scale and ALiBi where asked for, then -Inf where a row does not see a key.
  __device__ void ModifyAndMask(const KeyBlockView& block, bool partial, float (&s)[kFragments][kKeys / 8][4]) {
    const bool ranges_only = block.key_segments == nullptr && block.tree == nullptr && block.mapped == kAllMapped;
    if (rule.modified) {
      const bool has_alibi = params.score.alibi_slopes != nullptr;
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        ModifyScores<4>(rule, has_alibi, shared.rows, Row(f, 0), block, s[f]);
      }
    }
    if (!partial) return;
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = Row(f, half), column = threadIdx.x % 4 * 2;
        if (ranges_only) {
          const int lo = shared.rows.lo[block.run_index][row] - block.first_key - column;
          const int hi = shared.rows.hi[block.run_index][row] - block.first_key - column;
#pragma unroll
          for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const int key = 8 * n + e;
              if (key < lo || key >= hi) s[f][n][2 * half + e] = -Infinity();
            }
          }
        } else {
          uint32_t seen = 0;  // bit 2 n + e; apart from its use, so that this loop need not be unrolled
#pragma unroll 1
          for (int i = 0; i < kKeys / 4; ++i) {
            if (Sees(shared.rows, row, block, i / 2 * 8 + i % 2 + column)) seen |= 1u << i;
          }
#pragma unroll
          for (int i = 0; i < kKeys / 4; ++i) {
            if ((seen >> i & 1u) == 0) s[f][i / 2][2 * half + i % 2] = -Infinity();
          }
        }
      }
    }
  }

  // Finds where exponents have their origin: they are x * to_log2 - origin. Rescales what there is. The rows of a
  // thread go side by side: each is a chain of dependent instructions, and few warps are there to hide it.
  __device__ void MoveOrigins(float (&s)[kFragments][kKeys / 8][4], float (&origin)[kFragments][2]) {
    float top[kFragments][2];
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      for (int half = 0; half < 2; ++half) top[f][half] = fmaxf(s[f][0][2 * half], s[f][0][2 * half + 1]);
    }
#pragma unroll
    for (int n = 1; n < kKeys / 8; ++n) {
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        for (int half = 0; half < 2; ++half)
          top[f][half] = fmaxf(top[f][half], fmaxf(s[f][n][2 * half], s[f][n][2 * half + 1]));
      }
    }
    // The origin of the exponents follows the maximum only when probabilities would pass 2^kSlack otherwise: most
    // blocks then have nothing to rescale, and sums lose nothing, since all terms share the origin.
    const auto moves = [&](int f, int half) {
      return (top[f][half] - max[f][half]) * rule.to_log2 > kSlack;  // a sum with kSlack may round up by far more
    };
    // No key yet: any finite origin will do, and exp(-Inf) must not become exp(-Inf + Inf).
    const auto origin_at = [&](float max) { return max == -Infinity() ? 0.f : __fmul_rn(max, rule.to_log2); };
    bool changes = false;
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      for (int half = 0; half < 2; ++half) {
        origin[f][half] = origin_at(max[f][half]);
        changes = changes || moves(f, half) || fabsf(origin[f][half]) > kFar;
      }
    }
    if (!__any_sync(~0u, changes)) return;
    bool moved = false;
    float alpha[kFragments][2];
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      for (int half = 0; half < 2; ++half) {
        float& reference = max[f][half];
        float& x = top[f][half];
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
        alpha[f][half] = 1.f;
        if (moves(f, half)) {
          alpha[f][half] = reference == -Infinity() ? 0.f : Exp2((reference - x) * rule.to_log2);
          moved = moved || reference != -Infinity();  // else o holds zeros, and Inf taken out of V
          reference = x;
        }
        origin[f][half] = origin_at(reference);
        // Where half an ulp of the origin is not small against 1, scores are taken from it before they are scaled.
        const bool far = fabsf(origin[f][half]) > kFar;
        const float shift = far ? reference : 0.f;
        if (far) origin[f][half] = 0.f;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
          s[f][n][2 * half] -= shift;
          s[f][n][2 * half + 1] -= shift;
        }
      }
    }
    if (!__any_sync(~0u, moved)) return;
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      for (int half = 0; half < 2; ++half) sum[f][half] *= alpha[f][half];
#pragma unroll
      for (int d = 0; d < kDim / 8; ++d) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[f][d][e] *= alpha[f][e / 2];
      }
    }
  }

  // Scores of 16 keys to probabilities, as A fragments of the second product.
  __device__ void Exponentiate(int n, float (&s)[kFragments][kKeys / 8][4], const float (&origin)[kFragments][2],
                               uint32_t (&p)[kFragments][4]) {
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float (&x)[4] = s[f][2 * n + i];
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = Exp2(fmaf(x[e], rule.to_log2, -origin[f][e / 2]));
        for (int half = 0; half < 2; ++half) {
          sum[f][half] += x[2 * half] + x[2 * half + 1];
          p[f][2 * i + half] = Pack<E>(x[2 * half], x[2 * half + 1]);
        }
      }
    }
  }

  // o += P V, while K of the next block is loaded. The probabilities of 16 keys are made under the products of the 16
  // before them.
  __device__ void MultiplyValues(int block, float (&s)[kFragments][kKeys / 8][4],
                                 const float (&origin)[kFragments][2]) {
    const int lane = threadIdx.x % 32;
    const uint32_t values = FirstChunk(Tile<true>(), (lane / 8 % 2) * 8 + lane % 8, lane / 16);
    LoadParams<false>(block - 1);
    const uint32_t early = block < shared.late;
    uint32_t p[kKeys / 16][kFragments][4];
    Exponentiate(0, s, origin, p[0]);
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      // Half of the columns at a time: with all, the compiler has too few registers to order products well. 3 % of full
      // calls of head dim 128 on an H200, 0.4 % at 64.
      constexpr int kBatch = kDim / 32;
#pragma unroll
      for (int first = 0; first < kDim / 16; first += kBatch) {
        uint32_t x[kBatch][4];
#pragma unroll
        for (int d = 0; d < kBatch; ++d) LoadMatrix4Transposed(x[d], (values ^ (32 * (first + d))) + 16 * n * kPitch);
        if (first == 0) {
          if (n == 0) Load<false>(block - 1, next);
          if (n + 1 < kKeys / 16) Exponentiate(n + 1, s, origin, p[n + 1]);
        }
#pragma unroll
        for (int d = 0; d < kBatch; ++d) {
#pragma unroll
          for (int f = 0; f < kFragments; ++f) {
            Multiply(f, n, early, o[f][2 * (first + d)], p[n][f], x[d][0], x[d][1]);
            Multiply(f, n, early, o[f][2 * (first + d) + 1], p[n][f], x[d][2], x[d][3]);
          }
        }
      }
    }
  }

  // As NextTile, of values that some rows see and others do not: whether one of them is Inf or NaN.
  __device__ bool NextHasNonFinite() {
    bool found = false;
    if constexpr (Traits::kQuantised) {
      NextTile<true>();
      const uint4* tile = reinterpret_cast<const uint4*>(Tile<true>());
      for (int i = threadIdx.x; i < kKeys * kChunks; i += Traits::kThreads) found = found || HasNonFinite<E>(tile[i]);
    } else {
      WaitCopies<0>();  // a thread looks at what it has copied, so that one barrier is enough
      const uint32_t first = FirstTo<true>(Opaque(threadIdx.x)) - SharedAddress(shared.stored[1]);
#pragma unroll
      for (int i = 0; i < kStrips * kPasses; ++i) {
        found |=
            HasNonFinite<E>(*reinterpret_cast<const uint4*>(shared.stored[1] + To(first, i / kPasses, i % kPasses)));
      }
    }
    return __syncthreads_or(found) != 0;
  }

  // A value of Inf or NaN times a probability of 0 would reach rows that do not see its key. Where some rows of the
  // tile see a block only in part, such values are added to the rows that do see them and zeroed in the tile. Rare and
  // slow.
  __device__ void TakeOutNonFinite(const KeyBlockView& block, E* tile) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int key = 0; key < kKeys; ++key) {
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (!Sees(shared.rows, Row(f, half), block, key)) continue;
#pragma unroll
          for (int d = 0; d < kDim / 8; ++d) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const float v = ToFloat(tile[SwizzledChunk<kChunks>(key, d) * kChunk + lane % 4 * 2 + e]);
              if (!IsFinite(v)) o[f][d][2 * half + e] += v;
            }
          }
        }
      }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < kKeys * kDim; i += Traits::kThreads) {
      if (!IsFinite(ToFloat(tile[i]))) tile[i] = E{0};
    }
    __syncthreads();
  }

  // Starts the copies of the first K.
  __device__ void Start() {
    const int last = shared.end - 1;
    LookUp(last);
    Prepare(last);
    LoadParams<false>(last);
    Load<false>(last, next);
  }

  __device__ void Run() {
#pragma unroll
    for (int k = 0; k < kQuerySteps; ++k) LoadQuery(QueryAddress(), k, held[k]);
#pragma unroll 1
    for (int block = shared.end - 1; block >= shared.begin; --block) {
      current = next;
      float s[kFragments][kKeys / 8][4] = {};
      NextTile<false>();
      MultiplyKeys(block, s);
      const bool partial = (current & kPartial) != 0;
      const auto seen = [&] {
        const int run = RunOf(block);
        return KeyBlockView{view.runs[run],
                            run,
                            FirstKey(block),
                            current & kAllMapped,
                            SegmentsOfKeys(params, shared.b),
                            view.has_tree ? params.score.tree_mask : nullptr,
                            params.score.tree_columns,
                            view.position};
      };
      if (partial || rule.modified) ModifyAndMask(seen(), partial, s);
      float origin[kFragments][2];
      MoveOrigins(s, origin);
      if (!partial) {
        NextTile<true>();
      } else if (NextHasNonFinite()) {
        TakeOutNonFinite(seen(), Tile<true>());
      }
      MultiplyValues(block, s, origin);
    }
  }
};

}  // namespace turboattn::prefill

#endif  // TURBOATTN_KERNELS_PREFILL_MAINLOOP_SM80_CUH_

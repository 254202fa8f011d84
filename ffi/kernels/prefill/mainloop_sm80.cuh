// The prefill mainloop of the sm80 family: cp.async into a ring of K and V tiles, mma m16n8k16, online softmax.
//
// The ring holds tiles in the order in which they are used, K of a block, then its V, blocks from the last key to the
// first. While one tile is worked on, the next kStages - 1 are on their way: the next K lands under this block's PV and
// its V under the next QK. One __syncthreads() a tile says both that a tile has landed and that the one before it is
// free.
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
  static constexpr int kRingBytes = Traits::kKeys * Traits::kStoredBytes;
  static constexpr int kConverted = Traits::kQuantised ? Traits::kKeys * Traits::kDim : 8;
  alignas(1024) E query[Traits::kRows * Traits::kDim];  // tiles: see FirstChunk
  alignas(1024) unsigned char ring[Traits::kStages][kRingBytes];
  alignas(1024) E converted[kConverted];  // quantised: the tile being worked on, decoded
  alignas(16) uint32_t row_params[Traits::kStages][kHasRowParams<Traits::kKvDType> ? Traits::kKeys : 4];
  TileRows<Traits::kRows> rows;
  SequenceView view;
  BlockList<Traits::kKeys> blocks;
  int64_t first_key_row;  // of plain arrays
  int64_t b;              // sequence
  int64_t head;           // kv head
  float head_scale[2];    // fp8: of K and V
  int begin, end;         // blocks [begin, end) of the list are this part's
  int num_rows;
  int parts;      // that the tile's keys are cut in
  int64_t extra;  // tiles past those of the grid that this block has reached
};

// One tile of rows over all its blocks. Accumulators live in the fields, so everything is inlined.
template <class Traits, class Params>
struct MainloopSm80 {
  using E = typename Traits::E;
  using Codes = Codec<E, Traits::kKvDType>;
  static constexpr bool kRowParams = kHasRowParams<Traits::kKvDType>;
  static constexpr int kKeys = Traits::kKeys, kDim = Traits::kDim, kFragments = Traits::kFragments;
  static constexpr int kChunks = Traits::kChunks, kStoredChunks = Traits::kStoredChunks;
  static constexpr int kGroups = kKeys / 8;
  static constexpr float kSlack = 8.f;                      // in exponents of 2: probabilities up to 256, far inside E
  static constexpr float kFar = 1024.f;                     // exponents of 2; half an ulp there is 2^-14
  static constexpr int kAhead = (Traits::kStages - 1) / 2;  // K tiles loaded beyond the block being worked on

  const Params& params;
  SharedSm80<Traits>& shared;
  const SequenceView& view;  // these two in shared memory: indexed at run time, and registers are scarce
  const BlockList<kKeys>& blocks;
  const ScoreRule rule;

  // Results: row 16 f + 8 half + lane / 4 of the warp's rows.
  float o[kFragments][kDim / 8][4] = {};
  float max[kFragments][2];       // origin of the exponents, in x (see ScoreRule): within kSlack of the maximum
  float sum[kFragments][2] = {};  // this thread's columns only: the kernel adds the others'

  // The loader's state. Pages: lane g of each warp knows where the g-th 8 keys of a block are.
  static constexpr bool kPaged = std::is_same_v<Params, PagedAttentionParams>;
  static constexpr uint32_t kAllMapped = (1u << kGroups) - 1;
  int load_block;
  bool load_values = false;
  int load_slot = 0;
  int32_t next_entry = 0;     // of load_block, read one block ahead
  bool next_present = false;  // whether there is such an entry
  int group = kNoGroup;
  uint32_t load_mapped = kAllMapped;
  uint64_t mapped_queue = 0;  // 16 bits a loaded block

  __device__ MainloopSm80(const Params& params, SharedSm80<Traits>& shared)
      : params(params),
        shared(shared),
        view(shared.view),
        blocks(shared.blocks),
        rule(MakeScoreRule(params.score)),
        load_block(shared.end - 1) {
    for (int f = 0; f < kFragments; ++f) max[f][0] = max[f][1] = -Infinity();
  }

  // ---- loading

  // Reads the page table early: the entry is used when the block's K is loaded.
  __device__ void LookUp(int block) {
    if constexpr (kPaged) {
      next_present = false;
      if (block < shared.begin) return;
      const int run = blocks.RunOf(block), lane = threadIdx.x % 32, j = blocks.FirstKey(block) + 8 * lane;
      const RunRange seen = blocks.seen[run];
      next_present = lane < kGroups && seen.Meets(j, 8);
      if (next_present) next_entry = KeysOf(params, shared.b, shared.head, run).Entry(j);
    }
  }

  // The next tile of the order into the ring; nothing when there is none left. One group of copies either way.
  __device__ void LoadNext() {
    if (!load_values) mapped_queue <<= 16;
    if (load_block >= shared.begin) {
      const int run = blocks.RunOf(load_block), first_key = blocks.FirstKey(load_block);
      if (!load_values) {
        if constexpr (kPaged) {
          group = next_present
                      ? KeysOf(params, shared.b, shared.head, run).Group(first_key + 8 * (threadIdx.x % 32), next_entry)
                      : kNoGroup;
          load_mapped = __ballot_sync(~0u, group != kNoGroup);
          LookUp(load_block - 1);
        }
        mapped_queue |= load_mapped;
      }
      const RunRange seen = blocks.seen[run];
      const bool whole = load_mapped == kAllMapped && seen.HoldsAll(first_key, kKeys);
      const bool one_page = PageSizeOf(params) >= kKeys;
      const void* array = load_values ? ValueArray(params) : KeyArray(params);
      if (whole && one_page) {
        CopyTile<true, true>(array, seen, first_key);
      } else if (whole) {
        CopyTile<true, false>(array, seen, first_key);
      } else {
        CopyTile<false, false>(array, seen, first_key);
      }
      if constexpr (kRowParams) {
        CopyParams(load_values ? params.cache.value_params : params.cache.key_params, seen, first_key);
      }
      if (load_values) --load_block;
      load_slot = load_slot + 1 == Traits::kStages ? 0 : load_slot + 1;
    }
    load_values = !load_values;
    CommitCopies();
  }

  // kWhole: all keys of the block exist and are seen, so none is left out. kOnePage: and their rows follow each other.
  template <bool kWhole, bool kOnePage>
  __device__ void CopyTile(const void* array, RunRange seen, int first_key) {
    constexpr int kRowsPerPass = Traits::kThreads / kStoredChunks;
    static_assert(kRowsPerPass % 4 == 0);
    const int r0 = threadIdx.x / kStoredChunks, chunk = threadIdx.x % kStoredChunks;
    const uint32_t tile = SharedAddress(shared.ring[load_slot]);
    const char* from = static_cast<const char*>(array) + chunk * 16;
    int64_t step = 0;  // bytes from pass to pass
    if constexpr (kPaged && kOnePage) {
      from += (static_cast<int64_t>(__shfl_sync(~0u, group, 0)) * 8 + r0) * Traits::kStoredBytes;
      step = kRowsPerPass * Traits::kStoredBytes;
    } else if constexpr (kPaged) {
      from += r0 % 8 * Traits::kStoredBytes;
    } else {
      from +=
          (shared.first_key_row + static_cast<int64_t>(first_key + r0) * params.num_kv_heads) * Traits::kStoredBytes;
      step = kRowsPerPass * params.num_kv_heads * Traits::kStoredBytes;
    }
#pragma unroll
    for (int pass = 0; pass < kKeys / kRowsPerPass; ++pass) {
      // The swizzle repeats every 8 rows, so that only 512-byte rows, 4 a pass, have more than one of it.
      const int first = pass * kRowsPerPass, within = first % 8, r = first + r0;
      const char* address;
      bool valid = kWhole || seen.Holds(first_key + r);
      if constexpr (kPaged && !kOnePage) {
        const int g = __shfl_sync(~0u, group, r / 8);
        address = from + within * Traits::kStoredBytes + static_cast<int64_t>(g) * (8 * Traits::kStoredBytes);
        if (!kWhole) valid = valid && g != kNoGroup;
      } else {
        address = from + pass * step;
      }
      if (!kWhole && !valid) address = static_cast<const char*>(array);
      const uint32_t to = tile + SwizzledChunk<kStoredChunks>(within + r0, chunk) * 16;
      CopyAsync16(to + (first - within) * Traits::kStoredBytes, address, kWhole || valid);
    }
  }

  // (scale, zero) of each key, two E; zeros where there is no key, so that its codes of 0 decode to 0.
  __device__ void CopyParams(const void* array, RunRange seen, int first_key) {
    const int r = threadIdx.x;
    const int g = __shfl_sync(~0u, group, r / 8 % 32);
    if (r >= kKeys) return;
    const bool valid = g != kNoGroup && seen.Holds(first_key + r);
    const int64_t offset = valid ? (static_cast<int64_t>(g) * 8 + r % 8) * 4 : 0;
    CopyAsync4(SharedAddress(&shared.row_params[load_slot][r]), static_cast<const char*>(array) + offset, valid);
  }

  // ---- the tile being worked on, as E

  __device__ const E* Tile(int slot, bool values) {
    if constexpr (Traits::kQuantised) {
      Decode(slot, values);
      return shared.converted;
    } else {
      return reinterpret_cast<const E*>(shared.ring[slot]);
    }
  }

  // 16 bytes a step. The callers' barriers keep the tile before it alive until all have read it.
  __device__ void Decode(int slot, bool values) {
    constexpr int kPairs = Codes::kPerWord / 2;
    for (int i = threadIdx.x; i < kKeys * kStoredChunks; i += Traits::kThreads) {
      const int r = i / kStoredChunks, chunk = i % kStoredChunks;
      const uint4 codes = reinterpret_cast<const uint4*>(shared.ring[slot])[SwizzledChunk<kStoredChunks>(r, chunk)];
      typename Codes::Scale scale;
      if constexpr (kRowParams) {
        scale = UnpackRowScale<E>(shared.row_params[slot][r]);
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

  __device__ int WarpRow() const { return threadIdx.x / 32 * Traits::kWarpRows; }

  // Address of chunk `half` (0 or 1) of a row of a tile of E. Chunk half + 2 k of the same row is at this ^ 32 k: tiles
  // start at multiples of a row's length, kPitch.
  static constexpr int kPitch = 2 * kDim;
  static __device__ uint32_t FirstChunk(const E* tile, int row, int half) {
    return Opaque(SharedAddress(tile) + SwizzledChunk<kChunks>(row, half) * 16);
  }

  // s = Q K^T of the warp's rows. The next tile's copies are issued when there are products under way.
  __device__ void MultiplyKeys(const E* tile, float (&s)[kFragments][kKeys / 8][4]) {
    const int lane = threadIdx.x % 32;
    const int query_row = WarpRow() + (lane / 8 % 2) * 8 + lane % 8, key_row = lane / 16 * 8 + lane % 8;
    const uint32_t query = FirstChunk(shared.query, query_row, lane / 16);
    const uint32_t keys = FirstChunk(tile, key_row, lane / 8 % 2);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      uint32_t q[kFragments][4];
#pragma unroll
      for (int f = 0; f < kFragments; ++f) LoadMatrix4(q[f], (query ^ (32 * k)) + 16 * f * kPitch);
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t x[4];
        LoadMatrix4(x, (keys ^ (32 * k)) + 16 * n * kPitch);
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
          Mma<E>(s[f][2 * n], q[f], x[0], x[1]);
          Mma<E>(s[f][2 * n + 1], q[f], x[2], x[3]);
        }
      }
      if (k == 0) LoadNext();
    }
  }

  // Soft cap, scale and ALiBi where asked for, then -Inf where a row does not see a key.
  __device__ void ModifyAndMask(const KeyBlockView& block, bool partial, float (&s)[kFragments][kKeys / 8][4]) {
    const int lane = threadIdx.x % 32;
    const bool ranges_only = block.key_segments == nullptr && block.tree == nullptr && block.mapped == kAllMapped;
    if (rule.modified) {
      const bool has_alibi = params.score.alibi_slopes != nullptr;
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        ModifyScores<4>(rule, has_alibi, shared.rows, WarpRow() + 16 * f + lane / 4, block, s[f]);
      }
    }
    if (!partial) return;
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = WarpRow() + 16 * f + 8 * half + lane / 4, column = lane % 4 * 2;
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

  // Scores to probabilities, as A fragments of the second product; rescales what there is. The rows of a thread go side
  // by side and without branches: each is a chain of dependent instructions, and few warps are there to hide it.
  __device__ void Softmax(float (&s)[kFragments][kKeys / 8][4], uint32_t (&p)[kFragments][kKeys / 16][4]) {
    float top[kFragments][2], alpha[kFragments][2], origin[kFragments][2];
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
    bool moved = false, far = false;
#pragma unroll
    for (int f = 0; f < kFragments; ++f) {
      for (int half = 0; half < 2; ++half) {
        float& reference = max[f][half];
        float x = fmaxf(top[f][half], __shfl_xor_sync(~0u, top[f][half], 1));
        x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
        // The origin of the exponents follows the maximum only when probabilities would pass 2^kSlack otherwise: most
        // blocks then have nothing to rescale, and sums lose nothing, since all terms share the origin.
        const bool moves = x * rule.to_log2 > reference * rule.to_log2 + kSlack;
        const float next = moves ? x : reference;
        // No key yet: any finite origin will do, and exp(-Inf) must not become exp(-Inf + Inf).
        const bool none = next == -Infinity();
        origin[f][half] = none ? 0.f : __fmul_rn(next, rule.to_log2);
        // Where half an ulp of the origin is not small against 1, scores are taken from it before they are scaled.
        far = far || fabsf(origin[f][half]) > kFar;
        alpha[f][half] = none || reference == -Infinity() ? 0.f : Exp2((reference - next) * rule.to_log2);
        if (!moves) alpha[f][half] = 1.f;
        reference = next;
        moved = moved || moves;
      }
    }
    if (__any_sync(~0u, far)) {
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
        for (int half = 0; half < 2; ++half) {
          const bool this_far = fabsf(origin[f][half]) > kFar;
          const float shift = this_far ? max[f][half] : 0.f;
          if (this_far) origin[f][half] = 0.f;
#pragma unroll
          for (int n = 0; n < kKeys / 8; ++n) {
            s[f][n][2 * half] -= shift;
            s[f][n][2 * half + 1] -= shift;
          }
        }
      }
    }
    if (__any_sync(~0u, moved)) {
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
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float (&x)[4] = s[f][2 * n + i];
#pragma unroll
          for (int e = 0; e < 4; ++e) x[e] = Exp2(fmaf(x[e], rule.to_log2, -origin[f][e / 2]));
          for (int half = 0; half < 2; ++half) {
            sum[f][half] += x[2 * half] + x[2 * half + 1];
            p[f][n][2 * i + half] = Pack<E>(x[2 * half], x[2 * half + 1]);
          }
        }
      }
    }
  }

  // o += P V, and the next tile as in MultiplyKeys.
  __device__ void MultiplyValues(const E* tile, const uint32_t (&p)[kFragments][kKeys / 16][4]) {
    const int lane = threadIdx.x % 32;
    const uint32_t values = FirstChunk(tile, (lane / 8 % 2) * 8 + lane % 8, lane / 16);
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) {
        uint32_t x[4];
        LoadMatrix4Transposed(x, (values ^ (32 * d)) + 16 * n * kPitch);
#pragma unroll
        for (int f = 0; f < kFragments; ++f) {
          Mma<E>(o[f][2 * d], p[f][n], x[0], x[1]);
          Mma<E>(o[f][2 * d + 1], p[f][n], x[2], x[3]);
        }
      }
      if (n == 0) LoadNext();
    }
  }

  // A value of Inf or NaN times a probability of 0 would reach rows that do not see its key. Where some rows of the
  // tile see a block only in part, such values are added to the rows that do see them and zeroed in the tile. Rare and
  // slow.
  __device__ void TakeOutNonFinite(const KeyBlockView& block, E* tile) {
    bool found = false;
    for (int i = threadIdx.x; i < kKeys * kChunks; i += Traits::kThreads) {
      found = found || HasNonFinite<E>(reinterpret_cast<const uint4*>(tile)[i]);
    }
    if (!__syncthreads_or(found)) return;
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int key = 0; key < kKeys; ++key) {
#pragma unroll
      for (int f = 0; f < kFragments; ++f) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (!Sees(shared.rows, WarpRow() + 16 * f + 8 * half + lane / 4, block, key)) continue;
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

  __device__ void Run() {
    LookUp(load_block);
    for (int i = 0; i < Traits::kStages - 1; ++i) LoadNext();
    int slot = 0;
    const auto next_tile = [&](bool values) {
      WaitCopies<Traits::kStages - 2>();
      __syncthreads();
      const E* tile = Tile(slot, values);
      slot = slot + 1 == Traits::kStages ? 0 : slot + 1;
      return tile;
    };
#pragma unroll 1
    for (int block = shared.end - 1; block >= shared.begin; --block) {
      const int run = blocks.RunOf(block), first_key = blocks.FirstKey(block);
      float s[kFragments][kKeys / 8][4] = {};
      MultiplyKeys(next_tile(false), s);
      const uint32_t mapped = static_cast<uint32_t>(mapped_queue >> (16 * kAhead)) & 0xffffu;
      const int32_t* segments = SegmentsOfKeys(params, shared.b);
      const bool partial =
          !blocks.common[run].HoldsAll(first_key, kKeys) || mapped != kAllMapped || segments != nullptr;
      const KeyBlockView seen = {view.runs[run],
                                 run,
                                 first_key,
                                 mapped,
                                 segments,
                                 view.has_tree ? params.score.tree_mask : nullptr,
                                 params.score.tree_columns,
                                 view.position};
      if (partial || rule.modified) ModifyAndMask(seen, partial, s);
      uint32_t p[kFragments][kKeys / 16][4];
      Softmax(s, p);
      const E* values = next_tile(true);
      if (partial) TakeOutNonFinite(seen, const_cast<E*>(values));
      MultiplyValues(values, p);
    }
  }
};

}  // namespace turboattn::prefill

#endif  // TURBOATTN_KERNELS_PREFILL_MAINLOOP_SM80_CUH_

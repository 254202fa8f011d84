// A tile of work on Hopper: what the warp that chooses tiles tells the others of a block.
#ifndef TURBOATTN_KERNELS_PREFILL_TILE_SM90_CUH_
#define TURBOATTN_KERNELS_PREFILL_TILE_SM90_CUH_

#include <cstddef>
#include <cstdint>

#include "kernels/common/fast_divisor.h"
#include "kernels/common/score.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/prefill/traits.h"

namespace turboattn::prefill {

constexpr int kWholeTile = -1;

template <class Traits>
struct TileSm90 {
  // What copies need.
  int begin, end;  // those of the blocks to take in: all, or a part of them
  int head;        // kv head
  int query_row;   // of the query array, without the head axis: the first row's token
  int array;       // plain arrays: the sequence's, and in it the row of its first key
  int key_row;
  bool last;  // there is no tile here, and none will come
  BlockList<Traits::kKeys> blocks;
  int b;            // sequence
  int first_token;  // of the sequence: the first row's
  int first_head;   // of the group: the first row's
  int num_rows;
  SequenceView view;
  int part;         // that the result is one of: a place in the workspace; kWholeTile: it goes to out
  bool all_mapped;  // all pages with keys that some row of the tile sees
  int plain_from;   // PlainFrom() of the last block but one
  int non_finite;   // not 0: values that some row may see have been taken out, see AddNonFinite()
  TileRows<Traits::kRows> rows;
};

// The blocks that rows of tokens t0 .. t1 see, by a warp: a lane for each end of a range of keys, since for a block's
// first tile every instruction is waited for. See BlockList. Returns how many there are.
template <int kKeys>
__device__ __forceinline__ int FindBlocks(const SequenceView& view, int t0, int t1, bool has_common,
                                          BlockList<kKeys>* list) {
  const uint32_t lane = Opaque(threadIdx.x % kWarp);  // else what follows from it takes registers from tile to tile
  const bool is_hi = lane % 2 != 0, is_own = lane / 2 % 2 != 0, is_common = lane / 4 % 2 != 0;
  KeyRun keys = view.runs[0];
  if (is_own) keys = view.runs[kOwnRun];
  int key = is_hi ? keys.count : 0;
  if (view.rule.is_causal || view.has_tree || view.rule.left != -1 || view.rule.right != -1) {  // UnionOf, CommonTo
    const KeyRange visible = VisibleKeys(view.rule, view.position + (is_hi != is_common ? t1 : t0));
    int64_t position = is_hi ? visible.hi : visible.lo;
    if (view.has_tree && is_hi && is_common) position = min(position, view.position);
    key = keys.Before(position);
  }
  key = max(key, __shfl_sync(~0u, key, lane & ~1u));
  if (t1 < t0 || (is_common && !has_common)) key = 0;
  const int lo = __shfl_sync(~0u, key, lane & ~1u);
  // Of the lanes of `hi`.
  const int first = static_cast<int>(static_cast<uint32_t>(lo) / kKeys);
  const int count = key > lo ? static_cast<int>(static_cast<uint32_t>(key - 1) / kKeys) + 1 - first : 0;
  using List = BlockList<kKeys>;
  static_assert(offsetof(List, common) == sizeof(List::seen) && sizeof(List::seen) == 4 * sizeof(int) && kOwnRun == 1);
  if (lane < 4 * kRuns) (&list->seen[0].lo)[lane] = key;
  if (lane < 4 && is_hi) {
    list->first[is_own] = first;
    list->count[is_own] = count;
  }
  return __shfl_sync(~0u, count, 1) + __shfl_sync(~0u, count, 3);
}

// FillTileRow of all rows, by a warp. What is the same for all rows is worked out once: for a block's first tile every
// instruction is waited for.
template <class Traits, class Params>
__device__ __forceinline__ void FillRows(const Params& params, const FastDivisor& group, TileSm90<Traits>* tile) {
  constexpr bool kPaged = std::is_same_v<Params, PagedAttentionParams>;
  const SequenceView& view = tile->view;
  const int first_head = tile->first_head, heads = group.divisor;
  const int64_t first_token = tile->first_token;
  const KeyRange first_seen = VisibleKeys(view.rule, view.position + first_token);
  const bool lo_moves = view.rule.left != -1, hi_moves = first_seen.hi != kAllPositions;
#pragma unroll 1
  for (int r = threadIdx.x % kWarp; r < Traits::kRows; r += kWarp) {
    const int t = group.Quotient(first_head + r);
    const int64_t i = first_token + t;
    const int query_head = tile->head * heads + (first_head + r - t * heads);
    const bool exists = r < tile->num_rows && i < view.q_len;  // dense rows past query_lens see nothing
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const KeyRun& keys = view.runs[run];
      RunRange seen = {0, 0};
      if ((kPaged || run == kOwnRun) && exists && keys.count > 0) {
        if (!kPaged || keys.stride == 1) {
          seen.lo = static_cast<int>(Clamp(first_seen.lo + (lo_moves ? t : 0) - keys.first, 0, keys.count));
          seen.hi = static_cast<int>(Clamp(first_seen.hi + (hi_moves ? t : 0) - keys.first, seen.lo, keys.count));
        } else {
          seen = view.UnionOf(run, i, i);
        }
      }
      tile->rows.lo[run][r] = seen.lo;
      tile->rows.hi[run][r] = seen.hi;
    }
    tile->rows.position[r] = view.position + i;
    tile->rows.token[r] = view.first_token + i;
    tile->rows.head[r] = query_head;
    tile->rows.slope[r] = exists && params.score.alibi_slopes != nullptr ? params.score.alibi_slopes[query_head] : 0.f;
    tile->rows.segment[r] =
        exists && SegmentsOfQueries(params) != nullptr ? SegmentsOfQueries(params)[view.first_token + i] : 0;
  }
}

template <class Traits, class Params>
__device__ __forceinline__ KeyBlockView ViewBlock(const Params& params, const TileSm90<Traits>& tile, int block,
                                                  uint32_t mapped) {
  const int run = tile.blocks.RunOf(block);
  return {tile.view.runs[run],
          run,
          tile.blocks.FirstKey(block),
          mapped,
          SegmentsOfKeys(params, tile.b),
          tile.view.has_tree ? params.score.tree_mask : nullptr,
          params.score.tree_columns,
          tile.view.position};
}

// The first of the plain blocks that end with `block`, block + 1 if it is none: scores stay as they are and all rows
// see all keys.
template <class Traits, class Params>
__device__ __forceinline__ int PlainFrom(const Params& params, const TileSm90<Traits>& tile, bool scores_change,
                                         int block) {
  constexpr int kKeys = Traits::kKeys;
  const BlockList<kKeys>& blocks = tile.blocks;
  const int run = blocks.RunOf(block), first_key = blocks.FirstKey(block);
  const RunRange common = blocks.common[run];
  const bool selects = scores_change || !tile.all_mapped || SegmentsOfKeys(params, 0) != nullptr;
  if (selects || block < tile.begin || !common.HoldsAll(first_key, kKeys)) return block + 1;
  return max(block - (first_key - common.lo) / kKeys, max(tile.begin, run == 0 ? 0 : blocks.count[0]));
}

}  // namespace turboattn::prefill

#endif  // TURBOATTN_KERNELS_PREFILL_TILE_SM90_CUH_

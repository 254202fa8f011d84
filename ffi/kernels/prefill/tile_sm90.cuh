// A tile of work on Hopper: what the warp that chooses tiles tells the others of a block.
#ifndef TURBOATTN_KERNELS_PREFILL_TILE_SM90_CUH_
#define TURBOATTN_KERNELS_PREFILL_TILE_SM90_CUH_

#include <cstdint>

#include "kernels/common/score.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/prefill/traits.h"

namespace turboattn::prefill {

constexpr int64_t kWholeTile = -1;

template <class Traits>
struct TileSm90 {
  SequenceView view;
  BlockList<Traits::kKeys> blocks;
  int begin, end;  // those of them to take in: all, or a part of them
  int64_t part;    // that the result is one of: a place in the workspace; kWholeTile: it goes to out
  int64_t b;       // sequence
  int64_t head;    // kv head
  int64_t first_row;
  int num_rows;
  bool last;        // there is no tile here, and none will come
  bool all_mapped;  // all pages with keys that some row of the tile sees
  int plain_from;   // PlainFrom() of the last block but one
  int non_finite;   // not 0: values that some row may see have been taken out, see AddNonFinite()
  TileRows<Traits::kRows> rows;
};

// FillTileRow of all rows, by a warp. What is the same for all rows is worked out once: for a block's first tile every
// instruction is waited for.
template <class Traits, class Params>
__device__ __forceinline__ void FillRows(const Params& params, TileSm90<Traits>* tile) {
  const SequenceView& view = tile->view;
  const uint32_t group = GroupOf(params);
  const int64_t first_token = Divide(tile->first_row, group);
  const uint32_t skipped = static_cast<uint32_t>(tile->first_row - first_token * group);  // heads of the first token
  const KeyRange first_seen = VisibleKeys(view.rule, view.position + first_token);
  const bool lo_moves = view.rule.left != -1, hi_moves = first_seen.hi != kAllPositions;
#pragma unroll 1
  for (int r = threadIdx.x % kWarp; r < Traits::kRows; r += kWarp) {
    const uint32_t t = (skipped + r) / group;
    const int64_t i = first_token + t;
    const int query_head = static_cast<int>(tile->head * group + (skipped + r - t * group));
    const bool exists = r < tile->num_rows && i < view.q_len;  // dense rows past query_lens see nothing
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const KeyRun& keys = view.runs[run];
      RunRange seen = {0, 0};
      if (exists && keys.count > 0) {
        if (keys.stride == 1) {
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

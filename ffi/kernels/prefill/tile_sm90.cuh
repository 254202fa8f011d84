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

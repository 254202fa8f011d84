// Which rows the prefill kernels write, and in how many tiles.
#ifndef TURBOATTN_KERNELS_PREFILL_TILE_COUNT_CUH_
#define TURBOATTN_KERNELS_PREFILL_TILE_COUNT_CUH_

#include "core/params.h"
#include "kernels/common/sequence.cuh"

namespace turboattn::prefill {

// Sequences of at most this many tokens are the decode kernel's.
TA_HD int64_t SkippedLength(const PagedAttentionParams& params) {
  return params.plan.runs_decode ? params.plan.decode_q_len : 0;
}
TA_HD int64_t SkippedLength(const LinearAttentionParams&) { return 0; }

// See PrefillTiles. At least 1, for ranges that overlap.
template <int kRows, class Params>
int64_t MaxTiles(const Params& params) {
  const int64_t tiles = PrefillTiles(BatchOf(params), QueryRows(params), UniformQueryLength(params),
                                     params.num_heads / KvHeadsOf(params), kRows, SkippedLength(params));
  return tiles > 0 ? tiles : 1;
}

// Keys that a sequence can have.
inline int64_t MaxKeysOf(const LinearAttentionParams& params) { return params.num_keys; }
inline int64_t MaxKeysOf(const PagedAttentionParams& params) { return params.seqs.max_pages * params.cache.page_size; }

}  // namespace turboattn::prefill

#endif  // TURBOATTN_KERNELS_PREFILL_TILE_COUNT_CUH_

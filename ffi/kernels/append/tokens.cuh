// The tokens of a block: whose they are, where they go, and how far RoPE turns them. Common to both ways in which
// kernel.cuh moves rows.
#ifndef TURBOATTN_KERNELS_APPEND_TOKENS_CUH_
#define TURBOATTN_KERNELS_APPEND_TOKENS_CUH_

#include <climits>

#include "core/params.h"
#include "kernels/append/traits.h"
#include "kernels/common/page_walk.h"
#include "kernels/common/rope.h"

namespace turboattn::append {

// Where a token is written; page == kUnmapped: nowhere.
struct Place {
  int64_t page;           // from PageAt
  int64_t slot;           // token of the page
  int64_t rope_position;  // of the token, where the call gives no positions
  int sequence;
  int layer;
};

// s_owner[t]: the lowest sequence that owns row first + t of the packed arrays, or INT_MAX. Run by the whole block, and
// done when it returns. Ranges are not trusted to be sorted, so every one is looked at, once a block.
__device__ inline void FindOwners(const Sequences& seqs, int64_t first, int count, int* s_owner) {
  const int t = threadIdx.x;
  if (seqs.q_ranges == nullptr) {
    if (t < count) s_owner[t] = static_cast<int>((first + t) / seqs.uniform_q_len);
  } else {
    if (t < count) s_owner[t] = INT_MAX;
    __syncthreads();
    for (int64_t b = t; b < seqs.batch; b += blockDim.x) {
      const TokenRange range = QueryRange(seqs, b);
      const int64_t lo = range.lo > first ? range.lo : first;
      const int64_t hi = range.hi < first + count ? range.hi : first + count;
      for (int64_t token = lo; token < hi; ++token) atomicMin(&s_owner[token - first], static_cast<int>(b));
    }
  }
  __syncthreads();
}

__device__ inline Place PlaceToken(const AppendParams& params, int64_t token, int owner) {
  const Sequences& seqs = params.seqs;
  if (owner >= seqs.batch) return {kUnmapped, 0, 0, 0, 0};
  const TokenRange range = QueryRange(seqs, owner);
  const int64_t position = static_cast<int64_t>(seqs.kv_lens[owner]) - (range.hi - range.lo) + (token - range.lo);
  const WriteSlot slot = FindWriteSlot(params.cache, seqs, params.read_only_pages, owner, position);
  return {slot.page, slot.slot, FirstPosition(seqs) + position, owner, seqs.layer[owner]};
}

// s_place[count]. Run by the whole block, and done when it returns.
__device__ inline void PlaceTokens(const AppendParams& params, int64_t first, int count, int* s_owner, Place* s_place) {
  FindOwners(params.seqs, first, count, s_owner);
  const int t = threadIdx.x;
  if (t < count) s_place[t] = PlaceToken(params, first + t, s_owner[t]);
  __syncthreads();
}

// Calls column_turn(j), and what that returned with each token that has a place, by all threads together: the result is
// turn j < pairs of token t, s_turns[t * pairs + turn_index(j)].
template <class TurnIndex, class ColumnTurn>
__device__ inline void FillTurns(int pairs, int count, const Place* s_place, SinCos* s_turns, TurnIndex turn_index,
                                 ColumnTurn column_turn) {
  const int threads = blockDim.x, thread = threadIdx.x;
  const bool wide = threads >= pairs;  // then divisions are by `pairs`, which the usual caller knows when compiled
  const int groups = wide ? threads / pairs : 1, group = wide ? thread / pairs : 0;
  if (group >= groups) return;
  for (int j = wide ? thread % pairs : thread; j < pairs; j += threads) {
    const auto turn = column_turn(j);
    SinCos* to = s_turns + turn_index(j);
    for (int t = group; t < count; t += groups) {
      if (s_place[t].page != kUnmapped) to[t * pairs] = turn(t);
    }
  }
}

// All turns of the block's tokens, by the whole block; done when it returns.
template <class TurnIndex>
__device__ inline void TurnTokens(const RopeParams& rope, int pairs, int64_t first, int count, const Place* s_place,
                                  SinCos* s_turns, TurnIndex turn_index) {
  if (rope.turns != nullptr && rope.positions == nullptr) {  // apart, as it is usual and short
    FillTurns(pairs, count, s_place, s_turns, turn_index, [&](int j) {
      return [&, step = RopeStep(rope.turns, j)](int t) {
        return RopeTurn(rope, RopeAngle(step, s_place[t].rope_position));
      };
    });
  } else {
    FillTurns(pairs, count, s_place, s_turns, turn_index, [&](int j) {
      return [&, j](int t) { return RopeSinCos(rope, s_place[t].sequence, j, first + t, s_place[t].rope_position); };
    });
  }
  __syncthreads();
}

}  // namespace turboattn::append

#endif  // TURBOATTN_KERNELS_APPEND_TOKENS_CUH_

// The tokens of a block: whose they are, where they go, and how far RoPE turns them. Common to both ways in which
// kernel.cuh moves rows.
#ifndef TURBOATTN_KERNELS_APPEND_TOKENS_CUH_
#define TURBOATTN_KERNELS_APPEND_TOKENS_CUH_

#include "core/params.h"
#include "kernels/append/traits.h"
#include "kernels/common/chunk.cuh"
#include "kernels/common/page_walk.h"
#include "kernels/common/rope.h"

namespace turboattn::append {

// Where a token is written; page == kUnmapped: nowhere.
struct Place {
  int64_t page;  // from PageAt
  int slot;      // token of the page
  int layer;
};

// Whose a token is, and its position there. Of two owners the lesser counts, which is the lower sequence.
class Owner {
 public:
  static constexpr unsigned long long kNone = ~0ull;

  // As one number. A position is that of kv_lens (32 bits) less or more what 31 bits count.
  static __device__ unsigned long long Pack(int64_t sequence, int64_t position) {
    return static_cast<unsigned long long>(sequence) << kPositionBits | (position + kOffset);
  }
  __device__ explicit Owner(unsigned long long packed) : packed_(packed) {}
  __device__ bool none() const { return packed_ == kNone; }
  __device__ int sequence() const { return static_cast<int>(packed_ >> kPositionBits); }
  __device__ int64_t position() const {
    return static_cast<int64_t>(packed_ & ((1ull << kPositionBits) - 1)) - kOffset;
  }

 private:
  static constexpr int kPositionBits = 33;
  static constexpr int64_t kOffset = int64_t{1} << 32;
  unsigned long long packed_;
};

// A sequence's claim on rows of the packed arrays, as it was loaded: looking at it would wait for it.
struct Claim {
  int32_t lo = 0, hi = 0, kv_len = 0;
};

__device__ inline Claim LoadClaim(const Sequences& seqs, int64_t b) {
  if (seqs.q_ranges == nullptr || b >= seqs.batch) return {};
  return {seqs.q_ranges[2 * b], seqs.q_ranges[2 * b + 1], seqs.kv_lens[b]};
}

// The column of turns that a thread begins with.
__device__ inline int FirstColumn(int pairs) { return static_cast<int>(threadIdx.x) % pairs; }

// What a thread asks for before all else. Memory answers in turn: before the rows, which may wait for it.
struct FirstLoads {
  Claim claim;             // of sequence threadIdx.x
  uint64_t rope_step = 0;  // of the first column

  __device__ FirstLoads(const AppendParams& params, int pairs) : claim(LoadClaim(params.seqs, threadIdx.x)) {
    if (pairs != 0 && params.rope.turns != nullptr) rope_step = RopeStep(params.rope.turns, FirstColumn(pairs));
  }
};

// s_owner[t]: the owner of row first + t of the packed arrays. Run by the whole block, and done when it returns. Ranges
// are not trusted to be sorted, so every one is looked at, once a block, and its length read beside it: what follows
// waits for one load. A warp takes 32 of them, and then a token a lane. claim: of sequence threadIdx.x.
__device__ inline void FindOwners(const Sequences& seqs, int64_t first, int count, Claim claim,
                                  unsigned long long* s_owner) {
  const int t = threadIdx.x;
  if (seqs.q_ranges == nullptr) {
    if (t < count) {
      const int64_t b = Divide(first + t, seqs.uniform_q_len);
      s_owner[t] =
          b < seqs.batch ? Owner::Pack(b, seqs.kv_lens[b] - (b + 1) * seqs.uniform_q_len + (first + t)) : Owner::kNone;
    }
  } else {
    if (t < count) s_owner[t] = Owner::kNone;
    __syncthreads();
    static_assert(kMaxTokens <= kWarp && kMaxAnyTokens <= kWarp);
    const int lane = t % kWarp, tokens = static_cast<int>(seqs.num_tokens), base = static_cast<int>(first);
    for (int64_t b = t; b - lane < seqs.batch; b += blockDim.x, claim = LoadClaim(seqs, b)) {
      const int start = min(max(claim.lo, 0), tokens), end = min(max(claim.hi, start), tokens);  // as ClampRange
      const int lo = max(start - base, 0), hi = min(end - base, count);
      for (uint32_t owners = __ballot_sync(~0u, lo < hi); owners != 0; owners &= owners - 1) {
        const int from = __ffs(owners) - 1;
        const int from_lo = __shfl_sync(~0u, lo, from), from_hi = __shfl_sync(~0u, hi, from);
        const int from_len = __shfl_sync(~0u, claim.kv_len, from), from_end = __shfl_sync(~0u, end, from);
        if (lane >= from_lo && lane < from_hi) {
          atomicMin(&s_owner[lane],
                    Owner::Pack(b - lane + from, static_cast<int64_t>(from_len) - from_end + first + lane));
        }
      }
    }
  }
  __syncthreads();
}

// Calls column_turn(j), and what that returned with each token that has an owner, by all threads together: the result
// is turn j < pairs of token t, s_turns[t * pairs + turn_index(j)].
template <int kUnroll, class TurnIndex, class ColumnTurn>
__device__ inline void FillTurns(int pairs, int count, const unsigned long long* s_owner, SinCos* s_turns,
                                 TurnIndex turn_index, ColumnTurn column_turn) {
  const int threads = blockDim.x, thread = threadIdx.x;
  const bool wide = threads >= pairs;  // then divisions are by `pairs`, which the usual caller knows when compiled
  const int groups = wide ? threads / pairs : 1, group = wide ? thread / pairs : 0;
  if (group >= groups) return;
  for (int j = FirstColumn(pairs); j < pairs; j += threads) {
    const auto turn = column_turn(j);
    SinCos* to = s_turns + turn_index(j);
#pragma unroll kUnroll
    for (int t = group; t < count; t += groups) {
      const Owner owner(s_owner[t]);
      if (!owner.none()) to[t * pairs] = turn(t, owner);
    }
  }
}

// All turns of the block's tokens, by the whole block.
template <class TurnIndex>
__device__ inline void TurnTokens(const Sequences& seqs, const RopeParams& rope, int pairs, int64_t first, int count,
                                  uint64_t first_step, const unsigned long long* s_owner, SinCos* s_turns,
                                  TurnIndex turn_index) {
  const int64_t origin = FirstPosition(seqs);
  if (rope.turns != nullptr && rope.positions == nullptr) {  // apart, as it is usual and short
    FillTurns<2>(pairs, count, s_owner, s_turns, turn_index, [&](int j) {
      const uint64_t step = j == FirstColumn(pairs) ? first_step : RopeStep(rope.turns, j);
      return [&, step](int, const Owner& owner) { return RopeTurn(rope, RopeAngle(step, origin + owner.position())); };
    });
  } else {
    FillTurns<1>(pairs, count, s_owner, s_turns, turn_index, [&](int j) {
      return [&, j](int t, const Owner& owner) {
        return RopeSinCos(rope, owner.sequence(), j, first + t, origin + owner.position());
      };
    });
  }
}

// Whose the block's tokens are, where they go and, with RoPE, their turns. Run by the whole block, and done when it
// returns. The pages are on their way while the turns are computed.
template <class TurnIndex>
__device__ inline void PlaceTokens(const AppendParams& params, int pairs, int64_t first, int count,
                                   const FirstLoads& loads, unsigned long long* s_owner, Place* s_place,
                                   SinCos* s_turns, TurnIndex turn_index) {
  const Sequences& seqs = params.seqs;
  FindOwners(seqs, first, count, loads.claim, s_owner);
  const int t = threadIdx.x;
  int layer = -1, page = -1;
  if (t < count) {
    const Owner owner(s_owner[t]);
    if (!owner.none()) {
      const int b = owner.sequence();
      layer = seqs.layer[b];
      const WriteColumn to = FindWriteColumn(params.cache, seqs, params.read_only_pages, b, owner.position());
      if (to.column != kUnmapped) page = seqs.page_table[b * seqs.max_pages + to.column];
      s_place[t].slot = static_cast<int>(to.slot);
    }
  }
  if (pairs != 0) TurnTokens(seqs, params.rope, pairs, first, count, loads.rope_step, s_owner, s_turns, turn_index);
  if (t < count) {
    s_place[t].page = PageOf(params.cache, layer, page);
    s_place[t].layer = layer;
  }
  __syncthreads();
}

}  // namespace turboattn::append

#endif  // TURBOATTN_KERNELS_APPEND_TOKENS_CUH_

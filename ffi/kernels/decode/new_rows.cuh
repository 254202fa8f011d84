// The fused step's new keys and values: a part of a unit stores those among its keys, then loads them back as stored.
#ifndef TURBOATTN_KERNELS_DECODE_NEW_ROWS_CUH_
#define TURBOATTN_KERNELS_DECODE_NEW_ROWS_CUH_

#include <climits>
#include <cstdint>

#include "kernels/common/append_row.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/decode/traits.h"

namespace turboattn::decode {

// Which block of a unit's list stores key `key` of the sequence's own run: the one that reads it, so that no part reads
// what another writes. A key that no block reads is to be stored too, by any. A list without blocks counts as one.
__device__ inline int64_t StoringBlock(const BlockList<kDecodeKeys>& blocks, int64_t key) {
  const int64_t block = blocks.count[0] + key / kDecodeKeys - blocks.first[kOwnRun];
  if (block >= 0 && block < blocks.total()) return block;
  return blocks.total() > 0 ? blocks.total() - 1 : 0;
}

// Not inline: it is long, and most calls turn by a table.
__device__ __noinline__ inline SinCos AnyTurn(const RopeParams& rope, int b, int j, int64_t token, int64_t position) {
  return RopeSinCos(rope, b, j, token, position);
}

// Where a row goes: the block of the list that stores it, the column of the page table (-1: it is not to be stored) and
// the slot of the page.
struct NewRowPlace {
  int block;
  int column;
  int slot;
};

// Of the token at position >= 0 from the sequence's own first one. Not inline, nor is the next: they are long, and
// plain calls go without them.
__device__ __noinline__ inline NewRowPlace PlaceAny(const PagedAttentionParams& params,
                                                    const BlockList<kDecodeKeys>& blocks, int b, int64_t position) {
  const Sequences& seqs = params.seqs;
  const WriteColumn to = FindWriteColumn(params.cache, seqs, params.append.read_only_pages, b, position);
  return {static_cast<int>(StoringBlock(blocks, LocalKey(position, seqs.cp_size))),
          to.column == kUnmapped ? -1 : static_cast<int>(to.column), static_cast<int>(to.slot)};
}

// The block of the list that has the key of the token at `position`, or would have it.
__device__ __noinline__ inline int BlockOfAny(const PagedAttentionParams& params, const BlockList<kDecodeKeys>& blocks,
                                              int64_t position) {
  const int64_t key = position < 0 ? 0 : LocalKey(position, params.seqs.cp_size);
  return static_cast<int>(blocks.count[0] + key / kDecodeKeys - blocks.first[kOwnRun]);
}

// The first block of the list that may have a new row among its keys.
__device__ inline int FirstNewBlock(const PagedAttentionParams& params, const CallFacts& facts,
                                    const SequenceView& view, const BlockList<kDecodeKeys>& blocks) {
  if (!facts.appends) return INT_MAX;
  if (facts.plain) return max(static_cast<int>(view.position), 0) / kDecodeKeys;
  return BlockOfAny(params, blocks, view.position - FirstPosition(params.seqs));
}

// The new rows of one part, which takes in blocks first_block .. end_block - 1: for each of its tokens a row of K and
// one of V, each moved by one warp. Made before the query is loaded, so that all loads are on their way together.
template <class Traits>
class NewRows {
 public:
  __device__ NewRows(const PagedAttentionParams& params, const CallFacts& facts, const SequenceView& view,
                     const BlockList<kDecodeKeys>& blocks, int b, int head, int first_block, int end_block)
      : params_(params),
        facts_(facts),
        view_(view),
        blocks_(blocks),
        b_(b),
        head_(head),
        first_block_(first_block),
        end_block_(end_block),
        first_(Load(FirstItem())) {}

  // layer: the sequence's. s_row: kDim floats of the warp's own. turns: of the pairs of the only token, if has_turns.
  // The block may read the stored rows after its next barrier.
  __device__ void Store(int32_t layer, float* s_row, const SinCos* turns, bool has_turns) const {
    Row row = first_;
#pragma unroll 1
    for (int item = FirstItem(); item < Items(); item += kWarps) {
      const Row next = Load(item + kWarps);
      if (row.slot >= 0) Store(item, row, layer, s_row, turns, has_turns);
      row = next;
    }
  }

 private:
  static constexpr int kDim = Traits::kDim;
  struct Row {
    int slot = -1;  // of the page; -1: there is nothing to store
    // As they were loaded: looking at them would wait for them.
    int32_t page = 0;
    WarpRow<kDim> source;
  };

  // Items: K and V of the sequence's first token, of its second, ... The first warps are busy with the query.
  __device__ int Items() const { return facts_.appends ? 2 * static_cast<int>(view_.q_len) : 0; }
  __device__ static int FirstItem() { return (threadIdx.x / kWarp + kWarps / 2) % kWarps; }

  // Of token i, from the sequence's own first one.
  __device__ int64_t Position(int i) const {
    return view_.position + i - (facts_.plain ? 0 : FirstPosition(params_.seqs));
  }

  // A schedule may be of other tokens or lengths: the places that it names are then not this call's to write.
  __device__ bool IsOfThisCall() const {
    const TokenRange own = QueryRange(params_.seqs, b_);
    return own.lo == view_.first_token && own.hi - own.lo == view_.q_len &&
           params_.seqs.kv_lens[b_] - view_.q_len == view_.position;
  }

  // As PlaceAny. Plain: an int32 holds the position.
  __device__ NewRowPlace PlaceOf(int64_t position) const {
    if (!facts_.plain) return PlaceAny(params_, blocks_, b_, position);
    const int32_t* read_only_pages = params_.append.read_only_pages;
    const int key = static_cast<int>(position), column = key >> facts_.page_shift;
    const bool dropped = key >= facts_.max_keys || (read_only_pages != nullptr && column < read_only_pages[b_]);
    return {max(min(key / kDecodeKeys, blocks_.total() - 1), 0), dropped ? -1 : column,
            key & ((1 << facts_.page_shift) - 1)};
  }

  __device__ Row Load(int item) const {
    Row found;
    if (!facts_.appends || item >= Items()) return found;
    const AppendParams& append = params_.append;
    const int i = item / 2;
    const int64_t position = Position(i);
    if (position < 0) return found;
    const NewRowPlace to = PlaceOf(position);
    if (to.block < first_block_ || to.block >= end_block_ || to.column < 0) return found;
    found.source = WarpRow<kDim>::Load(item % 2 == 0 ? append.key : append.value,
                                       (view_.first_token + i) * params_.cache.num_kv_heads + head_);
    found.page = params_.seqs.page_table[int64_t{b_} * params_.seqs.max_pages + to.column];
    found.slot = to.slot;
    return found;
  }

  __device__ void Store(int item, const Row& row, int32_t layer, float* s_row, const SinCos* turns,
                        bool has_turns) const {
    const AppendParams& append = params_.append;
    const int64_t page = PageOf(params_.cache, layer, row.page);
    if (page == kUnmapped) return;
    if (facts_.schedule != nullptr && !IsOfThisCall()) return;
    const int i = item / 2;
    const auto turn = [&](int j) {
      return has_turns ? turns[j] : AnyTurn(append.rope, b_, j, view_.first_token + i, view_.position + i);
    };
    const int64_t to = CacheRow(params_.cache, page, head_, row.slot);
    append::StoreWarpRow<Traits, kDim>(append, item % 2 == 0, to, layer, head_, row.source, turn, s_row);
  }

  const PagedAttentionParams& params_;
  const CallFacts& facts_;
  const SequenceView& view_;
  const BlockList<kDecodeKeys>& blocks_;
  const int b_, head_, first_block_, end_block_;
  const Row first_;
};

}  // namespace turboattn::decode

#endif  // TURBOATTN_KERNELS_DECODE_NEW_ROWS_CUH_

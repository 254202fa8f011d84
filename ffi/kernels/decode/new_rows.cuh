// The fused step's new keys and values: a part of a unit stores those among its keys, then loads them back as stored.
#ifndef TURBOATTN_KERNELS_DECODE_NEW_ROWS_CUH_
#define TURBOATTN_KERNELS_DECODE_NEW_ROWS_CUH_

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

// The new rows of one part, which takes in blocks first_block .. end_block - 1: for each of its tokens a row of K and
// one of V, each moved by one warp. Made before the query is loaded, so that all loads are on their way together.
template <class Traits>
class NewRows {
 public:
  __device__ NewRows(const PagedAttentionParams& params, const SequenceView& view, const BlockList<kDecodeKeys>& blocks,
                     int64_t b, int64_t head, int64_t first_block, int64_t end_block)
      : params_(params),
        view_(view),
        blocks_(blocks),
        b_(b),
        head_(head),
        first_block_(first_block),
        end_block_(end_block),
        first_(Load(FirstItem())) {}

  // Whether one of blocks first_block .. end - 1 may have a new row among its keys.
  __device__ bool Touch(int64_t end) const {
    if (params_.append.key == nullptr) return false;
    const int64_t position = view_.position - FirstPosition(params_.seqs);
    return StoringBlock(blocks_, position < 0 ? 0 : LocalKey(position, params_.seqs.cp_size)) < end;
  }

  // s_row: kDim floats of the warp's own. The block may read the stored rows after its next barrier.
  __device__ void Store(float* s_row) const {
    Row row = first_;
#pragma unroll 1
    for (int64_t item = FirstItem(); item < Items(); item += kWarps) {
      const Row next = Load(item + kWarps);
      if (row.slot != kUnmapped) Store(item, row, s_row);
      row = next;
    }
  }

 private:
  using E = typename Traits::E;
  static constexpr int kDim = Traits::kDim;
  static_assert(kDim <= kWarp * kChunk, "a lane has one chunk of a row");

  struct Row {
    int64_t slot = kUnmapped;  // of the page; kUnmapped: there is nothing to store
    // Words as they were loaded: looking at them would wait for them.
    int32_t layer = 0, page = 0;
    uint4 source = {};  // the lane's chunk
  };

  // Items: K and V of the sequence's first token, of its second, ... The first warps are busy with the query.
  __device__ int64_t Items() const { return params_.append.key != nullptr ? 2 * view_.q_len : 0; }
  __device__ static int FirstItem() { return (threadIdx.x / kWarp + kWarps / 2) % kWarps; }
  __device__ static int Column() { return threadIdx.x % kWarp * kChunk; }

  __device__ Row Load(int64_t item) const {
    Row found;
    if (item >= Items()) return found;
    const AppendParams& append = params_.append;
    const int64_t i = item / 2, position = view_.position - FirstPosition(params_.seqs) + i;
    if (position < 0) return found;
    const int64_t block = StoringBlock(blocks_, LocalKey(position, params_.seqs.cp_size));
    if (block < first_block_ || block >= end_block_) return found;
    const WriteColumn to = FindWriteColumn(params_.cache, params_.seqs, append.read_only_pages, b_, position);
    if (to.column == kUnmapped) return found;
    if (Column() < kDim) {
      const void* source = item % 2 == 0 ? append.key : append.value;
      const int64_t source_row = (view_.first_token + i) * params_.cache.num_kv_heads + head_;
      found.source = static_cast<const uint4*>(source)[(source_row * kDim + Column()) / kChunk];
    }
    found.layer = params_.seqs.layer[b_];
    found.page = params_.seqs.page_table[b_ * params_.seqs.max_pages + to.column];
    found.slot = to.slot;
    return found;
  }

  __device__ void Store(int64_t item, const Row& row, float* s_row) const {
    static_assert(sizeof(Chunk<E>) == sizeof(uint4));
    const AppendParams& append = params_.append;
    const int64_t page = PageOf(params_.cache, row.layer, row.page);
    if (page == kUnmapped) return;
    const bool is_key = item % 2 == 0;
    const int64_t i = item / 2;
    if (Column() < kDim) {
      append::PutChunk(append, append::SideOf(append, is_key), head_, Column(),
                       reinterpret_cast<const Chunk<E>&>(row.source), s_row);
    }
    const auto turn = [&](int64_t j) {
      return RopeSinCos(append.rope, b_, j, view_.first_token + i, view_.position + i);
    };
    const int64_t to = CacheRow(params_.cache, page, head_, row.slot);
    append::FinishRow<Traits>(append, is_key, to, row.layer, head_, turn, s_row);
  }

  const PagedAttentionParams& params_;
  const SequenceView& view_;
  const BlockList<kDecodeKeys>& blocks_;
  const int64_t b_, head_, first_block_, end_block_;
  const Row first_;
};

}  // namespace turboattn::decode

#endif  // TURBOATTN_KERNELS_DECODE_NEW_ROWS_CUH_

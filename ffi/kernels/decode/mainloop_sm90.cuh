// The decode mainloop of the sm90 family: a warp copies blocks of keys as tensors into a ring that the block's other
// warps empty, part after part of the block's work without a stop.
#ifndef TURBOATTN_KERNELS_DECODE_MAINLOOP_SM90_CUH_
#define TURBOATTN_KERNELS_DECODE_MAINLOOP_SM90_CUH_

#include <cuda.h>

#include <cstdint>

#include "kernels/common/ptx_sm90.cuh"
#include "kernels/decode/mainloop_sm80.cuh"
#include "kernels/decode/products.cuh"
#include "kernels/decode/traits.h"

namespace turboattn::decode {

struct TensorMaps {
  CUtensorMap key, value;  // [panels of a row, rows of the pool, elements of a panel]
  int box_shift;           // a box has 2^box_shift rows of a (page, head)
};

// A part of a unit, as the copying warp found it. b < 0: the block has no more.
struct Part {
  int b;
  int head, first_row, rows;             // of the unit: kv head, (token, head of the group) rows
  int within, first_block, num_blocks;   // of the list of work, see DecodeSm80
  int new_block;                         // the first of the part's blocks that may have new rows, if it has so many
  int64_t position;                      // in the list
  Share share;
  SequenceView view;
  BlockList<kDecodeKeys> blocks;

  // A sequence without a key to see has one block in the list and none to copy.
  __device__ int Keyed() const { return blocks.total() == 0 ? 0 : num_blocks; }
};

constexpr int kParts = 2;  // the one that is multiplied, and the next

template <class Traits>
struct SharedSm90 {
  static constexpr int kDim = Traits::kDim, kSteps = Traits::kSteps;

  alignas(1024) unsigned char tile[kSteps][2][Traits::kArrayBytes];
  alignas(128) uint32_t row_params[kSteps][2][Traits::kParamBytes > 0 ? Traits::kStepKeys : 4];
  alignas(128) typename Traits::E query_tile[Traits::kRows * kDim];
  alignas(16) SinCos pair_turns[kDim / 2];
  alignas(16) float new_rows[kWarps][kDim];
  uint64_t full[kSteps], empty[kSteps];  // of the ring
  uint64_t found[kParts], done[kParts];  // of the parts
  uint64_t stored;                       // the part's new rows
  uint32_t mapped[kSteps];               // a bit for each 8 keys
  WarpState<Traits> states;
  TileRows<Traits::kRows> rows;
  CodeQuery<Traits::kQuantised ? Traits::kRows : 1> code_query;
  WorkList list;
  int last_parts;  // as in SharedSm80
  Part parts[kParts];

  __device__ typename Traits::E* query() { return query_tile; }
  __device__ SinCos* turns() { return pair_turns; }
  __device__ float* new_row() { return new_rows[threadIdx.x / kWarp]; }
};

// Where in the ring a warp is.
template <int kSteps>
struct RingPlace {
  int slot = 0;
  uint32_t phase = 0;

  __device__ void Next() {
    if (++slot == kSteps) {
      slot = 0;
      phase ^= 1;
    }
  }
};

enum WaitName { kWaitFull = 1, kWaitEmpty, kWaitFound, kWaitDone, kWaitStored, kWaitOutputs };

// The copies of one part, by one warp.
template <class Traits>
struct CopierSm90 {
  static constexpr int kSteps = Traits::kSteps;
  static constexpr bool kRowParams = Traits::kParamBytes > 0;

  const PagedAttentionParams& params;
  const CallFacts& facts;
  const TensorMaps& maps;
  SharedSm90<Traits>& shared;
  const int lane = threadIdx.x % kWarp;
  RingPlace<kSteps> place = {};
  uint32_t stored_phase = 0;

  // The table's entry for the box at key j of the list's block, or -1.
  __device__ int32_t Entry(const Part& part, const int32_t* own_pages, int block, int within) const {
    if (block >= part.Keyed()) return -1;
    const int run = part.blocks.RunOf(part.first_block + block);
    const int j = part.blocks.FirstKey(part.first_block + block) + within;
    if (!part.blocks.seen[run].Meets(j, 1 << maps.box_shift)) return -1;
    return (run == kOwnRun ? own_pages : params.seqs.prefix_pages)[j >> facts.page_shift];
  }

  // A lane looks up one box of 32, and copies it when its step's place is free.
  __device__ void CopyPart(const Part& part) {
    const int boxes_shift = kLogDecodeKeys - maps.box_shift;  // 2^boxes_shift of them are a block of the list
    const int batch = kWarp >> boxes_shift;                   // blocks that are looked up together
    const int my_block = lane >> boxes_shift, within = (lane & ((1 << boxes_shift) - 1)) << maps.box_shift;
    const int32_t layer = params.seqs.layer[part.b];
    const int32_t* own_pages = params.seqs.page_table + int64_t{part.b} * static_cast<int>(params.seqs.max_pages);
    const int num_blocks = part.Keyed();
    bool waits = params.append.key != nullptr;
    int32_t entry = Entry(part, own_pages, my_block, within);
#pragma unroll 1
    for (int base = 0; base < num_blocks; base += batch) {
      const bool mine = static_cast<unsigned>(layer) < facts.layers && static_cast<unsigned>(entry) < facts.pages;
      int row = 0;
      if (mine) {
        const int key = part.blocks.FirstKey(part.first_block + base + my_block) + within;
        const int page = layer * static_cast<int>(params.cache.num_pages) + entry;
        row = ((page * static_cast<int>(params.cache.num_kv_heads) + part.head) << facts.page_shift) +
              (key & ((1 << facts.page_shift) - 1));
      }
      const uint32_t mapped = __ballot_sync(~0u, mine);
      entry = Entry(part, own_pages, base + batch + my_block, within);
#pragma unroll 1
      for (int block = base; block < min(base + batch, num_blocks); block += Traits::kKeyTiles) {
        if (waits && block + Traits::kKeyTiles > part.new_block) {
          WaitStored();
          waits = false;
        }
        // Lane i: whether the step's keys 8 i to 8 i + 7 are mapped.
        const int source = ((block - base) << boxes_shift) + (lane >> (3 - boxes_shift));
        const uint32_t groups = __ballot_sync(~0u, lane < 8 * Traits::kKeyTiles && source < kWarp && (mapped >> source & 1u) != 0);
        WaitBarrier(&shared.empty[place.slot], place.phase ^ 1, kWaitEmpty);
        if (lane == 0) {
          shared.mapped[place.slot] = groups;
          constexpr int kGroupBytes = 2 * 8 * (Traits::kStoredBytes + (kRowParams ? 4 : 0));
          ArriveExpecting(&shared.full[place.slot], __popc(groups) * kGroupBytes);
        }
        __syncwarp();
        const int t = base + my_block - block;
        if (mine && t >= 0 && t < Traits::kKeyTiles) {
          uint64_t* full = &shared.full[place.slot];
          const int at = t * kDecodeKeys + within;
          const uint32_t to = SharedAddress(shared.tile[place.slot][0]) + at * Traits::kStoredBytes;
          CopyBox3(to, &maps.key, full, 0, row, 0);
          CopyBox3(to + Traits::kArrayBytes, &maps.value, full, 0, row, 0);
          if constexpr (kRowParams) {
            const uint32_t params_to = SharedAddress(&shared.row_params[place.slot][0][at]);
            const int bytes = 4 << maps.box_shift;
            CopyBytes(params_to, static_cast<const uint32_t*>(params.cache.key_params) + row, bytes, full);
            CopyBytes(params_to + Traits::kParamBytes, static_cast<const uint32_t*>(params.cache.value_params) + row,
                      bytes, full);
          }
        }
        place.Next();
      }
    }
    if (waits) WaitStored();  // each part's
    // For the warps' outputs.
#pragma unroll 1
    for (int i = 0; i < Traits::kOutputSteps; ++i) {
      WaitBarrier(&shared.empty[place.slot], place.phase ^ 1, kWaitOutputs);
      if (lane == 0) Arrive(&shared.full[place.slot]);
      place.Next();
    }
  }

  __device__ void WaitStored() {
    WaitBarrier(&shared.stored, stored_phase, kWaitStored);
    stored_phase ^= 1;
  }
};

template <class Traits>
struct MainloopSm90 : WarpProducts<Traits> {
  using Base = WarpProducts<Traits>;
  using Base::kRowParams, Base::params, Base::rule, Base::lane, Base::warp, Base::layout;
  static constexpr int kSteps = Traits::kSteps, kKeyTiles = Traits::kKeyTiles, kColumns = Traits::kColumns;
  static constexpr int kBlockBytes = kDecodeKeys * Traits::kStoredBytes;

  SharedSm90<Traits>& shared;
  const Part& part;
  RingPlace<kSteps>& place;
  const bool rows_differ;        // in what they see
  int common_begin, common_end;  // blocks of the part whose keys of this warp all rows see, in the sequence's own run
  uint32_t key_fragment, value_fragment;  // in the ring's first step

  __device__ MainloopSm90(const PagedAttentionParams& params, const TensorMaps& maps, SharedSm90<Traits>& shared,
                          const Part& part, RingPlace<kSteps>& place)
      : Base(params, shared, part.b, part.head),
        shared(shared),
        part(part),
        place(place),
        rows_differ(part.share.q_len > 1 || part.view.has_tree) {
    layout.box_shift = maps.box_shift;
    layout.panel_bytes = 128 << maps.box_shift;
    layout.first_row = warp * kWarpKeys;
    const RunRange common = part.blocks.common[kOwnRun];
    const int first = part.blocks.first[kOwnRun] + part.first_block - part.blocks.count[0];
    const int lo = static_cast<int>((common.lo + (kWarpKeys - 1u)) / kWarpKeys), hi = common.hi / kWarpKeys;
    common_begin = ::max(((lo - warp + kWarps - 1) >> 2) - first, part.blocks.count[0] - part.first_block);
    common_end = ((hi - warp - 1) >> 2) - first + 1;
    static_assert(kWarps == 4);
    const uint32_t tiles = SharedAddress(shared.tile);
    key_fragment = Opaque(tiles + layout.Chunk(lane % 16, lane / 16));
    value_fragment = Traits::kArrayBytes +
                     (Traits::kQuantised
                          ? key_fragment
                          : Opaque(tiles + layout.Chunk(lane / 16 * 8 + lane % 8, lane / 8 % 2)));
  }

  // The keys of a tile that some row may not see: masks, and zeros in place of values that none of them sees. False: no
  // value of the head is finite, see TakeOutElements.
  __device__ bool LookAt(const WarpTile& tile, int block, uint32_t groups, float (&s)[kColumns][4]) {
    const bool exists = block < part.Keyed();
    if (!exists) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = -Infinity();
      ZeroUnseen(tile, [](int) { return false; });
      return true;
    }
    const KeyBlockView view =
        BlockViewOf(params, part.view, part.blocks, part.first_block + block, warp, groups);
    const bool partial = groups != 3u || block < common_begin || block >= common_end;
    if (partial || rule.modified) this->ModifyAndMask(view, partial, s);
    if (partial) {
      const RunRange seen = part.blocks.seen[view.run_index];
      ZeroUnseen(tile, [&](int key) { return (groups >> key / 8 & 1u) != 0 && seen.Holds(view.first_key + key); });
    }
    const bool look = (partial && rows_differ) || this->ValuesAreNotFinite();
    if (!look) return true;
    if constexpr (kRowParams) {
      this->TakeOutRows(view, tile);
      return true;
    } else {
      return this->TakeOutElements(view, tile);
    }
  }

  template <class IsSeen>
  __device__ void ZeroUnseen(const WarpTile& tile, IsSeen is_seen) {
#pragma unroll 1
    for (int i = lane; i < kWarpKeys * Traits::kStoredChunks; i += kWarp) {
      const int key = i / Traits::kStoredChunks;
      if (!is_seen(key)) *this->ValueChunk(tile, key, i % Traits::kStoredChunks) = {0, 0, 0, 0};
    }
    if constexpr (kRowParams) {
      uint32_t* const of_row = lane < kWarpKeys ? tile.params[0] : tile.params[1];
      if (!is_seen(lane % kWarpKeys)) of_row[lane % kWarpKeys] = 0;
    }
    FenceAsyncProxy();
    __syncwarp();
  }

  // With the query in registers.
  __device__ void Run() {
    this->Reset();
    const int num_blocks = part.Keyed();
#pragma unroll 1
    for (int block = 0; block < num_blocks; block += kKeyTiles) {
      WarpTile tiles[kKeyTiles];
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t) {
        const uint32_t from = place.slot * (2 * Traits::kArrayBytes) + t * kBlockBytes;
        const int row = t * kDecodeKeys + warp * kWarpKeys;
        tiles[t] = {key_fragment + from,
                    value_fragment + from,
                    shared.tile[place.slot][1] + t * kBlockBytes,
                    {&shared.row_params[place.slot][0][kRowParams ? row : 0],
                     &shared.row_params[place.slot][1][kRowParams ? row : 0]}};
      }
      WaitBarrier(&shared.full[place.slot], place.phase, kWaitFull);
      const uint32_t mapped = shared.mapped[place.slot] >> 2 * warp;
      float s[kKeyTiles][kColumns][4] = {};
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t) this->MultiplyKeys(tiles[t], s[t]);
      constexpr uint32_t kAll = kKeyTiles == 2 ? 0x303u : 3u;
      const bool plain = (mapped & kAll) == kAll && block >= common_begin && block + kKeyTiles <= common_end;
      [[maybe_unused]] bool finite = true;
      if (!plain || rule.modified || this->ValuesAreNotFinite()) {
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) finite &= LookAt(tiles[t], block + t, mapped >> 8 * t & 3u, s[t]);
      }
      uint32_t p[kKeyTiles][kColumns][2];
      this->Softmax(tiles, s, p);
      if (!Base::kFp8 || finite) {
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) this->MultiplyValues(tiles[t], p[t]);
      }
      __syncwarp();
      if (lane == 0) Arrive(&shared.empty[place.slot]);
      place.Next();
    }
  }
};

}  // namespace turboattn::decode

#endif  // TURBOATTN_KERNELS_DECODE_MAINLOOP_SM90_CUH_

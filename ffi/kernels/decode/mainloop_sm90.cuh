// The decode mainloop of the sm90 family: one warp of a block copies keys into a ring that the others empty, from part
// to part of the block's work without a stop. The products' warps spend no instructions on addresses, pages and ranges,
// and take two tiles of 16 keys a step, whose chains of dependent instructions hide each other.
#ifndef TURBOATTN_KERNELS_DECODE_MAINLOOP_SM90_CUH_
#define TURBOATTN_KERNELS_DECODE_MAINLOOP_SM90_CUH_

#include <cstdint>

#include "kernels/common/ptx_sm90.cuh"
#include "kernels/decode/mainloop_sm80.cuh"
#include "kernels/decode/products.cuh"
#include "kernels/decode/traits.h"

namespace turboattn::decode {

// A part of a unit, as the copying warp found it. b < 0: the block has no more.
struct Part {
  int b;
  int head, first_row, rows;    // of the unit
  int first_block, num_blocks;  // of the unit's blocks
  int new_block;                // the first of these that may have a new row, if there are so many
  int64_t position, offset;     // in the list, and in the sequence's share
  Share share;
  SequenceView view;
  BlockList<kDecodeKeys> blocks;

  // A sequence without a key to see has one block in the list and none to copy.
  __device__ int Keyed() const { return blocks.total() == 0 ? 0 : num_blocks; }
};

constexpr int kParts = 2;  // the one that is multiplied and the next

template <class Traits>
struct SharedSm90 {
  static constexpr int kDim = Traits::kDim, kSteps = Traits::kSteps;

  alignas(128) unsigned char tile[kSteps][2][Traits::kArrayBytes];
  alignas(128) uint32_t row_params[kSteps][2][Traits::kParamBytes > 0 ? Traits::kStepKeys : 1];
  alignas(128) typename Traits::E query_tile[Traits::kRows * kDim];
  alignas(16) SinCos pair_turns[kDim / 2];
  alignas(16) float warp_rows[kWarps][kDim];
  uint64_t full[kSteps], empty[kSteps];  // of the ring
  uint64_t found[kParts], done[kParts];
  uint64_t stored;          // the part's new rows
  uint32_t mapped[kSteps];  // a bit for each group of 8 keys
  WarpState<Traits> states;
  TileRows<Traits::kRows> rows;
  CodeQuery<Traits::kRows> code_query;
  WorkList list;
  int last_parts;  // see SharedSm80
  Part parts[kParts];

  __device__ typename Traits::E* query() { return query_tile; }
  __device__ SinCos* turns() { return pair_turns; }
  __device__ float* new_row() { return warp_rows[threadIdx.x / kWarp]; }
};

enum WaitName { kWaitFull = 1, kWaitEmpty, kWaitFound, kWaitDone, kWaitStored, kWaitOutputs };  // for debugging

// The copying warp. Each lane looks up one of 32 groups of 8 keys, and copies one chunk of every kRowsPerCopy-th row.
// cp.async: tensor copies of the same tiles were no faster for pages of 64 keys, and took a quarter more for 16 (int4).
template <class Traits>
struct CopierSm90 {
  static constexpr int kSteps = Traits::kSteps, kStoredChunks = Traits::kStoredChunks, kKeyTiles = Traits::kKeyTiles;
  static constexpr bool kRowParams = kHasRowParams<Traits::kKvDType>;
  static constexpr int kRowsPerCopy = kWarp / kStoredChunks, kGroupBytes = 8 * Traits::kStoredBytes;
  static constexpr int kGroups = kDecodeKeys / 8, kBatch = kWarp / kGroups;  // of a block; blocks looked up together
  static_assert(kRowsPerCopy <= 8 && kBatch % kKeyTiles == 0);

  const PagedAttentionParams& params;
  const CallFacts& facts;
  SharedSm90<Traits>& shared;
  const int lane = threadIdx.x % kWarp;
  const char* copy_from[2];  // of K and V, of group 0
  const char* params_from;
  uint32_t copy_to;  // in the ring's first step
  RingSlot<kSteps> place{0};
  uint32_t stored_phase = 0;

  __device__ CopierSm90(const PagedAttentionParams& params, const CallFacts& facts, SharedSm90<Traits>& shared)
      : params(params), facts(facts), shared(shared) {
    const int row = lane / kStoredChunks, chunk = lane % kStoredChunks, from = row * Traits::kStoredBytes + chunk * 16;
    copy_from[0] = static_cast<const char*>(params.cache.key) + from;
    copy_from[1] = static_cast<const char*>(params.cache.value) + from;
    params_from = static_cast<const char*>(lane < 16 ? params.cache.key_params : params.cache.value_params);
    copy_to = Opaque(SharedAddress(shared.tile) + SwizzledChunk<kStoredChunks>(row, chunk) * 16);
  }

  // What the table has for the lane's group of block `block` of the part; -1: no row sees it.
  __device__ int32_t Entry(const Part& part, const int32_t* own_pages, int block) const {
    if (block >= part.Keyed()) return -1;
    if (facts.plain) {
      const int j = (part.first_block + block) * kDecodeKeys + lane % kGroups * 8;
      return j < part.blocks.seen[kOwnRun].hi ? own_pages[j >> facts.page_shift] : -1;
    }
    const int run = part.blocks.RunOf(part.first_block + block);
    const int j = part.blocks.FirstKey(part.first_block + block) + lane % kGroups * 8;
    if (!part.blocks.seen[run].Meets(j, 8)) return -1;
    return (run == kOwnRun ? own_pages : params.seqs.prefix_pages)[j >> facts.page_shift];
  }

  // Then leaves out places for the warps' outputs.
  __device__ void CopyPart(const Part& part) {
    const unsigned b = part.b;
    const int32_t layer = params.seqs.layer[b];
    const int32_t* own_pages = params.seqs.page_table + uint64_t{b} * static_cast<unsigned>(params.seqs.max_pages);
    const int num_blocks = part.Keyed();
    bool waits = params.append.key != nullptr;  // for the part's new rows: every part has a phase
    int32_t entry = Entry(part, own_pages, lane / kGroups);
#pragma unroll 1
    for (int base = 0; base < num_blocks; base += kBatch) {
      const int j = part.blocks.FirstKey(part.first_block + base + lane / kGroups) + lane % kGroups * 8;
      const int group = GroupOfPage(params, facts, layer, entry, part.head, j);
      const uint32_t mapped = __ballot_sync(~0u, group != kNoGroup);
      entry = Entry(part, own_pages, base + kBatch + lane / kGroups);
#pragma unroll 1
      for (int block = base; block < min(base + kBatch, num_blocks); block += kKeyTiles) {
        if (waits && block + kKeyTiles > part.new_block) {
          WaitStored();
          waits = false;
        }
        WaitBarrier(&shared.empty[place.index], place.parity ^ 1, kWaitEmpty);
        if (lane == 0) {
          shared.mapped[place.index] = mapped >> (block - base) * kGroups;
          Arrive(&shared.full[place.index]);
        }
        // A part of an odd number of blocks ends with a block of zeros.
#pragma unroll 1
        for (int t = 0; t < kKeyTiles; ++t) {
          CopyBlock(part, block + t, t, group, (block + t - base) * kGroups, mapped);
        }
        ArriveAfterCopies(&shared.full[place.index]);
        place.Advance();
      }
    }
    if (waits) WaitStored();
#pragma unroll 1
    for (int i = 0; i < Traits::kOutputSteps; ++i) {
      WaitBarrier(&shared.empty[place.index], place.parity ^ 1, kWaitOutputs);
      if (lane == 0) Arrive(&shared.full[place.index]);
      ArriveAfterCopies(&shared.full[place.index]);
      place.Advance();
    }
  }

  // A block whose groups the lanes from first_lane on have, to be tile t of the step.
  __device__ void CopyBlock(const Part& part, int block, int t, int group, int first_lane, uint32_t mapped) {
    const int run = part.blocks.RunOf(part.first_block + block);
    const int first_key = part.blocks.FirstKey(part.first_block + block);
    const RunRange seen = part.blocks.seen[run];
    const uint32_t to = copy_to + place.index * (2 * Traits::kArrayBytes) + t * (kDecodeKeys * Traits::kStoredBytes);
    if ((mapped >> first_lane & 0xffu) == 0xffu && seen.HoldsAll(first_key, kDecodeKeys)) {
      Copy(to, group, first_lane, [](int, int) { return true; });
      if constexpr (kRowParams) {
        // 4 keys a lane.
        const int of_lane = __shfl_sync(~0u, group, first_lane + lane % 16 / 2);
        CopyAsync16(SharedAddress(&shared.row_params[place.index][lane / 16][t * kDecodeKeys + lane % 16 * 4]),
                    params_from + static_cast<int64_t>(of_lane) * 32 + lane % 2 * 16, true);
      }
    } else {
      const auto exists = [&](int row, int of_row) { return of_row != kNoGroup && seen.Holds(first_key + row); };
      Copy(to, group, first_lane, exists);
      if constexpr (kRowParams) {
#pragma unroll 1
        for (int row = lane % 16; row < kDecodeKeys; row += 16) {
          const int of_row = __shfl_sync(~0u, group, first_lane + row / 8);
          const bool valid = exists(row, of_row);
          CopyAsync4(SharedAddress(&shared.row_params[place.index][lane / 16][t * kDecodeKeys + row]),
                     valid ? params_from + static_cast<int64_t>(of_row) * 32 + row % 8 * 4 : params_from, valid);
        }
      }
    }
  }

  // Zeros in place of rows that do not exist: exists(row of the block, its group).
  template <class Exists>
  __device__ void Copy(uint32_t to, int group, int first_lane, Exists exists) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int of_group = __shfl_sync(~0u, group, first_lane + g);
#pragma unroll
      for (int kv = 0; kv < 2; ++kv) {
        const char* from = copy_from[kv] + static_cast<int64_t>(of_group) * kGroupBytes;
#pragma unroll
        for (int r = 0; r < 8; r += kRowsPerCopy) {
          const bool valid = exists(8 * g + r + lane / kStoredChunks, of_group);
          // Rows of 8 chunks and more: the low bits of a row's number turn the chunk's around.
          const uint32_t turned = kStoredChunks >= 8 ? to ^ (r * 16) : to;
          CopyAsync16(turned + kv * Traits::kArrayBytes + (8 * g + r) * Traits::kStoredBytes,
                      valid ? from + r * Traits::kStoredBytes : static_cast<const char*>(params.cache.key), valid);
        }
      }
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
  using Base::kRowParams, Base::params, Base::rule, Base::lane, Base::warp;
  static constexpr int kSteps = Traits::kSteps, kKeyTiles = Traits::kKeyTiles, kColumns = Traits::kColumns;

  SharedSm90<Traits>& shared;
  const Part& part;
  RingSlot<kSteps>& place;
  const bool rows_differ;        // in what they see
  int common_begin, common_end;  // blocks of the part whose keys of this warp all rows see, in the sequence's own run
  uint32_t fragment;             // ldmatrix: chunk 0 or 1 of a row of K in the ring's first step

  __device__ MainloopSm90(const PagedAttentionParams& params, SharedSm90<Traits>& shared, const Part& part,
                          RingSlot<kSteps>& place)
      : Base(params, shared, part.b, part.head),
        shared(shared),
        part(part),
        place(place),
        rows_differ(part.share.q_len > 1 || part.view.has_tree) {
    const RunRange common = part.blocks.common[kOwnRun];
    const int first = part.blocks.first[kOwnRun] + part.first_block - part.blocks.count[0];
    const int lo = static_cast<int>((common.lo + (kWarpKeys - 1u)) / kWarpKeys), hi = common.hi / kWarpKeys;
    common_begin = ::max(((lo - warp + kWarps - 1) >> 2) - first, part.blocks.count[0] - part.first_block);
    common_end = ((hi - warp - 1) >> 2) - first + 1;
    static_assert(kWarps == 4);
    fragment = Opaque(SharedAddress(shared.tile) + warp * Traits::kTileBytes +
                      SwizzledChunk<Traits::kStoredChunks>(lane % 16, lane / 16) * 16);
  }

  // A tile with keys that some row may not see, or scores to be modified. False: fp8, no value of the head is finite.
  __device__ bool LookAt(const WarpTile& tile, int block, uint32_t groups, float (&s)[kColumns][4]) {
    const KeyBlockView view = BlockViewOf(params, part.view, part.blocks, part.first_block + block, warp, groups);
    const bool partial = groups != 3u || block < common_begin || block >= common_end;
    if (partial || rule.modified) this->ModifyAndMask(view, partial, s);
    const bool look = (partial && rows_differ) || this->ValuesAreNotFinite();
    if (!look) return true;
    if constexpr (kRowParams) {
      this->TakeOutRows(view, tile);
      return true;
    } else {
      return this->TakeOutElements(view, tile);
    }
  }

  // After TakeQuery().
  __device__ void Run() {
    this->Reset();
    const int num_blocks = part.Keyed();
#pragma unroll 1
    for (int block = 0; block < num_blocks; block += kKeyTiles) {
      // The step before: at its end, the arrival was moved before products whose operands were still on their way.
      if (block > 0) Release(place.index == 0 ? kSteps - 1 : place.index - 1);
      const int slot = place.index;
      WarpTile tiles[kKeyTiles];
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t) {
        const int row = t * kDecodeKeys + warp * kWarpKeys, of_row = kRowParams ? row : 0;
        const uint32_t key = fragment + slot * (2 * Traits::kArrayBytes) + t * kDecodeKeys * Traits::kStoredBytes;
        tiles[t] = {key,
                    key + Traits::kArrayBytes,
                    shared.tile[slot][1] + row * Traits::kStoredBytes,
                    {&shared.row_params[slot][0][of_row], &shared.row_params[slot][1][of_row]}};
      }
      WaitBarrier(&shared.full[slot], place.parity, kWaitFull);
      const uint32_t mapped = shared.mapped[slot] >> 2 * warp;  // two bits for each tile
      uint32_t value_params[kKeyTiles][2];
      this->LoadValueParams(tiles, value_params);  // early: under copies, shared memory is slow to answer
      float s[kKeyTiles][kColumns][4] = {};
      this->MultiplyKeys(tiles, s);
      constexpr uint32_t kAll = 0x303u;
      static_assert(kKeyTiles == 2 && kDecodeKeys == 64);
      const bool plain = (mapped & kAll) == kAll && block >= common_begin && block + kKeyTiles <= common_end;
      bool has_values = true;
      if (!plain || rule.modified || this->ValuesAreNotFinite()) {
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) has_values = LookAt(tiles[t], block + t, mapped >> 8 * t & 3u, s[t]);
        this->LoadValueParams(tiles, value_params);
      }
      uint32_t p[kKeyTiles][kColumns][2];
      this->Softmax(value_params, s, p);
      if (!Base::kFp8 || has_values) {
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) this->MultiplyValues(tiles[t], p[t]);
      }
      place.Advance();
    }
    if (num_blocks > 0) Release(place.index == 0 ? kSteps - 1 : place.index - 1);
  }

  __device__ void Release(int slot) {
    __syncwarp();
    if (lane == 0) Arrive(&shared.empty[slot]);
  }
};

}  // namespace turboattn::decode

#endif  // TURBOATTN_KERNELS_DECODE_MAINLOOP_SM90_CUH_

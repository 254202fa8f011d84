// The decode mainloop of the sm80 family: one warp, 16 keys a step (see products.cuh), its own cp.async ring.
#ifndef TURBOATTN_KERNELS_DECODE_MAINLOOP_SM80_CUH_
#define TURBOATTN_KERNELS_DECODE_MAINLOOP_SM80_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/common/fp8.cuh"
#include "kernels/common/int4.cuh"
#include "kernels/common/int8.cuh"
#include "kernels/common/ptx.cuh"
#include "kernels/common/query_tile.cuh"
#include "kernels/common/score.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/decode/products.cuh"
#include "kernels/decode/traits.h"

namespace turboattn::decode {

// A warp's ring: K and V of 16 keys a step, and their (scale, zero) pairs.
template <class Traits>
struct RingSm80 {
  alignas(Traits::kStoredBytes < 128 ? 128
                                     : Traits::kStoredBytes) unsigned char tile[Traits::kSteps][2][Traits::kTileBytes];
  uint32_t row_params[Traits::kSteps][2][kHasRowParams<Traits::kKvDType> ? kWarpKeys : 1];
};

// What the blocks of a cluster send each other: [part][quads of four columns that the block finishes], rows with one
// more quad than that, so that parts lie in different banks.
constexpr int kMaxCluster = 16;
template <class Traits>
struct ClusterParts {
  static constexpr int kQuads = Traits::kRows * Traits::kDim / 4 + kMaxCluster;
  float4 x[kQuads];
  float2 state[kQuads];  // max, sum
};

// A sequence's share of the flat list.
struct Share {
  int first_token, q_len;
  int kv_len;    // plain calls
  int blocks;    // of a unit, at least 1
  int units;     // kv heads x tiles of rows
  int64_t cost;  // length in the list: of all units, see Places()
  // Fixed parts.
  int part_blocks;     // of a part
  int parts;           // of a unit
  int64_t first_slot;  // of the first unit's first part: each has its slot

  // Of a unit in the list, whose start takes so many.
  __device__ int Places(int start) const { return start + blocks; }
  __device__ int64_t Slots() const { return int64_t{units} * parts; }
};

// Which keys a part has.
struct PartPlace {
  int unit;   // of the sequence
  int block;  // the first, of the unit
  int count;  // of blocks
};

// A unit that a block shares with others, when its part is done.
struct OpenUnit {
  enum State {
    kNone,    // there is none
    kHere,    // the part is in its slot of the workspace
    kLeft,    // and the block has arrived: it is for others to merge
    kMerges,  // and was the last
  };
  int rows;
  int first_token;
  int head;       // kv head
  int first_row;  // row of the sequence, 32 bits: decode sequences are short
  int owner;      // the block that has the unit's first part
  int parts;      // by which others know when they are the last; 0: the owner says it
  State state;
};
struct OpenUnits {
  OpenUnit unit[2];  // what the block goes on with, and what it leaves to the next one
  int first_owner;   // the block in which the first of them begins; -1: the list says it
};

// The last step of each ring is empty until the first has been multiplied. By then the query is in registers: until
// then it lies there, where it fits; turns and the new rows of a fused step pass through other rings'.
template <class Traits>
struct SharedSm80 {
  static constexpr int kQueryElements = Traits::kRows * Traits::kDim, kStepBytes = 2 * Traits::kTileBytes;
  static constexpr bool kQueryInRing =
      Traits::kQueryInRegisters && kQueryElements * sizeof(typename Traits::E) <= kStepBytes;
  static_assert(kWarps * Traits::kDim * sizeof(float) <= kStepBytes);

  union {
    RingSm80<Traits> rings[kWarps];
    struct {
      WarpOutput<Traits> outputs[kWarps];
      WarpState<Traits> states;
      alignas(16) ClusterParts<Traits> parts;
    };
  };
  alignas(128) typename Traits::E query_apart[kQueryInRing ? 8 : kQueryElements];
  TileRows<Traits::kRows> rows;
  CodeQuery<Traits::kQuantised ? Traits::kRows : 1> code_query;
  WorkList list;
  int last_parts;  // of the unit that goes on in the next block, if it begins in this one; 0: the list says it
  // The place that is worked on, where the block's end, the sequence, and where in its share.
  int64_t position, end;
  int b;  // -1: there is none
  int64_t offset;
  PartPlace at;
  Share share;
  SequenceView view;
  BlockList<kDecodeKeys> blocks;
  std::conditional_t<Traits::kMerges, OpenUnits, char> open;

  __device__ typename Traits::E* query() {
    if constexpr (kQueryInRing) {
      return reinterpret_cast<typename Traits::E*>(rings[0].tile[Traits::kSteps - 1]);
    } else {
      return query_apart;
    }
  }
  // Where all rows are of one token: the turns of its pairs.
  __device__ SinCos* turns() {
    static_assert(Traits::kDim / 2 * sizeof(SinCos) <= kStepBytes);
    return reinterpret_cast<SinCos*>(rings[2].tile[Traits::kSteps - 1]);
  }
  // kDim floats of a warp's own.
  __device__ float* new_row() {
    return reinterpret_cast<float*>(rings[1].tile[Traits::kSteps - 1]) + threadIdx.x / kWarp * Traits::kDim;
  }
};

// What a part's first loads wait for: its sequence's layer, and what the page table has for the first steps. Before all
// else that a part begins with, which is worked out while these are on their way.
struct FirstEntries {
  int32_t layer;
  const int32_t* own_pages;
  int32_t entry = 0;  // see MainloopSm80::LookUp
  bool present = false;

  __device__ FirstEntries(const PagedAttentionParams& params, const CallFacts& facts,
                          const BlockList<kDecodeKeys>& blocks, int b, int kv_len, int first_block, int num_blocks) {
    const unsigned lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
    layer = params.seqs.layer[static_cast<unsigned>(b)];
    own_pages = params.seqs.page_table +
                static_cast<uint64_t>(static_cast<unsigned>(b)) * static_cast<unsigned>(params.seqs.max_pages);
    if (lane / 2 >= num_blocks) return;
    const int block = first_block + static_cast<int>(lane / 2);
    const int of_block = static_cast<int>(warp * kWarpKeys + lane % 2 * 8);
    if (facts.plain) {
      const int j = block * kDecodeKeys + of_block;
      present = j < kv_len && j < facts.max_keys;
      if (present) entry = own_pages[j >> facts.page_shift];
    } else {
      const int run = blocks.RunOf(block), j = blocks.FirstKey(block) + of_block;
      present = blocks.seen[run].Meets(j, 8);
      if (present) entry = (run == kOwnRun ? own_pages : params.seqs.prefix_pages)[j >> facts.page_shift];
    }
  }
};

template <class Traits>
struct MainloopSm80 : WarpProducts<Traits> {
  using Base = WarpProducts<Traits>;
  using Base::kRowParams, Base::kStoredChunks, Base::kFp8;
  using Base::params, Base::rule, Base::lane, Base::warp;
  static constexpr int kSteps = Traits::kSteps;
  static constexpr int kLookUp = 16;  // steps whose two groups of 8 keys the 32 lanes look up together
  static_assert(kSteps <= kLookUp);

  RingSm80<Traits>& ring;
  const SequenceView& view;
  const BlockList<kDecodeKeys>& blocks;
  const CallFacts& facts;
  const int head;         // kv head
  const int first_block;  // of this part of the unit
  const int num_blocks;
  const bool rows_differ;        // in what they see
  int common_begin, common_end;  // steps whose keys of this warp all rows see, in the sequence's own run

  // A lane copies one chunk of every kRowsPerCopy-th row; a copy takes both groups, one, or part of one.
  static constexpr int kRowsPerCopy = 32 / kStoredChunks, kStepBytes = 2 * Traits::kTileBytes;
  const char* copy_from[2];  // of K and V, of group 0
  const char* params_from;
  uint32_t copy_to;  // in the first step of the ring
  // ldmatrix: chunk 0 or 1 of a row of K and of V in the first step. Two chunks on is at ^ 32.
  uint32_t key_fragment, value_fragment;

  const int32_t layer;
  const int32_t* const own_pages;
  int32_t next_entry;
  bool next_present;
  int group = kNoGroup;
  uint32_t mapped = 0;  // two bits a step, one a group: of the step that is multiplied, the next, ... the last loaded

  __device__ MainloopSm80(const PagedAttentionParams& params, const CallFacts& facts, SharedSm80<Traits>& shared,
                          const FirstEntries& entries, int b, int head, int first_block, int num_blocks,
                          bool rows_differ)
      : Base(params, shared, b, head),
        ring(shared.rings[threadIdx.x / 32]),
        view(shared.view),
        blocks(shared.blocks),
        facts(facts),
        head(head),
        first_block(first_block),
        num_blocks(num_blocks),
        rows_differ(rows_differ),
        layer(entries.layer),
        own_pages(entries.own_pages),
        next_entry(entries.entry),
        next_present(entries.present) {
    // Step s, if it is of the own run, has the warp's keys number kWarps * (first + s) + warp, in units of kWarpKeys.
    const RunRange common = blocks.common[kOwnRun];
    const int first = blocks.first[kOwnRun] + first_block - blocks.count[0];
    const int lo = static_cast<int>((common.lo + (kWarpKeys - 1u)) / kWarpKeys), hi = common.hi / kWarpKeys;
    common_begin = ::max(((lo - warp + kWarps - 1) >> 2) - first, blocks.count[0] - first_block);
    common_end = ((hi - warp - 1) >> 2) - first + 1;
    static_assert(kWarps == 4);
    const int r0 = lane / kStoredChunks, chunk = lane % kStoredChunks;
    const int copied = r0 % 8 * Traits::kStoredBytes + chunk * 16;
    copy_from[0] = static_cast<const char*>(params.cache.key) + copied;
    copy_from[1] = static_cast<const char*>(params.cache.value) + copied;
    params_from =
        static_cast<const char*>(lane < kWarpKeys ? params.cache.key_params : params.cache.value_params) + lane % 8 * 4;
    const uint32_t tiles = SharedAddress(ring.tile);
    copy_to = Opaque(tiles + SwizzledChunk<kStoredChunks>(r0, chunk) * 16);
    key_fragment = Opaque(tiles + SwizzledChunk<kStoredChunks>(lane % 16, lane / 16) * 16);
    value_fragment = Traits::kQuantised
                         ? key_fragment
                         : Opaque(tiles + SwizzledChunk<kStoredChunks>(lane / 16 * 8 + lane % 8, lane / 8 % 2) * 16);
  }

  // ---- loading

  __device__ int FirstKey(int step) const { return blocks.FirstKey(first_block + step) + warp * kWarpKeys; }

  // Reads the page table for steps base .. base + 15, two lanes a step, long before the keys are loaded.
  __device__ void LookUp(int base) {
    const int step = base + lane / 2;
    next_present = false;
    if (step >= num_blocks) return;
    const int run = blocks.RunOf(first_block + step), j = FirstKey(step) + lane % 2 * 8;
    const RunRange seen = blocks.seen[run];
    next_present = seen.Meets(j, 8);
    if (next_present) next_entry = (run == kOwnRun ? own_pages : params.seqs.prefix_pages)[j >> facts.page_shift];
  }

  // K and V of a step into the ring, or nothing past the last step; one group of copies either way.
  __device__ void Load(int step) {
    mapped >>= 2;
    if (step < num_blocks) {
      if (static_cast<unsigned>(step) % kLookUp == 0) {
        group = next_present
                    ? GroupOfPage(params, facts, layer, next_entry, head, FirstKey(step + lane / 2) + lane % 2 * 8)
                    : kNoGroup;
        LookUp(step + kLookUp);
      }
      const int local = static_cast<unsigned>(step) % kLookUp * 2;
      const int groups[2] = {__shfl_sync(~0u, group, local), __shfl_sync(~0u, group, local + 1)};
      if (groups[0] != kNoGroup) mapped |= 1u << (2 * kSteps - 2);
      if (groups[1] != kNoGroup) mapped |= 1u << (2 * kSteps - 1);
      if (groups[0] != kNoGroup && groups[1] != kNoGroup && IsCommon(step)) {
        Copy(step, groups, [](int, int) { return true; });
      } else {
        const RunRange seen = blocks.seen[blocks.RunOf(first_block + step)];
        const int first_key = FirstKey(step);
        Copy(step, groups, [&](int r, int g) { return g != kNoGroup && seen.Holds(first_key + r); });
      }
    }
    CommitCopies();
  }

  // Whether all rows see all of the warp's keys of a step, mapped or not.
  __device__ bool IsCommon(int step) const { return step >= common_begin && step < common_end; }

  // Rows of two groups; zeros in place of those that do not exist: exists(row of the step, its group).
  template <class Exists>
  __device__ void Copy(int step, const int (&groups)[2], Exists exists) {
    constexpr int kGroupBytes = 8 * Traits::kStoredBytes;
    const int r0 = lane / kStoredChunks;
    const uint32_t to = copy_to + step % kSteps * kStepBytes;
#pragma unroll
    for (int kv = 0; kv < 2; ++kv) {
      const char* from[2];  // the first row of each group that this lane copies
#pragma unroll
      for (int h = 0; h < 2; ++h) from[h] = copy_from[kv] + static_cast<int64_t>(groups[h]) * kGroupBytes;
#pragma unroll
      for (int i = 0; i < kWarpKeys / kRowsPerCopy; ++i) {
        const int h = kRowsPerCopy > 8 ? r0 / 8 : i * kRowsPerCopy / 8, r = i * kRowsPerCopy + r0;
        const char* address = (h == 0 ? from[0] : from[1]) + i * kRowsPerCopy % 8 * Traits::kStoredBytes;
        const bool valid = exists(r, h == 0 ? groups[0] : groups[1]);
        // Rows of 8 chunks and more: the low bits of a row's number turn the chunk's around.
        const uint32_t turned = kStoredChunks >= 8 ? to ^ (i * kRowsPerCopy % 8 * 16) : to;
        CopyAsync16(turned + kv * Traits::kTileBytes + i * kRowsPerCopy * Traits::kStoredBytes,
                    valid ? address : static_cast<const char*>(params.cache.key), valid);
      }
    }
    if constexpr (kRowParams) {
      const int r = lane % kWarpKeys, g = r < 8 ? groups[0] : groups[1];
      const bool valid = exists(r, g);
      CopyAsync4(SharedAddress(&ring.row_params[step % kSteps][lane / kWarpKeys][r]),
                 valid ? params_from + static_cast<int64_t>(g) * 32 : params_from, valid);
    }
  }

  // take_query() leaves the query in place by TakeQuery(), and what is loaded from step `new_step` on
  // in memory: once, with a ring full of loads on their way, or those of the steps before new_step. The first loads and
  // those of the loop are one piece of code: it takes longer to arrive than to run.
  template <class TakeQuery>
  __device__ void Run(int new_step, TakeQuery take_query) {
    const int query_step = ::min(::max(new_step, 0) - (kSteps - 1), 0);  // max: of the rows, is a member
#pragma unroll 1
    for (int step = 1 - kSteps; step < num_blocks || step <= 0; ++step) {
      if (step == query_step) {
        take_query();
        this->Reset();
      }
      WaitCopies<kSteps - 2>();
      __syncwarp();
      Load(step + kSteps - 1);
      if (step < 0 || num_blocks == 0) continue;
      const int slot = step % kSteps;
      const uint32_t from = slot * kStepBytes;
      const WarpTile tiles[1] = {{key_fragment + from,
                                  value_fragment + from + Traits::kTileBytes,
                                  ring.tile[slot][1],
                                  {ring.row_params[slot][0], ring.row_params[slot][1]}}};
      float s[1][Traits::kColumns][4] = {};
      this->MultiplyKeys(tiles, s);
      const uint32_t groups = mapped & 3u;
      const bool partial = groups != 3u || !IsCommon(step);
      const auto block = [&] { return BlockViewOf(params, view, blocks, first_block + step, warp, groups); };
      if (partial || rule.modified) this->ModifyAndMask(block(), partial, s[0]);
      const bool look = (partial && rows_differ) || this->ValuesAreNotFinite();
      if constexpr (kRowParams) {
        if (look) this->TakeOutRows(block(), tiles[0]);
      }
      uint32_t value_params[1][2], p[1][Traits::kColumns][2];
      this->LoadValueParams(tiles, value_params);
      this->Softmax(value_params, s, p);
      if constexpr (kRowParams) {
        this->MultiplyValues(tiles[0], p[0]);
      } else {
        if (!look || this->TakeOutElements(block(), tiles[0])) this->MultiplyValues(tiles[0], p[0]);
      }
    }
    WaitCopies<0>();
  }
};

}  // namespace turboattn::decode

#endif  // TURBOATTN_KERNELS_DECODE_MAINLOOP_SM80_CUH_

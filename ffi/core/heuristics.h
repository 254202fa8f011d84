// How a call is cut up, from sizes that are known when it is compiled. Pure functions: a test needs no GPU, and the
// workspace that XLA allocates for a call depends on nothing else.
#ifndef TURBOATTN_CORE_HEURISTICS_H_
#define TURBOATTN_CORE_HEURISTICS_H_

#include <cstdint>

namespace turboattn {

// Query rows of one kv head are (token, head of the group) pairs: a sequence of q_len tokens has q_len * H/K of them.
struct PagedShape {
  int64_t batch = 0;          // B
  int64_t num_tokens = 0;     // T
  int64_t uniform_q_len = 0;  // Q; 0: packed, lengths are known on the device only
  int64_t num_heads = 0;      // H
  int64_t num_kv_heads = 0;   // K
  int64_t value_dim = 0;      // Dv
  int64_t max_keys = 0;       // keys that a sequence can have on this rank: M * P, and those of a shared prefix
  bool batch_invariant = false;
  bool has_decode = true;  // there is a decode kernel of these dims; else prefill takes every sequence
};

// Decode work is a flat list of (sequence, kv head, tile of rows) units over their key blocks. A part of a unit's keys
// leaves a partial result in a slot of the workspace, and a second kernel merges the slots of a unit in order.
struct PagedPlan {
  bool runs_decode = false;
  bool runs_prefill = false;
  // Decode takes sequences of at most this many query tokens, prefill the longer ones.
  int64_t decode_q_len = 0;
  bool decode_appends = false;  // a fused step's new keys and values are stored by decode, not by a kernel before it
  int row_tile = 8;             // rows of a decode unit: 8 or 16
  int64_t slots = 0;            // partial results that the workspace holds
  // Where the card has clusters: one for each unit, of so many blocks. 0: all blocks share a list of work.
  int64_t decode_units = 0;
  int decode_cluster = 0;
  // Prefill cuts the keys of its tiles in parts where there are too few tiles to fill a card. sm80 in as many as this
  // says; sm90 finds the tiles that are too long on the device, and is told how many parts the workspace holds.
  int prefill_splits = 1;
  int64_t prefill_tiles = 0;   // sm80's, of all kv heads, at most
  int64_t prefill_parts = 0;   // sm90's: kMaxPrefillParts; 0: keys stay whole
  int64_t prefill_offset = 0;  // bytes in the workspace
  int64_t workspace_bytes = 0;
};

// Blocks of a decode grid never exceed this, whatever the card: the workspace holds two partial results of each.
constexpr int64_t kMaxDecodeBlocks = 512;

// One sequence that cannot be long: a cluster has a unit's keys and merges them in its own shared memory, if that makes
// kMinClusterBlocks to kMaxClusterBlocks blocks, one or two for each SM of a card with clusters. Else, and where
// lengths may differ, the units' blocks of keys are one list.
constexpr int64_t kMinClusterBlocks = 128, kMaxClusterBlocks = 264;
constexpr int64_t kMaxClusterKeys = 16384;  // a list of two blocks an SM reads faster: 32768 keys 42 us, clusters 46

// Where decode appends, each unit that reads a new key stores it: a sequence with more rows than fit a unit has its
// tokens stored again for each of its units. Calls of more tokens than this launch append first: one sequence that has
// them all would lose more to that than a launch costs.
constexpr int64_t kMaxDecodeAppends = 128;

constexpr int kDecodeKeys = 64;  // keys a block of the flat list

// A schedule is int32[kMaxDecodeBlocks, kScheduleInts]: where each block of a decode grid starts in the flat list.
constexpr int64_t kScheduleInts = 8;

// batch_invariant: keys are cut at multiples of InvariantSplit(keys of the sequence), a multiple of kInvariantSplit, in
// at most kMaxInvariantSplits parts; it depends on the sequence alone.
constexpr int64_t kInvariantSplit = 1024;
constexpr int64_t kMaxInvariantSplits = 32;

#if defined(__CUDACC__)
__host__ __device__
#endif
    constexpr int64_t InvariantSplit(int64_t keys) {
  const int64_t parts = kInvariantSplit * kMaxInvariantSplits;
  return kInvariantSplit * (keys > parts ? (keys + parts - 1) / parts : 1);
}

// The workspace: int64 number of slots in use; at kWorkspaceHeader, int32[slots, kSlotInts] that describe them; then
// float O[row_tile, Dv], max[row_tile], sum[row_tile] of each slot.
constexpr int64_t kWorkspaceHeader = 128;  // bytes
constexpr int64_t kSlotInts = 8;

// (token, head of the group) rows of a prefill tile of either family.
#if defined(__CUDACC__)
__host__ __device__
#endif
    constexpr int PrefillRows(int64_t value_dim) {
  return value_dim <= 128 ? 128 : 64;
}
constexpr int PrefillRowsSm90(int64_t value_dim) { return value_dim <= 64 ? 192 : 128; }

// Tiles of one kv head: exact for sequences of one length, else what disjoint ranges of rows can make: a sequence has
// at most one tile that is not full, with one row or more, and is longer than `skipped` tokens.
#if defined(__CUDACC__)
__host__ __device__
#endif
    constexpr int64_t PrefillTiles(int64_t batch, int64_t num_tokens, int64_t uniform_q_len, int64_t group,
                                   int64_t rows, int64_t skipped) {
  if (uniform_q_len > 0) return batch * ((uniform_q_len * group + rows - 1) / rows);
  const int64_t sequences = num_tokens / (skipped + 1);
  return (num_tokens * group + (sequences < batch ? sequences : batch) * (rows - 1)) / rows;
}

// sm90 cuts long tiles in up to four pieces for each SM of the largest card of compute capability 9.0, so that 100
// tiles, say, can be shared out too (kernels/prefill/pieces.h). They are fewer than two for each SM. sm80 cuts no more
// tiles.
constexpr int kPrefillSms = 132;
constexpr int64_t kMaxPrefillParts = 4 * kPrefillSms, kMaxCutTiles = 2 * kPrefillSms;

// At prefill_offset: int32[kSplitInts], int32[kMaxCutTiles, kTileInts] that describe the tiles, then for each part
// float O[rows, Dv], max[rows], sum[rows].
constexpr int64_t kSplitInts = 4, kTileInts = 8;

PagedPlan PlanPaged(const PagedShape& shape);

}  // namespace turboattn

#endif  // TURBOATTN_CORE_HEURISTICS_H_

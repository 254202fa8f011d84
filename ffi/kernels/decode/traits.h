// Compile-time choices of a decode kernel: one row of kernel_matrix.cmake, and the rows of its tiles.
#ifndef TURBOATTN_KERNELS_DECODE_TRAITS_H_
#define TURBOATTN_KERNELS_DECODE_TRAITS_H_

#include "core/params.h"
#include "kernels/common/chunk.cuh"
#include "kernels/decode/tiles.h"
#include "kernels/decode/work_list.h"

namespace turboattn::decode {

// What every thread would otherwise compute from the call: a block's start takes as long as its instructions take to
// arrive, some 35 cycles each.
struct CallFacts {
  int group;               // query heads of a kv head
  int decode_q_len;        // see PagedPlan
  int max_keys;            // M * P, as far as kv_lens can reach
  int page_shift;          // P = 2^page_shift
  unsigned layers, pages;  // L and N, as far as an int32 can name them
  int cluster_shift;       // a cluster of 2^cluster_shift blocks has a unit to itself; -1: the blocks share a list
  int units;               // of each sequence, in plain calls that are not batch-invariant and whose sequences have as
                           // many tokens, few enough for decode; 0: in others
  int each_thread;         // sequences that a thread of a block looks at, in the list's kernels
  int table_entries;       // B * M, as far as 31 bits hold it
  EvenCut even;
  const int32_t* schedule;  // null: each block finds its part of the list itself
  bool plain;               // the keys are [0, kv_len), and nothing but causality and a tree hides any
  bool same_rope;           // of the query and of new keys
  bool turns, by_table;     // of the query; its turns are given by RopeParams::turns
  bool appends;             // the step's keys and values
};

// kRowTile: (token, head of the group) rows of a unit, 8 or 16: the columns of n8 tiles.
template <DType kEType, DType kKv, int kHeadDim, int kRowTile>
struct TraitsSm80 {
  using E = Element<kEType>;
  static constexpr DType kKvDType = kKv;
  static constexpr bool kQuantised = IsQuantised(kKv);
  static constexpr int kBits = kKv == DType::kInt4 ? 4 : 8;  // of a code; int8 and int4 only
  static constexpr int kDim = kHeadDim;
  static constexpr int kRows = kRowTile;
  static constexpr int kColumns = kRowTile / 8;  // n8 tiles
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kStoredBytes = static_cast<int>(RowBytes(kKv, kDim));  // of a stored row
  static constexpr int kStoredChunks = kStoredBytes / 16;
  static constexpr int kBlocks = kResident<kStoredBytes, kRows, kDim>;
  static constexpr int kSteps = kStages<kStoredBytes, kBlocks>;
  static constexpr int kStart = kStartPlaces<kStoredBytes, kBlocks>;
  static constexpr bool kQueryInRegisters = kDim * kRows <= 2048;  // the rest of them are the output's
  static constexpr int kTileBytes = kWarpKeys * kStoredBytes;
  static constexpr int kKeyTiles = 1;             // of 16 keys, of a warp's step
  static constexpr int kBlockThreads = kThreads;  // of the kernel
  static constexpr bool kSplitsColumns = false;   // of O, among the warps
  static constexpr int kOutputTiles = kDim / 16;  // of O^T, of a warp
  static constexpr bool kMerges = false;          // blocks merge the units that they share, no kernel after this one
  static_assert(kKv == kEType || IsQuantised(kKv));
};

template <class Traits>
struct Merging : Traits {
  static constexpr bool kMerges = true;
};

// sm90, units of 8 rows: a warp beside the others copies blocks of keys for all of them. Codes, two blocks a step. Two
// blocks of 5 warps have 168 registers a thread: one of an SM's four quarters holds three warps.
template <DType kEType, DType kKv, int kHeadDim, int kRowTile>
struct TraitsSm90 : TraitsSm80<kEType, kKv, kHeadDim, kRowTile> {
  using Base = TraitsSm80<kEType, kKv, kHeadDim, kRowTile>;
  using Base::kDim, Base::kRows, Base::kStoredBytes, Base::kThreads;
  static constexpr int kBlockThreads = kThreads + kWarp;
  static constexpr int kBlocks = kResidentSm90;
  static constexpr int kStart = kStartPlaces<kStoredBytes, kBlocks>;
  static constexpr int kKeyTiles = 2;
  static constexpr int kStepKeys = kKeyTiles * kDecodeKeys;
  static constexpr int kArrayBytes = kStepKeys * kStoredBytes;  // K or V of a step
  static constexpr int kParamBytes = kHasRowParams<kKv> ? kStepKeys * 4 : 0;
  static constexpr int kSteps = kRingBytesSm90 / (2 * (kArrayBytes + kParamBytes));
  // At the end of a part the warps' outputs take the place of some steps: so many of them that of one.
  static constexpr int kOutputBytes = kRows * (kDim + 4) * 4;
  static constexpr int kStepOutputs = 2 * kArrayBytes / kOutputBytes < kWarps ? 2 * kArrayBytes / kOutputBytes : kWarps;
  static constexpr int kOutputSteps = (kWarps + kStepOutputs - 1) / kStepOutputs;
  static_assert(IsQuantised(kKv) && kRows == 8 && Base::kQueryInRegisters && kOutputSteps < kSteps);
};

// sm90, units of 16 rows of int4: the warps of a block share values. Each has the probabilities of its own keys and,
// for all keys of a step, a part of O's columns: a quarter of the outputs, so that there are registers for the query.
template <DType kEType, DType kKv, int kHeadDim, int kRowTile>
struct TraitsSm90Columns : TraitsSm80<kEType, kKv, kHeadDim, kRowTile> {
  using Base = TraitsSm80<kEType, kKv, kHeadDim, kRowTile>;
  using Base::kDim, Base::kRows, Base::kStoredBytes, Base::kThreads;
  static constexpr bool kSplitsColumns = true;
  static constexpr int kBlockThreads = kThreads + kWarp;
  static constexpr int kBlocks = kResidentSm90;
  static constexpr int kStart = kStartPlaces<kStoredBytes, kBlocks>;
  static constexpr bool kQueryInRegisters = true;
  static constexpr int kKeyTiles = 2;
  static constexpr int kStepKeys = kKeyTiles * kDecodeKeys;
  static constexpr int kArrayBytes = kStepKeys * kStoredBytes;
  static constexpr int kParamBytes = kStepKeys * 4;
  static constexpr int kSteps = kRingBytesSm90Columns / (2 * (kArrayBytes + kParamBytes));
  static constexpr int kOutputSteps = 0;  // outputs take the place of weights
  static constexpr int kOutputTiles = kDim / 16 / kWarps;
  static constexpr int kOwnChunks = Base::kStoredChunks / kWarps;  // of a value
  static_assert(kHasRowParams<kKv> && kOwnChunks > 0 && kSteps > 1);
};

}  // namespace turboattn::decode

#endif  // TURBOATTN_KERNELS_DECODE_TRAITS_H_

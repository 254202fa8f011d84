// The prefill mainloop of the sm90 family: producer warps copy tiles by TMA, consumer warpgroups multiply them by
// wgmma; online softmax in registers, probabilities as the A operand of the second product.
//
// Barriers, all mbarriers. `full`: the copy has landed (the producer's arrival and its bytes; of values that some row
// may not see the producer waits for the bytes itself, and arrives when it has looked at them). `empty`: every consumer
// warp has arrived after its last read. Tiles of work go from the warp that chooses them to all others the same way, so
// that copies run ahead into the next tile while consumers end this one.
//
// Of quantised caches the codes are copied, to a ring of their own, and a warpgroup of converters makes the tiles of
// them that consumers multiply: convert_sm90.cuh.
#ifndef TURBOATTN_KERNELS_PREFILL_MAINLOOP_SM90_CUH_
#define TURBOATTN_KERNELS_PREFILL_MAINLOOP_SM90_CUH_

#include <climits>
#include <cstdint>
#include <type_traits>

#include "kernels/common/fast_divisor.h"
#include "kernels/common/ptx_sm90.cuh"
#include "kernels/common/query_tile.cuh"
#include "kernels/common/score.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/prefill/non_finite_sm90.cuh"
#include "kernels/prefill/pieces.h"
#include "kernels/prefill/tile_sm90.cuh"
#include "kernels/prefill/traits.h"

namespace turboattn::prefill {

// Which tiles a block takes: TileWalkSm90. Numbers of tiles and of (token, query head) rows have 31 bits: SuitsSm90.
struct ScheduleSm90 {
  FastDivisor group;          // query heads of a kv head
  FastDivisor kv_heads;       // of a sequence
  int skipped = 0;            // sequences of at most this many tokens are the decode kernel's
  int uniform = 0;            // query tokens of every sequence when they all have the same number, else 0
  int workers = 0;            // blocks of the grid
  int sms = 0;                // that long tiles are cut over; 0: keys stay whole
  bool in_pairs = false;      // an item may be a long tile and the short one of its sequence that makes up for it
  int query_rows = 0;         // of the query array, without the head axis
  int single_from = INT_MAX;  // the round in which tiles of uniform calls begin that are taken one by one
  // Uniform calls.
  int items = 0;              // what blocks share out: tiles, or pairs of tiles
  int tiles = 0, levels = 0;  // of a (sequence, kv head) pair, and items
  int section = 1;            // pairs that are taken together
  int paired_heads = 0;       // pairs before the last, whose tiles are taken one by one
  FastDivisor section_items;  // of a whole section
  FastDivisor widths[3];      // pairs of a whole section, of one that is not, of the last ones: in SectionKind's order
};
enum SectionKind { kWholeSection, kPartSection, kSingles };

template <class Params>
struct ArgumentsSm90 {
  CUtensorMap query;  // [tokens, K, G, D], boxes of a tile's rows; used when query_by_copy
  CUtensorMap key;    // plain arrays: [B, S, K, D], boxes of a tile. Pages: see KeyTileSm90, boxes of box_keys
  CUtensorMap value;
  ScheduleSm90 schedule;
  Params params;
  bool query_by_copy = false;  // else the group does not divide the tile, and consumers load its rows
  int box_keys = 0;            // keys a copy
  int page_shift = 0;          // pages have 1 << page_shift tokens
};

// The sequences with long tiles (pieces.h), as the warp of a block that chooses tiles has found them.
struct LongSequencesSm90 {
  static constexpr int kMost = 64;        // head dim 192 leaves room for no more
  static constexpr int kExamined = 1024;  // the sequences that can be
  struct alignas(16) Sequence {
    int b;
    int pieces;      // of a tile
    int tiles_end;   // of this sequence's tiles and all before
    int pieces_end;  // the same
  };
  int count;   // 0: there is none
  int pieces;  // in all
  OtherTiles others;
  Sequence sequences[kMost];
  uint32_t bits[kExamined / 32];  // bit b % 32 of word b / 32: it is one of them

  __device__ bool Has(int b) const {
    return count > 0 && b < kExamined && (bits[static_cast<uint32_t>(b) / 32] >> (b % 32) & 1u) != 0;
  }
};

// Names of waits, for WaitBarrier().
enum WaitSm90 {
  kTileFull = 1,
  kTileEmpty,
  kRowsFull,
  kQueryFull,
  kQueryEmpty,
  kKeyFull,
  kKeyEmpty,
  kValueFull,
  kValueEmpty,
  kValueLanded,
  kCodesFull,
  kCodesEmpty
};

constexpr int kTileWarp = 2;
// Named barriers: of all warps but kTileWarp, and of that and warp 0.
constexpr int kStartBarrier = 7, kTileStartBarrier = 8;

// Quantised caches: tiles of codes between the producers and the converters. Rows lie as SwizzledChunk has them.
template <class Traits, bool kQuantised = Traits::kQuantised>
struct CodeRingSm90 {};
template <class Traits>
struct CodeRingSm90<Traits, true> {
  static constexpr int kParams = kHasRowParams<Traits::kKvDType> ? Traits::kKeys : 4;
  alignas(1024) unsigned char tile[Traits::kCodeStages][Traits::kKeys * Traits::kStoredBytes];
  alignas(16) uint32_t row_params[Traits::kCodeStages][kParams];  // garbage where a page is unmapped
  uint64_t full[Traits::kCodeStages], empty[Traits::kCodeStages];
  uint32_t mapped[Traits::kCodeStages];  // see SharedSm90
};

// Whether the i-th of `count` tiles of codes holds values. They are copied and converted in the order in which
// consumers wait: K of a block before V of the block before it. Values are released last, half a block's time before
// they are needed again: to convert the next keys in that time too would make consumers wait.
__device__ constexpr bool HoldsValues(int i, int count) { return i % 2 == 0 ? i > 0 : i == count - 1; }

template <class Traits>
struct SharedSm90 {
  using E = typename Traits::E;
  // Two have a tile of one block wait for the choice of the next: 2 to 4 % of causal calls of 1,024 keys. Three tiles
  // and int8's ring do not fit at head dim 128.
  static constexpr int kTiles = Traits::kQuantised ? 2 : 3;
  alignas(1024) E query[Traits::kRows * Traits::kDim];  // panels of 64 columns: see ptx_sm90.cuh
  alignas(1024) E key[Traits::kStages][Traits::kKeys * Traits::kDim];
  alignas(1024) E value[Traits::kStages][Traits::kKeys * Traits::kValueDim];
  CodeRingSm90<Traits> codes;
  uint64_t query_full, query_empty;
  uint64_t key_full[Traits::kStages], key_empty[Traits::kStages];
  uint64_t value_full[Traits::kStages], value_empty[Traits::kStages];
  uint64_t value_landed[Traits::kStages];  // of blocks that are looked at before consumers get them
  uint64_t tile_full[kTiles], rows_full[kTiles], tile_empty[kTiles];
  uint32_t mapped[Traits::kStages];  // of a K tile: bit g: keys 8 g .. 8 g + 7 lie on a mapped page
  TileSm90<Traits> tiles[kTiles];
  LongSequencesSm90 long_sequences;  // of paged calls

  // By one thread, before anything else.
  __device__ void InitBarriers() {
    constexpr int kConsumerWarps = 4 * Traits::kConsumers, kConverterWarps = Traits::kQuantised ? 4 : 0;
    constexpr int kFullArrivals = Traits::kQuantised ? kConverterWarps : 1;
    InitBarrier(&query_full, 1);
    InitBarrier(&query_empty, kConsumerWarps);
    for (int i = 0; i < Traits::kStages; ++i) {
      InitBarrier(&key_full[i], kFullArrivals);
      InitBarrier(&key_empty[i], kConsumerWarps);
      InitBarrier(&value_full[i], kFullArrivals);
      InitBarrier(&value_empty[i], kConsumerWarps);
      InitBarrier(&value_landed[i], 1);
    }
    for (int i = 0; i < kTiles; ++i) {
      // All threads that write and read arrive: compute-sanitizer does not follow one lane's arrival for its warp.
      InitBarrier(&tile_full[i], kWarp);
      InitBarrier(&rows_full[i], kWarp);
      InitBarrier(&tile_empty[i], (kConsumerWarps + kConverterWarps + 2) * kWarp);  // and the producers
    }
    if constexpr (Traits::kQuantised) {
      for (int i = 0; i < Traits::kCodeStages; ++i) {
        InitBarrier(&codes.full[i], 1);
        InitBarrier(&codes.empty[i], kConverterWarps);
      }
    }
    FenceBarrierInit();
  }
};

// Element (row, column) of a tile of kRows rows: see ptx_sm90.cuh.
template <int kRows>
__device__ __forceinline__ int PanelIndex(int row, int column) {
  return column / 64 * (kRows * 64) + row * 64 + ((column % 64 / kChunk) ^ (row & 7)) * kChunk + column % kChunk;
}

// How a tile of keys or values of `kDim` columns lies in shared memory: panels of 64 columns, of all keys one after the
// other or of 8 keys at a time. The latter is what one copy makes of some keys of a page, however many panels they
// have, when the pool is seen as [rows / 8, panels, 8, 64]. A copy for each panel took calls on pages of 16 1.3 % more
// cycles, others 0 to 0.4 %.
template <class Traits, class Params, int kDim>
struct KeyTileSm90 {
  static constexpr bool kByGroups = std::is_same_v<Params, PagedAttentionParams> && !Traits::kQuantised;
  static constexpr int kPanels = kDim / 64;
  static constexpr int kGroupBytes = kByGroups ? kPanels * 1024 : 1024;
  static constexpr int kPanelBytes = kByGroups ? 1024 : Traits::kKeys * 128;
  // The key of 16-byte chunk i of a tile.
  __device__ static int Key(int i) {
    const int row = i / 8;
    return kByGroups ? row / (8 * kPanels) * 8 + row % 8 : row % Traits::kKeys;
  }
};

// ---- producers: a warp each for keys and values

// A bit for each 8 keys of a block.
template <class Traits>
constexpr uint32_t kAllMappedSm90 = static_cast<uint32_t>((uint64_t{1} << (Traits::kKeys / 8)) - 1);

// kValues: a warp's code is for one of both alone. A producer's instructions take 13 cycles each beside those of the
// consumers, whose issue slots they take, and a block has 2,700: what is the same for all blocks of a run is worked out
// once.
template <class Traits, class Params, bool kValues>
struct ProducerSm90 {
  using E = typename Traits::E;
  using KeyTile = KeyTileSm90<Traits, Params, kValues ? Traits::kValueDim : Traits::kDim>;
  static constexpr int kKeys = Traits::kKeys, kStages = Traits::kStages, kGroups = kKeys / 8;
  static constexpr bool kPaged = std::is_same_v<Params, PagedAttentionParams>;
  static constexpr uint32_t kAllMapped = kAllMappedSm90<Traits>;
  static_assert(kGroups <= kWarp, "a lane a group");

  const ArgumentsSm90<Params>& args;
  SharedSm90<Traits>& shared;
  const int lane = threadIdx.x % kWarp;
  RingSlot<Traits::kQuantised ? Traits::kCodeStages : kStages> slot{1};
  uint32_t query_parity = 1;
  uint32_t landed_parities = 0;  // bit i: of value_landed[i]
  // The next block.
  int run_begin = 0;      // number of the run's first block
  int first_key = 0;      // of the block
  RunRange seen, common;  // of the tile, in this run
  int head = 0;
  int first_row = 0, array = 0;  // plain arrays: where the run's key 0 is
  // Pages: lane i has box i of a block.
  static constexpr int kNoPage = -1;          // as a coordinate: outside the tensor, so that zeros are copied
  static constexpr int kNoGroups = -kGroups;  // the same
  const int lane_key = lane * args.box_keys;
  const bool has_box = lane_key < kKeys;
  const int32_t* pages = nullptr;        // ids, of the run
  int first_page = 0, num_pages = 0;     // of the layer; none if it does not exist
  int first_group = 0, page_groups = 0;  // KeyTile::kByGroups: of the head on that page, and from page to page
  int32_t next_entry = 0;                // the box's page id, read a block ahead; -1: no row sees a key of it

  __device__ ProducerSm90(const ArgumentsSm90<Params>& args, SharedSm90<Traits>& shared) : args(args), shared(shared) {}

  // `block` is the last of its run. Query rows are asked for with the first keys, as soon as may be.
  __device__ void StartRun(const TileSm90<Traits>& tile, int block) {
    const bool with_query = !kValues && block == tile.end - 1;
    head = tile.head;
    if (!kPaged && with_query) LoadQuery(tile.query_row);
    const int run = kPaged ? tile.blocks.RunOf(block) : kOwnRun;
    run_begin = run == 0 ? 0 : tile.blocks.count[0];
    first_key = kPaged ? tile.blocks.FirstKey(block) : (tile.blocks.first[kOwnRun] + block) * kKeys;
    seen = tile.blocks.seen[run];
    common = tile.blocks.common[run];
    if constexpr (kPaged) {
      const KvCache& cache = args.params.cache;
      const PagedKeys keys = KeysOf(args.params, tile.b, tile.head, run);
      pages = keys.pages;
      LookUp(first_key);
      if (with_query) LoadQuery(tile.query_row);
      const int64_t page = PageOf(cache, keys.layer, 0);
      first_page = static_cast<int>(page);
      num_pages = page == kUnmapped ? 0 : static_cast<int>(cache.num_pages);
      if constexpr (KeyTile::kByGroups) {
        const int head_groups = static_cast<int>(cache.page_size) / 8;
        page_groups = static_cast<int>(cache.num_kv_heads) * head_groups;
        first_group = first_page * page_groups + head * head_groups;
      }
    } else {
      array = tile.array;
      first_row = tile.key_row;
    }
  }

  __device__ void LookUp(int block_key) {
    const int key = block_key + lane_key;
    next_entry = -1;
    if (has_box && seen.Meets(key, args.box_keys)) next_entry = pages[key >> args.page_shift];
  }
  __device__ bool IsMapped() const { return static_cast<uint32_t>(next_entry) < static_cast<uint32_t>(num_pages); }
  __device__ int FirstSlot() const { return (first_key + lane_key) & ((1 << args.page_shift) - 1); }
  // Bit g: the block's g-th 8 keys lie on a mapped page.
  __device__ uint32_t MappedGroups(bool mapped) const {
    const uint32_t boxes = __ballot_sync(~0u, mapped || !has_box);
    if (boxes == ~0u) return kAllMapped;
    const int box = lane * 8 >> (__ffs(args.box_keys) - 1);
    return __ballot_sync(~0u, lane < kGroups && (boxes >> box & 1u) != 0);
  }

  // A block's codes of keys or values into their ring.
  __device__ void LoadCodes() {
    const KvCache& cache = args.params.cache;
    const bool is_mapped = IsMapped();
    const int box = args.box_keys, first_slot = FirstSlot(), page = is_mapped ? first_page + next_entry : kNoPage;
    LookUp(first_key - kKeys);
    const uint32_t mapped = MappedGroups(is_mapped);
    uint64_t* const full = &shared.codes.full[slot.index];
    WaitBarrier(&shared.codes.empty[slot.index], slot.parity, kCodesEmpty);
    if (lane == 0) {
      shared.codes.mapped[slot.index] = mapped;
      constexpr int kParamBytes = kHasRowParams<Traits::kKvDType> ? 8 * 4 : 0;  // of a group
      ArriveExpecting(full, kKeys * Traits::kStoredBytes + __popc(mapped) * kParamBytes);
    }
    __syncwarp();
    if (has_box) {
      CopyBox4(SharedAddress(shared.codes.tile[slot.index]) + lane_key * Traits::kStoredBytes,
               kValues ? &args.value : &args.key, full, 0, first_slot, head, page);
      if (kHasRowParams<Traits::kKvDType> && is_mapped) {
        const char* params = static_cast<const char*>(kValues ? cache.value_params : cache.key_params);
        CopyBytes(SharedAddress(&shared.codes.row_params[slot.index][lane_key]),
                  params + CacheRow(cache, page, head, first_slot) * 4, box * 4, full);
      }
    }
    __syncwarp();
    first_key -= kKeys;
  }

  // A block's keys or values into the ring. Values that some row may not see are looked at before consumers get them.
  __device__ void LoadBlock(TileSm90<Traits>& tile) {
    uint64_t* const full = kValues ? &shared.value_full[slot.index] : &shared.key_full[slot.index];
    const CUtensorMap* const map = kValues ? &args.value : &args.key;
    const uint32_t to = SharedAddress(kValues ? shared.value[slot.index] : shared.key[slot.index]);
    constexpr int kBytes = KeyTile::kPanels * kKeys * 128;
    int group = kNoGroups;
    uint32_t mapped = kAllMapped;
    if constexpr (kPaged) {
      const bool is_mapped = IsMapped();
      if (is_mapped) group = first_group + next_entry * page_groups + (FirstSlot() >> 3);
      LookUp(first_key - kKeys);
      mapped = MappedGroups(is_mapped);
    }
    const bool in_part = kValues && (mapped != kAllMapped || !common.HoldsAll(first_key, kKeys) ||
                                     SegmentsOfKeys(args.params, 0) != nullptr);
    uint64_t* const landed = in_part ? &shared.value_landed[slot.index] : full;
    WaitBarrier(kValues ? &shared.value_empty[slot.index] : &shared.key_empty[slot.index], slot.parity,
                kValues ? kValueEmpty : kKeyEmpty);
    const bool elected = kPaged ? lane == 0 : ElectLane();
    if (elected) {
      if (kPaged && !kValues) shared.mapped[slot.index] = mapped;
      ArriveExpecting(landed, kBytes);
    }
    if constexpr (kPaged) {
      __syncwarp();
      if (has_box) CopyBox4(to + lane_key * (KeyTile::kPanels * 128), map, landed, 0, 0, 0, group);
    } else if (elected) {
      for (int panel = 0; panel < KeyTile::kPanels; ++panel) {
        CopyBox4(to + panel * KeyTile::kPanelBytes, map, landed, panel * 64, head, first_row + first_key, array);
      }
    }
    __syncwarp();
    if constexpr (kValues) {
      if (in_part) {
        WaitBarrier(landed, landed_parities >> slot.index & 1u, kValueLanded);
        landed_parities ^= 1u << slot.index;
        const bool found =
            TakeOutNonFinite<E, KeyTile, kKeys * Traits::kValueDim>(shared.value[slot.index], seen, first_key);
        __syncwarp();
        if (lane == 0) {
          if (found) tile.non_finite = 1;
          Arrive(full);
        }
        __syncwarp();
      }
    }
    slot.Advance();
    first_key -= kKeys;
  }

  // From this row of the query array, of `head`.
  __device__ void LoadQuery(int row) {
    if (!args.query_by_copy) return;
    WaitBarrier(&shared.query_empty, query_parity, kQueryEmpty);
    query_parity ^= 1u;
    if (ElectLane()) {
      ArriveExpecting(&shared.query_full, sizeof(shared.query));
      for (int panel = 0; panel < Traits::kPanels; ++panel) {
        CopyBox4(SharedAddress(shared.query) + panel * Traits::kRows * 128, &args.query, &shared.query_full, panel * 64,
                 0, head, row);
      }
    }
    __syncwarp();
  }

  // A tile's blocks, from the last to the first; with the keys the query rows.
  __device__ void Load(TileSm90<Traits>& tile) {
    int block = tile.end - 1;
    const int end = tile.begin;
    run_begin = INT_MAX;
    if (!kPaged && block >= end) StartRun(tile, block);
    const auto next = [&] {
      if (kPaged && block < run_begin) StartRun(tile, block);
      --block;
    };
    if constexpr (Traits::kQuantised) {
      const int count = 2 * (block + 1 - end);
#pragma unroll 1
      for (int i = 0; i < count; ++i, slot.Advance()) {
        if (HoldsValues(i, count) != kValues) continue;
        next();
        LoadCodes();
      }
    } else {
#pragma unroll 1
      while (block >= end) {
        next();
        LoadBlock(tile);
      }
    }
  }
};

// ---- a consumer: one warpgroup, 64 rows

template <class Traits, class Params>
struct ConsumerSm90 {
  using E = typename Traits::E;
  using Shared = SharedSm90<Traits>;
  static constexpr int kKeys = Traits::kKeys, kDim = Traits::kDim, kValueDim = Traits::kValueDim;
  static constexpr int kStages = Traits::kStages, kConsumers = Traits::kConsumers;
  static constexpr int kSteps = kDim / 16, kQuerySteps = Traits::kQuerySteps;  // of the first product
  static constexpr uint32_t kAllMapped = kAllMappedSm90<Traits>;
  static constexpr bool kPaged = std::is_same_v<Params, PagedAttentionParams>;
  static constexpr float kSlack = 8.f;   // in exponents of 2: probabilities up to 256, far inside E
  static constexpr float kFar = 1024.f;  // exponents of 2; half an ulp there is 2^-14
  // Named barriers.
  static constexpr int kOwnBarrier = 1, kTurnBarrier = 4;
  // At head dim 128 a tile's first and last products take turns too, and where its rows go is found under the last: 1
  // to 2 % of calls of 1,024 keys on an H200; calls of head dim 64 and 256 lost 1 to 3 %, quantised caches have not
  // been measured.
  static constexpr bool kTightEnds = kDim == 128 && !Traits::kQuantised;
  static constexpr float kShrink = Codec<E, Traits::kKvDType>::kShrink;  // keys and values come divided by this

  const ArgumentsSm90<Params>& args;
  const Params& params;
  Shared& shared;
  const int warpgroup;  // 0 .. kConsumers - 1
  const int turn;       // the same; at head dim 128 not in a uniform register, which are few: 0.5 to 1 %
  const int thread = threadIdx.x % kWarpgroup, lane = threadIdx.x % kWarp;
  const ScoreRule rule;
  const TileRows<Traits::kRows>* rows = nullptr;  // of the tile
  RingSlot<kStages> key_slot{0}, value_slot{0};
  uint32_t query_parity = 0;

  // Rows Row(0) and Row(1) of the tile.
  float o[kValueDim / 8][4];
  float s[kKeys / 8][4];
  uint32_t p[kKeys / 16][4];
  uint32_t q[kQuerySteps > 0 ? kQuerySteps : 1][4];  // the query's columns of some steps: see InRegisters
  float max[2];  // origin of the exponents, in x (see ScoreRule): within kSlack of the maximum; in the end, in log2
  float sum[2];  // this thread's columns only; in the end, all
  RowEnd end[2];
  int64_t out_row[2];  // see PlaceRows()
  bool exists[2];
  float alpha[2];
  bool moved;       // alpha is not 1 for a row of this warp
  float origin[2];  // max in log2; 0 for -Inf
  bool far;         // one of this warp's origins is: see Softmax()

  __device__ __forceinline__ ConsumerSm90(const ArgumentsSm90<Params>& args, Shared& shared, int warpgroup)
      : args(args),
        params(args.params),
        shared(shared),
        warpgroup(warpgroup),
        turn(kTightEnds ? static_cast<int>(threadIdx.x) / kWarpgroup - 1 : warpgroup),
        rule(MakeScoreRule(args.params.score, kShrink)) {}

  __device__ __forceinline__ int Row(int half) const {
    return 64 * warpgroup + thread / kWarp * 16 + 8 * half + lane / 4;
  }
  __device__ __forceinline__ void SyncWarpgroup() const { SyncNamed(kOwnBarrier + warpgroup, kWarpgroup); }
  __device__ __forceinline__ void ArriveByWarp(uint64_t* barrier) const {
    __syncwarp();
    if (lane == 0) Arrive(barrier);
  }

  // ---- turns: one consumer issues its products while the others do softmax

  __device__ __forceinline__ void StartTurns() const {
    if (warpgroup == kConsumers - 1) ArriveNamed(kTurnBarrier, 2 * kWarpgroup);
  }
  __device__ __forceinline__ void WaitTurn() const { SyncNamed(kTurnBarrier + turn, 2 * kWarpgroup); }
  __device__ __forceinline__ void PassTurn() const {
    const int next = turn + 1 == kConsumers ? 0 : turn + 1;
    ArriveNamed(kTurnBarrier + next, 2 * kWarpgroup);
  }

  // ---- the query's fragments that stay in registers

  // kQuerySteps of the kSteps steps, evenly spread.
  __device__ static constexpr int QueryStep(int k) { return k * kQuerySteps / kSteps; }
  __device__ static constexpr bool InRegisters(int k) { return QueryStep(k + 1) != QueryStep(k); }

  __device__ __forceinline__ void LoadQueryFragments() {
    const int row = 64 * warpgroup + thread / kWarp * 16 + lane % 16;
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      if (!InRegisters(k)) continue;
      LoadMatrix4(q[QueryStep(k)],
                  SharedAddress(shared.query + PanelIndex<Traits::kRows>(row, 16 * k + lane / 16 * kChunk)));
    }
  }

  // ---- the products: issued, not waited for

  // The same in all lanes, and the compiler knows: descriptors are in uniform registers.
  __device__ static int Uniform(int x) { return __shfl_sync(~0u, x, 0); }

  __device__ __forceinline__ void IssueScores() {
    using Tile = KeyTileSm90<Traits, Params, kDim>;
    const uint64_t query = TileDescriptor(SharedAddress(shared.query) + warpgroup * (64 * 128), 0, 1024);
    const uint64_t keys = TileDescriptor(SharedAddress(shared.key[Uniform(key_slot.index)]), 0, Tile::kGroupBytes);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < kSteps; ++k) {
      const int panel = k / 4, column = k % 4 * 32;
      const uint64_t some_keys = MoveDescriptor(keys, panel * Tile::kPanelBytes + column);
      if constexpr (kQuerySteps > 0) {
        if (InRegisters(k)) {
          WgmmaRegistersByRows<E, kKeys>(s, q[QueryStep(k)], some_keys, k > 0);
          continue;
        }
      }
      WgmmaShared<E, kKeys>(s, MoveDescriptor(query, panel * Traits::kRows * 128 + column), some_keys, k > 0);
    }
    WgmmaCommit();
  }

  __device__ __forceinline__ void IssueValues() {
    using Tile = KeyTileSm90<Traits, Params, kValueDim>;
    const uint64_t values =
        TileDescriptor(SharedAddress(shared.value[Uniform(value_slot.index)]), Tile::kPanelBytes, Tile::kGroupBytes);
    WgmmaFence();
#pragma unroll
    for (int k = 0; k < kKeys / 16; ++k) {
      WgmmaRegisters<E, kValueDim>(o, p[k], MoveDescriptor(values, k * 2 * Tile::kGroupBytes));
    }
    WgmmaCommit();
  }

  __device__ __forceinline__ void WaitKeys() {
    WaitBarrier(&shared.key_full[key_slot.index], key_slot.parity, kKeyFull);
  }
  __device__ __forceinline__ void WaitValues() {
    WaitBarrier(&shared.value_full[value_slot.index], value_slot.parity, kValueFull);
  }
  __device__ __forceinline__ void ReleaseKeys(bool last) {
    ArriveByWarp(&shared.key_empty[key_slot.index]);
    key_slot.Advance();
    if (last && args.query_by_copy) ArriveByWarp(&shared.query_empty);
  }
  __device__ __forceinline__ void ReleaseValues() {
    ArriveByWarp(&shared.value_empty[value_slot.index]);
    value_slot.Advance();
  }

  // ---- scores

  // The keys of a block that lie on mapped pages, in groups of 8. Read while products run, and by the lane that arrives
  // for its warp: compute-sanitizer does not follow the others.
  __device__ __forceinline__ uint32_t MappedKeys() const {
    if constexpr (!kPaged) return kAllMapped;
    return __shfl_sync(~0u, lane == 0 ? shared.mapped[key_slot.index] : 0u, 0);
  }

  // Of the keys 8 n + e, bit 2 n + e: those below `end`.
  __device__ static uint32_t KeysBelow(int end) {
    static_assert(kKeys <= 128);
    const int keys = ::min(::max(end, 0), kKeys);
    return static_cast<uint32_t>((uint64_t{1} << (keys / 8 * 2 + ::min(keys % 8, 2))) - 1);
  }

  // The keys of a block that this thread's rows see: bit 2 n + e of a row's word is key 8 n + e of its columns. All
  // kinds of masks become words, so that they have their many instructions in common.
  struct SeenKeys {
    bool all;
    uint32_t keys[2];
  };

  // Asked for while the scores are being made: it takes 150 instructions.
  __device__ __forceinline__ SeenKeys FindSeenKeys(const TileSm90<Traits>& tile, int block, uint32_t mapped) const {
    const bool all = tile.blocks.common[tile.blocks.RunOf(block)].HoldsAll(tile.blocks.FirstKey(block), kKeys) &&
                     mapped == kAllMapped && SegmentsOfKeys(params, 0) == nullptr;
    if (all) return {true, {~0u, ~0u}};
    const KeyBlockView view = ViewBlock(params, tile, block, mapped);
    const int column = lane % 4 * 2;
    // Keys that no row sees are not copied, and not mapped: most last blocks have such, and one key after the other
    // they took 6,000 cycles.
    const bool by_range = tile.all_mapped || mapped == kAllMapped;
    if (view.key_segments == nullptr && view.tree == nullptr && by_range) {
      const auto keys = [&](int half) {
        const int lo = rows->lo[view.run_index][Row(half)] - view.first_key - column;
        const int hi = rows->hi[view.run_index][Row(half)] - view.first_key - column;
        return KeysBelow(hi) & ~KeysBelow(lo);
      };
      return {false, {keys(0), keys(1)}};
    }
    uint64_t both = 0;
#pragma unroll 1
    for (int i = 0; i < kKeys / 2; ++i) {
      const int half = i % 2, place = i / 2;
      const bool sees = Sees(*rows, Row(half), view, place / 2 * 8 + place % 2 + column);
      both |= static_cast<uint64_t>(sees) << (32 * half + place);
    }
    return {false, {static_cast<uint32_t>(both), static_cast<uint32_t>(both >> 32)}};
  }

  __device__ __forceinline__ bool Moves(float top, int half) const {
    return (top - max[half]) * rule.to_log2 > kSlack;  // a sum with kSlack may round up by far more
  }
  // Rare after a tile's first block: in Softmax() its steps would stand between scores and exponentials.
  __device__ __forceinline__ void MoveOrigins(const float (&top)[2]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float reference = max[half];
      const bool moves = Moves(top[half], half);
      const float next = moves ? top[half] : reference;
      // No key yet: any finite origin will do, and exp(-Inf) must not become exp(-Inf + Inf).
      const bool none = next == -Infinity();
      alpha[half] = none || reference == -Infinity() ? 0.f : Exp2((reference - next) * rule.to_log2);
      if (!moves) alpha[half] = 1.f;
      sum[half] *= alpha[half];
      max[half] = next;
      origin[half] = none ? 0.f : __fmul_rn(next, rule.to_log2);
    }
    far = __any_sync(~0u, fabsf(origin[0]) > kFar || fabsf(origin[1]) > kFar);
  }

  // Scores to probabilities, in place; the sums follow, o waits for Rescale(). See MainloopSm80::MoveOrigins.
  __device__ __forceinline__ void Softmax() {
    float top[2] = {fmaxf(s[0][0], s[0][1]), fmaxf(s[0][2], s[0][3])};
#pragma unroll
    for (int n = 1; n < kKeys / 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) top[half] = fmaxf(top[half], fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 1));
      top[half] = fmaxf(top[half], __shfl_xor_sync(~0u, top[half], 2));
    }
    moved = __any_sync(~0u, Moves(top[0], 0) || Moves(top[1], 1));
    if (moved) MoveOrigins(top);
    float from[2] = {origin[0], origin[1]};
    // Where half an ulp of the origin is not small against 1, scores are taken from it before they are scaled.
    if (far) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool this_far = fabsf(origin[half]) > kFar;
        const float shift = this_far ? max[half] : 0.f;
        if (this_far) from[half] = 0.f;
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n) {
          s[n][2 * half] -= shift;
          s[n][2 * half + 1] -= shift;
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[n][e] = Exp2(fmaf(s[n][e], rule.to_log2, -from[e / 2]));
#pragma unroll
      for (int half = 0; half < 2; ++half) sum[half] += s[n][2 * half] + s[n][2 * half + 1];
    }
  }

  __device__ __forceinline__ void Rescale() {
    if (!moved) return;
#pragma unroll
    for (int d = 0; d < kValueDim / 8; ++d) {
#pragma unroll
      for (int e = 0; e < 4; ++e) o[d][e] *= alpha[e / 2];
    }
  }

  __device__ __forceinline__ void PackProbabilities() {
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) p[n][i] = Pack<E>(s[2 * n + i / 2][i % 2 * 2], s[2 * n + i / 2][i % 2 * 2 + 1]);
    }
  }

  // ---- the query tile, after its copy or where no copy can bring it

  __device__ __forceinline__ void LoadQueryRows(const TileSm90<Traits>& tile) {
    SyncWarpgroup();  // all of it have read the last tile's
#pragma unroll 4
    for (int i = thread; i < 64 * Traits::kChunks; i += kWarpgroup) {
      const int r = 64 * warpgroup + i / Traits::kChunks, chunk = i % Traits::kChunks;
      uint4 x = {0, 0, 0, 0};
      if (r < tile.num_rows) {
        const int64_t row = rows->token[r] * params.num_heads + rows->head[r];
        x = *reinterpret_cast<const uint4*>(static_cast<const E*>(params.query) + row * kDim + chunk * kChunk);
      }
      *reinterpret_cast<uint4*>(shared.query + PanelIndex<Traits::kRows>(r, chunk * kChunk)) = x;
    }
    FenceAsyncProxy();
    SyncWarpgroup();
  }

  // The fused step's prologue on the warpgroup's own rows, which no other reads.
  __device__ __forceinline__ void ApplyPrologueToRows(const QueryPrologue& prologue, const TileSm90<Traits>& tile) {
    const int begin = 64 * warpgroup, end = min(begin + 64, tile.num_rows);
    const auto element = [&](int r, int d) -> E& { return shared.query[PanelIndex<Traits::kRows>(r, d)]; };
    ApplyPrologue<E, kDim, kWarpgroup>(prologue, tile.b, *rows, begin, end, thread, element);
    FenceAsyncProxy();
    SyncWarpgroup();
  }

  // ---- a tile

  // Soft cap, scale and ALiBi where asked for, then -Inf where a row does not see a key.
  __device__ __forceinline__ void ModifyAndMask(const TileSm90<Traits>& tile, int block, uint32_t mapped,
                                                const SeenKeys& seen) {
    if (rule.modified) {
      const bool has_alibi = params.score.alibi_slopes != nullptr;
      constexpr int kPart = kValueDim == 128 ? 4 : 2;  // the most that the plain path does not pay for by spills
      ModifyScores<kPart>(rule, has_alibi, *rows, Row(0), ViewBlock(params, tile, block, mapped), s);
    }
    if (seen.all) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) {
        if ((seen.keys[half] >> i & 1u) == 0) s[i / 2][2 * half + i % 2] = -Infinity();
      }
    }
  }

  // What is left to do of the rows but for their values.
  __device__ __forceinline__ void EndRows(const TileSm90<Traits>& tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // The four lanes of a row have its columns between them.
      sum[half] += __shfl_xor_sync(~0u, sum[half], 1);
      sum[half] += __shfl_xor_sync(~0u, sum[half], 2);
      max[half] *= rule.to_log2;
    }
    if (tile.part != kWholeTile) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Dense rows past query_lens have no denominator, not even the sink.
      const bool exists = Row(half) < tile.num_rows;
      const bool has_sink = exists && rows->token[Row(half)] < tile.view.first_token + tile.view.q_len;
      end[half] = EndRow(max[half], sum[half], has_sink ? params.score.sinks : nullptr, rows->head[Row(half)]);
      end[half].factor *= kShrink;
    }
    if constexpr (kTightEnds) PlaceRows(tile);
  }

  // Where the rows go, and their lse.
  __device__ __forceinline__ void PlaceRows(const TileSm90<Traits>& tile) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = Row(half);
      exists[half] = row < tile.num_rows;
      out_row[half] = tile.rows.token[row] * params.num_heads + tile.rows.head[row];
      if (exists[half] && lane % 4 == 0) params.lse[out_row[half]] = end[half].lse;
    }
  }

  // From the probabilities of the block before to those of `block`; the products of that one's values go under softmax
  // of this one. Plain blocks have no code for masks: it cost them 4 % of their cycles, though it never ran.
  template <bool kPlain>
  __device__ __forceinline__ void Step(const TileSm90<Traits>& tile, int block, int begin) {
    WaitKeys();
    WaitTurn();
    IssueScores();
    WaitValues();
    IssueValues();
    PassTurn();
    [[maybe_unused]] uint32_t mapped;
    [[maybe_unused]] SeenKeys seen;
    if constexpr (!kPlain) {
      mapped = MappedKeys();
      seen = FindSeenKeys(tile, block, mapped);
    }
    WgmmaWait<1>();
    HoldRegisters(s);
    ReleaseKeys(block == begin);
    if constexpr (!kPlain) ModifyAndMask(tile, block, mapped, seen);
    Softmax();
    HoldRegisters(s);  // softmax is done before the wait, not after
    if (block % 2 == 0) {
      WgmmaWaitInArm0();
    } else {
      WgmmaWaitInArm1();
    }
    HoldRegisters(o);
    Rescale();
    HoldRegisters(p);
    ReleaseValues();
    PackProbabilities();
  }

  __device__ __forceinline__ void StartRows() {
#pragma unroll
    for (int d = 0; d < kValueDim / 8; ++d) o[d][0] = o[d][1] = o[d][2] = o[d][3] = 0.f;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      max[half] = -Infinity();
      sum[half] = origin[half] = 0.f;
    }
    far = false;
  }

  // What begins and ends rows is done under products where it can: tiles of 1,024 keys spend a third of their time on
  // it. What is written down of the rows is waited for there too: for a block's first tile that takes 4,000 cycles, in
  // which its first keys are on their way.
  __device__ __forceinline__ void Run(const TileSm90<Traits>& tile, RingSlot<Shared::kTiles> slot) {
    const auto wait_rows = [&] { WaitBarrier(&shared.rows_full[slot.index], slot.parity, kRowsFull); };
    const int begin = tile.begin;
    int block = tile.end - 1;
    if (block < begin) {
      wait_rows();
      StartRows();
      EndRows(tile);
      return;
    }
    if (args.query_by_copy) {
      WaitBarrier(&shared.query_full, query_parity, kQueryFull);
      query_parity ^= 1u;
    } else {
      wait_rows();
      LoadQueryRows(tile);
    }
    if (const QueryPrologue* prologue = PrologueOf(params)) {
      wait_rows();
      ApplyPrologueToRows(*prologue, tile);
    }
    if constexpr (kQuerySteps > 0) LoadQueryFragments();
    WaitKeys();
    if constexpr (kTightEnds) WaitTurn();
    IssueScores();
    if constexpr (kTightEnds) PassTurn();
    StartRows();
    wait_rows();
    const uint32_t mapped = MappedKeys();
    const SeenKeys seen = FindSeenKeys(tile, block, mapped);
    WgmmaWait<0>();
    HoldRegisters(s);
    ReleaseKeys(block == begin);
    ModifyAndMask(tile, block, mapped, seen);
    Softmax();
    PackProbabilities();
    for (int plain_from = tile.plain_from; block > begin;) {
#pragma unroll 1
      while (block > plain_from) Step<true>(tile, --block, begin);
      if (block == begin) break;
      Step<false>(tile, --block, begin);
      plain_from = PlainFrom(params, tile, rule.modified, block - 1);
    }
    WaitValues();
    if constexpr (kTightEnds) WaitTurn();
    IssueValues();
    if constexpr (kTightEnds) PassTurn();
    EndRows(tile);
    WgmmaWait<0>();
    HoldRegisters(o);
    HoldRegisters(p);
    ReleaseValues();
  }
};

}  // namespace turboattn::prefill

#endif  // TURBOATTN_KERNELS_PREFILL_MAINLOOP_SM90_CUH_

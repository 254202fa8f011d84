// Attention on Hopper: persistent blocks that take tiles of (token, head of the group) rows.
#ifndef TURBOATTN_KERNELS_PREFILL_KERNEL_SM90_CUH_
#define TURBOATTN_KERNELS_PREFILL_KERNEL_SM90_CUH_

#include "kernels/prefill/convert_sm90.cuh"
#include "kernels/prefill/mainloop_sm90.cuh"
#include "kernels/prefill/split.cuh"
#include "kernels/prefill/tile_count.cuh"

namespace turboattn::prefill {

struct FoundTileSm90 {
  int b;
  int index;  // within the sequence
};

// FindTile (score.cuh) by one warp. It adds up several sequences a lane before it looks closer, so that loads overlap.
template <class Count>
__device__ FoundTileSm90 FindTileByWarp(uint32_t batch, int64_t number, Count count) {
  constexpr int kAhead = 4;
  const int lane = threadIdx.x % kWarp;
  int64_t before = 0;  // tiles of the sequences before this round's
  for (uint32_t base = 0; base < batch; base += kAhead * kWarp) {
    int counts[kAhead];
    int64_t total = 0;
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const uint32_t b = base + k * kWarp + lane;
      counts[k] = b < batch ? count(static_cast<int>(b)) : 0;
      total += counts[k];
    }
    for (int step = 1; step < kWarp; step *= 2) total += __shfl_xor_sync(~0u, total, step);
    if (number >= before + total) {
      before += total;
      continue;
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      int64_t sum = counts[k];
      for (int step = 1; step < kWarp; step *= 2) {
        const int64_t other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
      }
      const int64_t start = before + sum - counts[k];
      const uint32_t here = __ballot_sync(~0u, number >= start && number < start + counts[k]);
      if (here != 0) {
        const int owner = __ffs(static_cast<int>(here)) - 1;
        const int index = static_cast<int>(number - start);
        return {static_cast<int>(base + k * kWarp + owner), __shfl_sync(~0u, index, owner)};
      }
      before += __shfl_sync(~0u, sum, kWarp - 1);
    }
  }
  return {static_cast<int>(batch), 0};
}

// Tokens of sequence b whose rows the prefill kernel writes.
template <class Params>
__device__ int WrittenTokens(const ArgumentsSm90<Params>& args, int b) {
  if (args.schedule.uniform > 0) return args.schedule.uniform;
  const int rows = args.schedule.query_rows;
  const int32_t* const range = QueryRanges(args.params) + 2 * int64_t{b};
  const int lo = min(max(range[0], 0), rows), tokens = min(max(range[1], lo), rows) - lo;  // ClampRange
  return tokens > args.schedule.skipped ? tokens : 0;
}

// The tiles of a kv head for so many tokens.
template <int kRows>
__device__ int CountTiles(const ScheduleSm90& schedule, int tokens) {
  return static_cast<int>((static_cast<uint32_t>(tokens) * schedule.group.divisor + kRows - 1) / kRows);
}

// Keys that end with a sequence's last token, of a packed call.
__device__ inline int64_t LengthOf(const PagedAttentionParams& params, int64_t b) { return params.seqs.kv_lens[b]; }
__device__ inline int64_t LengthOf(const LinearAttentionParams& params, int64_t b) {
  const TokenRange range = ClampRange(params.kv_ranges, b, params.num_keys);
  return range.hi - range.lo;
}

// Blocks of keys that the tiles of a sequence see, about: where runs start and end within a block is left out.
template <int kKeys>
__device__ int LikelyBlocks(const PagedAttentionParams& params, int64_t b, int64_t tokens) {
  const Sequences& seqs = params.seqs;
  int64_t keys = max(seqs.kv_lens[b], 0);
  if (seqs.prefix_len != nullptr) keys += max(*seqs.prefix_len, 0);
  if (const int32_t* window = params.score.window) {
    const int64_t left = window[2 * b], right = params.score.is_causal ? 0 : window[2 * b + 1];
    if (left >= 0 && right >= 0) keys = min(keys, left + tokens + right);
  }
  if (seqs.cp_size > 1) keys = Divide(keys, seqs.cp_size) + 1;
  keys = min(keys, (seqs.max_pages + seqs.num_prefix_pages) * params.cache.page_size);
  return static_cast<int>(static_cast<uint64_t>(keys + kKeys - 1) / kKeys);
}

// Fills `found`, in a call with long tiles; `tiles` is the number of all. Returns how many there are, if they are cut.
template <class Traits>
__device__ int CutLongTiles(const ArgumentsSm90<PagedAttentionParams>& args, float tiles, CallTiles call,
                            LongSequencesSm90* found) {
  const PagedAttentionParams& params = args.params;
  const int lane = threadIdx.x % kWarp, batch = static_cast<int>(BatchOf(params)), sms = args.schedule.sms;
  const int heads = args.schedule.kv_heads.divisor;
  // Their tiles, and their blocks where pieces will be.
  int count = 0, long_tiles = 0;
  float long_blocks = 0.f;
#pragma unroll 1
  for (int base = 0; base < min(batch, LongSequencesSm90::kExamined); base += kWarp) {
    const int b = base + lane, tokens = b < batch ? WrittenTokens(args, b) : 0;
    int blocks = 0, own = 0;
    if (tokens > 0) {
      blocks = LikelyBlocks<Traits::kKeys>(params, b, tokens);
      own = CountTiles<Traits::kRows>(args.schedule, tokens) * heads;
    }
    bool is_long = IsLong(blocks, call.blocks, sms);
    const int place = count + __popc(__ballot_sync(~0u, is_long) & ((1u << lane) - 1u));
    is_long = is_long && place < LongSequencesSm90::kMost;
    const uint32_t here = __ballot_sync(~0u, is_long);
    int end = is_long ? own : 0;
    long_blocks += static_cast<float>(end) * static_cast<float>(blocks);
    for (int step = 1; step < kWarp; step *= 2) {
      const int other = __shfl_up_sync(~0u, end, step);
      if (lane >= step) end += other;
    }
    if (is_long) found->sequences[place] = {b, blocks, long_tiles + end, 0};
    if (lane == 0) found->bits[base / kWarp] = here;
    count += __popc(here);
    long_tiles += __shfl_sync(~0u, end, kWarp - 1);
  }
  for (int step = 1; step < kWarp; step *= 2) long_blocks += __shfl_xor_sync(~0u, long_blocks, step);
  __syncwarp();
  if (long_tiles > kMaxCutTiles) return 0;
  call.long_tiles = long_tiles;
  call.others = tiles - static_cast<float>(long_tiles);
  // Each lane tries other pieces.
  const auto tiles_of = [&](int i) {
    return found->sequences[i].tiles_end - (i > 0 ? found->sequences[i - 1].tiles_end : 0);
  };
  const auto blocks_of = [&](int i) { return found->sequences[i].pieces; };
  int64_t best = BestPieces(call, count, tiles_of, blocks_of, sms, lane + 2, kWarp);
  for (int step = 1; step < kWarp; step *= 2) best = min(best, __shfl_xor_sync(~0u, best, step));
  const int most = static_cast<int>(best);
  int pieces = 0;
#pragma unroll 1
  for (int base = 0; base < count; base += kWarp) {
    const int i = base + lane;
    int end = 0;
    if (i < count) {
      LongSequencesSm90::Sequence& sequence = found->sequences[i];
      sequence.pieces = PiecesOf(sequence.pieces, most);
      end = tiles_of(i) * sequence.pieces;
    }
    for (int step = 1; step < kWarp; step *= 2) {
      const int other = __shfl_up_sync(~0u, end, step);
      if (lane >= step) end += other;
    }
    if (i < count) found->sequences[i].pieces_end = pieces + end;
    pieces += __shfl_sync(~0u, end, kWarp - 1);
  }
  if (lane == 0) {
    found->count = count;
    found->pieces = pieces;
    found->others = OtherTiles(call, pieces, most, long_blocks, sms);
    if (args.schedule.in_pairs) found->others.each /= 2;
  }
  __syncwarp();
  return most < call.longest ? long_tiles : 0;
}

// By one warp, all blocks to the same end.
template <class Traits>
__device__ void FindLongSequences(const ArgumentsSm90<LinearAttentionParams>&, LongSequencesSm90*) {}

template <class Traits>
__device__ void FindLongSequences(const ArgumentsSm90<PagedAttentionParams>& args, LongSequencesSm90* found) {
  const PagedAttentionParams& params = args.params;
  const int lane = threadIdx.x % kWarp, sms = args.schedule.sms;
  if (lane == 0) found->count = 0;
  __syncwarp();
  if (sms == 0) return;
  const uint32_t batch = static_cast<uint32_t>(BatchOf(params));
  const int heads = args.schedule.kv_heads.divisor;
  bool may_be = params.seqs.prefix_len != nullptr;
#pragma unroll 1
  for (uint32_t b = lane; b < batch; b += kWarp) {
    may_be = may_be || params.seqs.kv_lens[b] > (kMinLong - 1) * Traits::kKeys;
  }
  int cut_tiles = 0;
  if (__any_sync(~0u, may_be)) {
    CallTiles call;
    float tiles = 0.f;
#pragma unroll 1
    for (uint32_t b = lane; b < batch; b += kWarp) {
      const int tokens = WrittenTokens(args, b);
      if (tokens == 0) continue;
      const int blocks = LikelyBlocks<Traits::kKeys>(params, b, tokens);
      const float own = static_cast<float>(CountTiles<Traits::kRows>(args.schedule, tokens) * heads);
      tiles += own;
      call.blocks += own * static_cast<float>(blocks);
      call.longest = max(call.longest, blocks);
    }
    for (int step = 1; step < kWarp; step *= 2) {
      tiles += __shfl_xor_sync(~0u, tiles, step);
      call.blocks += __shfl_xor_sync(~0u, call.blocks, step);
      call.longest = max(call.longest, __shfl_xor_sync(~0u, call.longest, step));
    }
    if (IsLong(call.longest, call.blocks, sms)) cut_tiles = CutLongTiles<Traits>(args, tiles, call, found);
  }
  if (blockIdx.x == 0 && lane == 0) {
    *SplitWorkspace<Traits::kRows, Traits::kValueDim>(params).header = {cut_tiles};
  }
}

// The tiles of a block, one after the other. One warp; all lanes hold the same.
//
// Where every sequence has the same number of rows, and no tile is long: sections of (sequence, kv head) pairs one
// after the other, in a section the tiles in descending order over all its pairs. That is longest first for causal
// calls, so that blocks end together, and blocks that run side by side read the same keys. Elsewhere: by sequence and
// kv head, in descending order. A worker takes item after item, as many apart as there are workers; in pairs, the tile
// from the end first, then its mirror image: all pairs of a sequence are the same work. In packed calls only of
// sequences whose first tile sees less than half of what the last sees: others' tiles are nearly alike, and one at a
// time they are shared out more evenly.
//
// Before all that, of calls with long tiles, those or pieces of them, by sequence, head and place in the keys: tiles
// that read the same keys are side by side. See OtherTiles for which others follow.
template <class Traits, class Params>
struct TileWalkSm90 {
  static constexpr int kRows = Traits::kRows;
  static constexpr bool kPlain = std::is_same_v<Params, LinearAttentionParams>, kCuts = !kPlain;
  const ArgumentsSm90<Params>& args;
  uint32_t round = 0;
  int64_t item = blockIdx.x;  // the next, of that round
  FoundTileSm90 found = {};   // packed calls: of the item, its sequence and its number there
  bool mirrored = false;      // in pairs: the item's second tile is the next
  const LongSequencesSm90& long_ones;
  int piece = blockIdx.x;                          // the next
  int fillers = 0;                                 // items that the block has taken for want of a piece
  enum { kPiece, kItem, kFiller } taken = kPiece;  // where the last tile is from

  __device__ TileWalkSm90(const ArgumentsSm90<Params>& args, const LongSequencesSm90& long_ones)
      : args(args), long_ones(long_ones) {}

  // Past the tile that Next() has found: apart from it, since all warps of a block wait for that.
  __device__ void Advance() {
    if (mirrored) return;
    if (taken == kFiller) ++fillers;
    if (taken != kItem) return;
    // To the item of the next round. Those of the last heads' single tiles go there and back: who had a longer tile
    // gets a shorter one.
    const ScheduleSm90& schedule = args.schedule;
    ++round;
    const bool back = round > schedule.single_from && (round - schedule.single_from) % 2 != 0;
    item = int64_t{round} * schedule.workers + (back ? schedule.workers - 1 - blockIdx.x : blockIdx.x);
  }

  // The next tile, or one that says `last` when there is none left.
  __device__ void Next(TileSm90<Traits>* tile) {
    const Params& params = args.params;
    const ScheduleSm90& schedule = args.schedule;
    const int kv_heads = schedule.kv_heads.divisor, batch = static_cast<int>(BatchOf(params));
    const bool cuts = kCuts && long_ones.count > 0;
    // Of sequences with so many tokens.
    const auto tiles_of = [&](int b, int tokens) {
      return cuts && long_ones.Has(b) ? 0 : CountTiles<kRows>(schedule, tokens);
    };
    const auto pairs_of = [&](int b, int tokens) {
      return schedule.in_pairs && 2 * int64_t{tokens} > LengthOf(params, b);
    };
    const auto levels_of = [&](int tiles, bool in_pairs) { return in_pairs ? (tiles + 1) / 2 : tiles; };
    int b, index, head, length;
    int pieces = 1, place = 0, stride = 0, number = 0;  // of a long tile, and the number of that
    const OtherTiles& others = long_ones.others;
    const int filler = static_cast<int>(blockIdx.x) - others.first_idle;
    const bool fills = cuts && fillers < others.each && filler >= 0 && filler < others.idle;
    // The tile of a sequence and head that an item of theirs names.
    const auto take = [&](int tiles, bool in_pairs, int level) {
      index = mirrored ? level : tiles - 1 - level;
      mirrored = in_pairs && !mirrored && level != tiles - 1 - level;
      taken = fills ? kFiller : kItem;
    };
    bool none;
    const int slot = piece;
    if (cuts && piece < long_ones.pieces && blockIdx.x < schedule.sms) {
      none = false;
      taken = kPiece;
      piece += schedule.sms;
      const int lane = threadIdx.x % kWarp;
      int i = 0;
      for (uint32_t after;; i += kWarp) {
        after = __ballot_sync(~0u, i + lane < long_ones.count && slot < long_ones.sequences[i + lane].pieces_end);
        if (after == 0) continue;
        i += __ffs(static_cast<int>(after)) - 1;
        break;
      }
      const LongSequencesSm90::Sequence& sequence = long_ones.sequences[i];
      b = sequence.b;
      length = WrittenTokens(args, b);
      pieces = sequence.pieces;
      stride = CountTiles<kRows>(schedule, length);
      const PiecePlace at(slot - (i > 0 ? (&sequence)[-1].pieces_end : 0), stride, pieces);
      head = at.head;
      place = at.place;
      index = stride - 1 - at.tile;
      number = (i > 0 ? (&sequence)[-1].tiles_end : 0) + at.head * stride + at.tile;
    } else if (schedule.uniform > 0 && !cuts) {
      const int its = static_cast<int>(item);
      none = static_cast<uint32_t>(its) >= static_cast<uint32_t>(schedule.items);
      if (!none) {
        const int singles = schedule.paired_heads * schedule.levels;
        int first = schedule.paired_heads, rest = its - singles, kind = kSingles;
        if (rest < 0) {
          const int section = schedule.section_items.Quotient(its);
          first = section * schedule.section;
          rest = its - section * schedule.section_items.divisor;
          kind = first + schedule.section > schedule.paired_heads ? kPartSection : kWholeSection;
        }
        const FastDivisor& width = schedule.widths[kind];
        const int level = width.Quotient(rest), pair = first + rest - level * width.divisor;
        b = schedule.kv_heads.Quotient(pair);
        head = pair - b * kv_heads;
        length = schedule.uniform;
        take(schedule.tiles, schedule.in_pairs && kind != kSingles, level);
      }
    } else {
      if (!mirrored) {
        const int64_t before = cuts ? int64_t{others.idle} * others.each : 0;
        const int64_t next = fills ? int64_t{others.idle} * fillers + filler : before + item;
        found = FindTileByWarp(batch, next, [&](int b) {
          const int tokens = WrittenTokens(args, b);
          return levels_of(tiles_of(b, tokens), pairs_of(b, tokens)) * kv_heads;
        });
      }
      none = found.b >= batch;
      if (!none) {
        b = found.b;
        length = WrittenTokens(args, b);
        const bool in_pairs = pairs_of(b, length);
        const int tiles = tiles_of(b, length), levels = levels_of(tiles, in_pairs);
        head = static_cast<int>(static_cast<uint32_t>(found.index) / static_cast<uint32_t>(levels));
        take(tiles, in_pairs, found.index - head * levels);
      }
    }
    if (none) {
      if (threadIdx.x % kWarp == 0) tile->last = true;
      return;
    }
    SequenceView view;
    [[maybe_unused]] int64_t first_key;
    if constexpr (kPlain) {
      view = ViewSequence(params, b, &first_key);
    } else {
      view = ViewSequence(params, b);
    }
    const int group = schedule.group.divisor, first_row = index * kRows;
    const int rows = min(length * group - first_row, kRows);
    const int first_token = schedule.group.Quotient(first_row);
    const int last_token = schedule.group.Quotient(first_row + rows - 1);
    if (threadIdx.x % kWarp == 0) {
      tile->head = head;
      tile->query_row = static_cast<int>(view.first_token) + first_token;
      if constexpr (kPlain) {
        tile->array = params.ragged ? 0 : b;
        tile->key_row = static_cast<int>(first_key);
      }
      tile->last = false;
      tile->b = b;
      tile->first_token = first_token;
      tile->first_head = first_row - first_token * group;
      tile->num_rows = rows;
      tile->view = view;
      tile->part = kWholeTile;
      tile->non_finite = 0;
    }
    const int q_len = static_cast<int>(view.q_len);
    const int total = FindBlocks(view, first_token, min(last_token, q_len - 1), last_token < q_len, &tile->blocks);
    if (threadIdx.x % kWarp == 0) {
      tile->begin = 0;
      tile->end = total;
      if constexpr (kCuts) {
        if (stride > 0) {
          const SplitWorkspace<kRows, Traits::kValueDim> workspace(params);
          if (pieces > 1) {
            tile->begin = static_cast<int>(Divide(int64_t{total} * place, pieces));
            tile->end = static_cast<int>(Divide(int64_t{total} * (place + 1), pieces));
            tile->part = slot;
          }
          if (place == 0) {
            workspace.info[number] = {b, head, first_row, pieces > 1 ? rows : 0, pieces, slot, stride};
          }
        }
      }
    }
  }
};

// Whether every page of the tile's keys is mapped. By one warp.
template <class Traits>
__device__ bool AllMapped(const LinearAttentionParams&, const TileSm90<Traits>&) {
  return true;
}
template <class Traits>
__device__ bool AllMapped(const PagedAttentionParams& params, const TileSm90<Traits>& tile) {
  const KvCache& cache = params.cache;
  const int32_t layer = params.seqs.layer[tile.b];
  const int page_size = static_cast<int>(cache.page_size);
  bool mapped = true;
#pragma unroll 1
  for (int run = 0; run < kRuns; ++run) {
    const RunRange seen = tile.blocks.seen[run];
    const PagedKeys keys = KeysOf(params, tile.b, tile.head, run);
#pragma unroll 4
    for (int64_t j = (seen.lo & -page_size) + int64_t{page_size} * (threadIdx.x % kWarp); j < seen.hi;
         j += int64_t{page_size} * kWarp) {
      mapped = mapped && PageOf(cache, layer, keys.Entry(static_cast<int>(j))) != kUnmapped;
    }
  }
  return __all_sync(~0u, mapped);
}

// Writes a consumer's rows.
template <class Traits, class Params>
__device__ __forceinline__ void StoreRows(const Params& params, const TileSm90<Traits>& tile,
                                          ConsumerSm90<Traits, Params>& consumer) {
  using E = typename Traits::E;
  constexpr int kDim = Traits::kValueDim;
  const int column = threadIdx.x % 4;
  if constexpr (!ConsumerSm90<Traits, Params>::kTightEnds) consumer.PlaceRows(tile);
  const auto scaled = [&](int d, int e) { return consumer.o[d][e] * consumer.end[e / 2].factor; };
  if (params.out_dtype == DType::kFloat32) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (!consumer.exists[half]) continue;
#pragma unroll
      for (int d = 0; d < kDim / 8; ++d) {
        StorePair<E>(params.out, params.out_dtype, consumer.out_row[half] * kDim + 8 * d + column * 2,
                     scaled(d, 2 * half), scaled(d, 2 * half + 1));
      }
    }
  } else {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4* const out = static_cast<uint4*>(params.out) + consumer.out_row[half] * (kDim / kChunk) + column;
#pragma unroll
      for (int d = 0; d < kDim / 8; d += 4) {
        const auto word = [&](int i) { return Pack<E>(scaled(d + i, 2 * half), scaled(d + i, 2 * half + 1)); };
        StoreIf(consumer.exists[half], out + d, TransposeQuad({word(0), word(1), word(2), word(3)}));
      }
    }
  }
}

// Leaves a consumer's rows of a part in the workspace.
template <class Traits>
__device__ __forceinline__ void StorePart(const PagedAttentionParams& params, const TileSm90<Traits>& tile,
                                          const ConsumerSm90<Traits, PagedAttentionParams>& consumer) {
  constexpr int kRows = Traits::kRows, kDim = Traits::kValueDim;
  float* const part = SplitWorkspace<kRows, kDim>(params).Part(tile.part);
  const int column = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = consumer.Row(half);
    if (row >= tile.num_rows) continue;
#pragma unroll
    for (int d = 0; d < kDim / 8; ++d) {
      *reinterpret_cast<float2*>(part + row * kDim + 8 * d + column * 2) = {
          consumer.o[d][2 * half] * consumer.kShrink, consumer.o[d][2 * half + 1] * consumer.kShrink};
    }
    if (column == 0) {
      part[kRows * kDim + row] = consumer.max[half];
      part[kRows * kDim + kRows + row] = consumer.sum[half];
    }
  }
}
template <class Traits>
__device__ void StorePart(const LinearAttentionParams&, const TileSm90<Traits>&,
                          const ConsumerSm90<Traits, LinearAttentionParams>&) {}

// Copies the keys, or the values, of the block's tiles.
template <class Traits, class Params, bool kValues>
__device__ __forceinline__ void Produce(const ArgumentsSm90<Params>& args, SharedSm90<Traits>& shared) {
  ProducerSm90<Traits, Params, kValues> producer(args, shared);
  for (RingSlot<SharedSm90<Traits>::kTiles> slot(0);; slot.Advance()) {
    WaitBarrier(&shared.tile_full[slot.index], slot.parity, kTileFull);
    TileSm90<Traits>& tile = shared.tiles[slot.index];
    if (tile.last) break;
    producer.Load(tile);
    Arrive(&shared.tile_empty[slot.index]);
  }
}

// Warpgroup 0: warp 0 copies queries and keys, warp 1 values, warp 2 chooses tiles (by itself: 5,000 cycles a tile that
// copies would wait for), warp 3 writes down what is known of a tile's rows. The other warpgroups are consumers, but of
// quantised caches the last, which converts.
template <class Traits, class Params>
__global__ void __launch_bounds__(Traits::kThreads, 1) PrefillSm90(const __grid_constant__ ArgumentsSm90<Params> args) {
  using Shared = SharedSm90<Traits>;
  using Consumer = ConsumerSm90<Traits, Params>;
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(s_bytes);
  const Params& params = args.params;
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x / kWarpgroup), 0);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x / kWarp), 0);

  LaunchDependents();  // the merge, or decode: their blocks find no room before this block's end
  if (threadIdx.x == 0) {
    if (args.query_by_copy) PrefetchTensorMap(&args.query);
    PrefetchTensorMap(&args.key);
    PrefetchTensorMap(&args.value);
    shared.InitBarriers();
  }
  if (warp != kTileWarp) {  // which finds its first tile meanwhile
    if (warp == 0) ArriveNamed(kTileStartBarrier, 2 * kWarp);
    SyncNamed(kStartBarrier, Traits::kThreads - kWarp);
  }

  if (warpgroup == 0) {
    if (warp == kTileWarp) {  // before registers are given away
      FindLongSequences<Traits>(args, &shared.long_sequences);
    }
    GiveRegisters<Traits::kProducerRegisters>();
    if (warp == kTileWarp) {
      TileWalkSm90<Traits, Params> walk(args, shared.long_sequences);
      bool is_first = true;
      for (RingSlot<Shared::kTiles> slot(1);; slot.Advance()) {
        if (!is_first) WaitBarrier(&shared.tile_empty[slot.index], slot.parity, kTileEmpty);
        TileSm90<Traits>& tile = shared.tiles[slot.index];
        walk.Next(&tile);
        __syncwarp();
        if (is_first) SyncNamed(kTileStartBarrier, 2 * kWarp);
        is_first = false;
        Arrive(&shared.tile_full[slot.index]);
        if (tile.last) break;
        walk.Advance();
      }
    } else if (warp == 0) {
      Produce<Traits, Params, false>(args, shared);
    } else if (warp == 1) {
      Produce<Traits, Params, true>(args, shared);
    } else {
      for (RingSlot<Shared::kTiles> slot(0);; slot.Advance()) {
        WaitBarrier(&shared.tile_full[slot.index], slot.parity, kTileFull);
        TileSm90<Traits>& tile = shared.tiles[slot.index];
        const bool last = tile.last;
        if (!last) {
          FillRows(params, args.schedule.group, &tile);
          const bool mapped = AllMapped(params, tile);
          if (threadIdx.x % kWarp == 0) {
            tile.all_mapped = mapped;
            tile.plain_from =
                PlainFrom(params, tile, MakeScoreRule(params.score, Consumer::kShrink).modified, tile.end - 2);
          }
        }
        Arrive(&shared.rows_full[slot.index]);
        if (last) break;
      }
    }
  } else if (Traits::kQuantised && warpgroup > Traits::kConsumers) {
    GiveRegisters<Traits::kConverterRegisters>();
    if constexpr (Traits::kQuantised) {
      ConverterSm90<Traits, Params> converter(params, shared);
      for (RingSlot<Shared::kTiles> slot(0);; slot.Advance()) {
        WaitBarrier(&shared.tile_full[slot.index], slot.parity, kTileFull);
        TileSm90<Traits>& tile = shared.tiles[slot.index];
        if (tile.last) break;
        converter.Run(tile);
        Arrive(&shared.tile_empty[slot.index]);
      }
    }
  } else {
    TakeRegisters<Traits::kConsumerRegisters>();
    if (SkippedLength(params) == 0) {  // else the decode kernel writes them
      constexpr int kConsumerWarps = 4 * Traits::kConsumers;
      FillUnownedRows(params, static_cast<int64_t>(blockIdx.x) * kConsumerWarps + warp - 4,
                      static_cast<int64_t>(gridDim.x) * kConsumerWarps);
    }
    Consumer consumer(args, shared, warpgroup - 1);
    consumer.StartTurns();
    for (RingSlot<Shared::kTiles> slot(0);; slot.Advance()) {
      WaitBarrier(&shared.tile_full[slot.index], slot.parity, kTileFull);
      const TileSm90<Traits>& tile = shared.tiles[slot.index];
      if (tile.last) break;
      consumer.rows = &tile.rows;
      consumer.Run(tile, slot);
      if (tile.part == kWholeTile) {
        StoreRows<Traits>(params, tile, consumer);
      } else {
        StorePart<Traits>(params, tile, consumer);
      }
      if (tile.non_finite != 0) AddNonFinite(params, tile, (warp - 4) * 16);
      Arrive(&shared.tile_empty[slot.index]);
    }
  }
}

}  // namespace turboattn::prefill

#endif  // TURBOATTN_KERNELS_PREFILL_KERNEL_SM90_CUH_

// Attention on Hopper: persistent blocks that take tiles of (token, head of the group) rows.
#ifndef TURBOATTN_KERNELS_PREFILL_KERNEL_SM90_CUH_
#define TURBOATTN_KERNELS_PREFILL_KERNEL_SM90_CUH_

#include "kernels/prefill/kernel.cuh"
#include "kernels/prefill/mainloop_sm90.cuh"

namespace turboattn::prefill {

// FindTile by one warp.
template <class Count>
__device__ FoundTile FindTileByWarp(int64_t batch, int64_t number, Count count) {
  const int lane = threadIdx.x % kWarp;
  int64_t before = 0;  // tiles of the sequences before this round's
  for (int64_t base = 0; base < batch; base += kWarp) {
    const int64_t b = base + lane, mine = b < batch ? count(b) : 0;
    int64_t sum = mine;
    for (int step = 1; step < kWarp; step *= 2) {
      const int64_t other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    const int64_t start = before + sum - mine;
    const uint32_t here = __ballot_sync(~0u, number >= start && number < start + mine);
    if (here != 0) {
      const int owner = __ffs(static_cast<int>(here)) - 1;
      return {base + owner, number - __shfl_sync(~0u, start, owner)};
    }
    before += __shfl_sync(~0u, sum, kWarp - 1);
  }
  return {batch, 0};
}

// The tiles of a block, one after the other. One warp; all lanes hold the same.
template <class Traits, class Params>
struct TileWalkSm90 {
  static constexpr int kRows = Traits::kRows;
  const ArgumentsSm90<Params>& args;
  int64_t round = 0;
  int64_t extra = 0;  // tiles past those of the schedule: ranges that overlap make more. See PrefillSm80
  int64_t item = -1;

  __device__ explicit TileWalkSm90(const ArgumentsSm90<Params>& args) : args(args) {}

  __device__ int64_t NextItem() {
    const int64_t blocks = gridDim.x, block = blockIdx.x;
    if (args.schedule.order == OrderSm90::kCounter) {
      int taken = 0;
      if (threadIdx.x % kWarp == 0) taken = atomicAdd(args.schedule.counter, 1);
      return __shfl_sync(~0u, taken, 0);
    }
    const bool back = args.schedule.order == OrderSm90::kSnake && round % 2 != 0;
    return round++ * blocks + (back ? blocks - 1 - block : block);
  }

  // The next tile, or one without rows when there is none left.
  __device__ void Next(TileSm90<Traits>* tile) {
    const Params& params = args.params;
    const int64_t uniform = UniformQueryLength(params), skipped = SkippedLength(params), group = GroupOf(params);
    const int64_t batch = BatchOf(params), kv_heads = KvHeadsOf(params);
    int64_t b, index, head, length;
    for (;;) {
      if (extra == 0) item = NextItem();
      if (item >= args.schedule.items || batch == 0) {
        if (threadIdx.x % kWarp == 0) tile->rows = 0;
        return;
      }
      if (uniform > 0) {
        const int64_t tiles = Divide(params.max_tiles, batch);
        const int64_t section = Divide(item, args.schedule.section * tiles);
        const int64_t rest = item - section * args.schedule.section * tiles, first = section * args.schedule.section;
        const int64_t width = min(args.schedule.section, batch * kv_heads - first);
        const int64_t from_last = Divide(rest, width), pair = first + rest - from_last * width;
        b = Divide(pair, kv_heads);
        head = pair - b * kv_heads;
        index = tiles - 1 - from_last;  // longest first
        length = uniform;
        break;
      }
      head = Divide(item, params.max_tiles);
      const int64_t number = item - head * params.max_tiles + extra;
      const int32_t* ranges = QueryRanges(params);
      const int64_t rows = QueryRows(params);
      const auto tokens = [&](int64_t b) {
        const TokenRange range = ClampRange(ranges, b, rows);
        return range.hi - range.lo > skipped ? range.hi - range.lo : 0;
      };
      const auto tiles = [&](int64_t b) { return (tokens(b) * group + kRows - 1) / kRows; };
      const FoundTile found = FindTileByWarp(batch, number, tiles);
      if (found.b >= batch) {
        extra = 0;
        continue;
      }
      extra = (item + 1) % params.max_tiles == 0 ? extra + 1 : 0;
      b = found.b;
      length = tokens(b);
      index = tiles(b) - 1 - found.index;
      break;
    }
    if (threadIdx.x % kWarp == 0) {
      const SequenceView view = ViewSequence(params, b);
      const int64_t first_row = index * kRows;
      const int rows = static_cast<int>(min(length * group - first_row, static_cast<int64_t>(kRows)));
      const int64_t first_token = Divide(first_row, group), last_token = Divide(first_row + rows - 1, group);
      tile->view = view;
      tile->b = b;
      tile->head = head;
      tile->first_row = first_row;
      tile->rows = rows;
      tile->blocks = BlockList<Traits::kKeys>(view, first_token, min(last_token, view.q_len - 1));
      if (last_token >= view.q_len) tile->blocks.ForgetCommon();
    }
  }
};

// Four words of each lane of a quad, transposed: word j of lane c becomes word c of lane j.
__device__ __forceinline__ uint4 TransposeQuad(uint4 w) {
  const int lane = threadIdx.x % kWarp;
  const bool odd = (lane & 1) != 0, high = (lane & 2) != 0;
  const uint32_t own0 = high ? w.z : w.x, own1 = high ? w.w : w.y;
  const uint32_t far0 = __shfl_xor_sync(~0u, high ? w.x : w.z, 2), far1 = __shfl_xor_sync(~0u, high ? w.y : w.w, 2);
  const uint32_t mine = odd ? own1 : own0, its = odd ? far1 : far0;  // of this lane and lane ^ 2
  const uint32_t near = __shfl_xor_sync(~0u, odd ? own0 : own1, 1), cross = __shfl_xor_sync(~0u, odd ? far0 : far1, 1);
  const uint32_t a = odd ? near : mine, b = odd ? mine : near, c = odd ? cross : its, d = odd ? its : cross;
  return high ? uint4{c, d, a, b} : uint4{a, b, c, d};
}

// Writes a consumer's rows.
template <class Traits, class Params>
__device__ __forceinline__ void StoreRows(const Params& params, const TileSm90<Traits>& tile,
                                          const TileRows<Traits::kRows>& rows,
                                          const ConsumerSm90<Traits, Params>& consumer) {
  using E = typename Traits::E;
  constexpr int kDim = Traits::kDim;
  const int column = threadIdx.x % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = consumer.sum[half];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    const int row = consumer.Row(half);
    const bool exists = row < tile.rows;
    // Dense rows past query_lens have no denominator, not even the sink.
    const float* sinks = rows.token[row] < tile.view.first_token + tile.view.q_len ? params.score.sinks : nullptr;
    const RowEnd end =
        EndRow(consumer.max[half] * consumer.rule.to_log2, sum, exists ? sinks : nullptr, rows.head[row]);
    const int64_t out_row = rows.token[row] * params.num_heads + rows.head[row];
    if (exists && column == 0) params.lse[out_row] = end.lse;
    if (params.out_dtype == DType::kFloat32) {
      if (!exists) continue;
#pragma unroll
      for (int d = 0; d < kDim / 8; ++d) {
        StorePair<E>(params.out, params.out_dtype, out_row * kDim + 8 * d + column * 2,
                     consumer.o[d][2 * half] * end.factor, consumer.o[d][2 * half + 1] * end.factor);
      }
    } else {
#pragma unroll
      for (int d = 0; d < kDim / 8; d += 4) {
        uint32_t w[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          w[i] = Pack<E>(consumer.o[d + i][2 * half] * end.factor, consumer.o[d + i][2 * half + 1] * end.factor);
        }
        const uint4 chunk = TransposeQuad({w[0], w[1], w[2], w[3]});
        if (exists) {
          *reinterpret_cast<uint4*>(static_cast<E*>(params.out) + out_row * kDim + 8 * (d + column)) = chunk;
        }
      }
    }
  }
}

template <class Traits, class Params>
__global__ void __launch_bounds__(Traits::kThreads, 1)
    PrefillSm90(const __grid_constant__ ArgumentsSm90<Params> args) {
  using Shared = SharedSm90<Traits>;
  extern __shared__ __align__(1024) unsigned char s_bytes[];
  Shared& shared = *reinterpret_cast<Shared*>(s_bytes);
  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarpgroup, 0);
  const int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / kWarp, 0);

  if (threadIdx.x == 0) {
    if (args.query_by_copy) PrefetchTensorMap(&args.query);
    PrefetchTensorMap(&args.key);
    PrefetchTensorMap(&args.value);
    shared.InitBarriers();
  }
  __syncthreads();

  if (warpgroup == 0) {
    if constexpr (Traits::kMovesRegisters) GiveRegisters<Traits::kProducerRegisters>();
    if (warp != 0) return;
    TileWalkSm90<Traits, Params> walk(args);
    ProducerSm90<Traits, Params> producer(args, shared);
    RingSlot<Shared::kTiles> slot(1);
    for (;;) {
      WaitBarrier(&shared.tile_empty[slot.index], slot.parity, kTileEmpty);
      TileSm90<Traits>& tile = shared.tiles[slot.index];
      walk.Next(&tile);
      __syncwarp();
      if (threadIdx.x == 0) Arrive(&shared.tile_full[slot.index]);
      if (tile.rows == 0) break;
      producer.Load(tile);
      slot.Advance();
    }
  } else {
    if constexpr (Traits::kMovesRegisters) TakeRegisters<Traits::kConsumerRegisters>();
    const Params& params = args.params;
    if (SkippedLength(params) == 0) {  // else the decode kernel writes them
      constexpr int kConsumerWarps = 4 * Traits::kConsumers;
      FillUnownedRows(params, static_cast<int64_t>(blockIdx.x) * kConsumerWarps + warp - 4,
                      static_cast<int64_t>(gridDim.x) * kConsumerWarps);
    }
    ConsumerSm90<Traits, Params> consumer(args, shared, warpgroup - 1);
    consumer.StartTurns();
    RingSlot<Shared::kTiles> slot(0);
    for (;;) {
      WaitBarrier(&shared.tile_full[slot.index], slot.parity, kTileFull);
      const TileSm90<Traits>& tile = shared.tiles[slot.index];
      if (tile.rows == 0) break;
      consumer.SyncWarpgroup();  // the last tile's rows have been read
      if (consumer.thread < 64) {
        FillTileRow<Traits::kRows>(params, tile.view, tile.head, tile.first_row, tile.rows,
                                   64 * consumer.warpgroup + consumer.thread, &shared.rows);
      }
      consumer.SyncWarpgroup();
      consumer.Run(tile);
      StoreRows<Traits>(params, tile, shared.rows, consumer);
      consumer.ArriveByWarp(&shared.tile_empty[slot.index]);
      slot.Advance();
    }
  }
}

}  // namespace turboattn::prefill

#endif  // TURBOATTN_KERNELS_PREFILL_KERNEL_SM90_CUH_

// DecodeSm80's work (see kernel.cuh) with keys copied by a warp that does nothing else: it finds the block's parts one
// after the other and copies the next one's keys while this one's are multiplied.
#ifndef TURBOATTN_KERNELS_DECODE_KERNEL_SM90_CUH_
#define TURBOATTN_KERNELS_DECODE_KERNEL_SM90_CUH_

#include "kernels/decode/kernel.cuh"
#include "kernels/decode/mainloop_sm90.cuh"

namespace turboattn::decode {

// The part at `offset` of sequence b's share, whose places in the list end at `end`.
template <class Traits>
__device__ void FillPart(const PagedAttentionParams& params, const CallFacts& facts, int b, const Share& share,
                         int64_t offset, int64_t position, int64_t end, Part* part) {
  const int heads = static_cast<int>(params.cache.num_kv_heads);
  const int unit = static_cast<int>(Divide(offset, share.parts)), tile = unit < heads ? 0 : unit / heads;
  part->b = b;
  part->head = unit - tile * heads;
  part->first_row = tile * Traits::kRows;
  part->rows = min(share.q_len * facts.group - part->first_row, Traits::kRows);
  part->within = static_cast<int>(offset - int64_t{unit} * share.parts);
  part->first_block = params.batch_invariant ? part->within * share.part_blocks : part->within;
  part->num_blocks = static_cast<int>(min(int64_t{share.blocks} - part->first_block,
                                          params.batch_invariant ? int64_t{share.part_blocks} : end - position));
  part->position = position;
  part->share = share;
  if (facts.plain) {
    ViewPlain(params, share, KeysOf(facts, share.kv_len), &part->view, &part->blocks);
  } else {
    ViewAny(params, b, share.q_len, &part->view, &part->blocks);
  }
  part->new_block = FirstNewBlock(params, facts, part->view, part->blocks) - part->first_block;
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kBlockThreads, Traits::kBlocks)
    DecodeSm90(const __grid_constant__ PagedAttentionParams params, const __grid_constant__ CallFacts facts) {
  using E = typename Traits::E;
  constexpr int kRows = Traits::kRows, kDim = Traits::kDim, kThreads = Traits::kThreads, kConsumers = 1;  // a barrier
  extern __shared__ __align__(1024) unsigned char s_bytes_sm90[];
  SharedSm90<Traits>& shared = *reinterpret_cast<SharedSm90<Traits>*>(s_bytes_sm90);
  LaunchDependents();
  const WorkspaceView workspace(params);
  const int batch = static_cast<int>(params.seqs.batch), block = static_cast<int>(blockIdx.x);
  const bool fixed_parts = params.batch_invariant;
  if (threadIdx.x == kThreads) {
    for (int i = 0; i < Traits::kSteps; ++i) {
      InitBarrier(&shared.full[i], 1 + kWarp);
      InitBarrier(&shared.empty[i], kWarps);
    }
    for (int i = 0; i < kParts; ++i) {
      InitBarrier(&shared.found[i], 1);
      InitBarrier(&shared.done[i], kWarps);
    }
    InitBarrier(&shared.stored, kThreads);
  }

  // A schedule knows the block's part of the list. Else the block finds it.
  ScheduledPart scheduled = {};
  if (facts.schedule != nullptr) scheduled = reinterpret_cast<const ScheduledPart*>(facts.schedule)[block];
  Share share = {};
  int b = 0;
  int64_t position = 0, end = 0, offset = 0;
  bool finds = threadIdx.x == kThreads;
  if (scheduled.grid == static_cast<int>(gridDim.x)) {
    // Any contents name rows, keys and slots that exist, and come to an end: that of the last sequence.
    b = scheduled.b;
    end = b >= 0 && b < batch ? scheduled.count : 0;
    offset = max(scheduled.offset, 0);
    if (finds && position < end) {
      const int tokens = static_cast<int>(params.seqs.num_tokens);
      const int first_token = min(max(scheduled.first_token, 0), tokens);
      const int q_len = min(max(scheduled.q_len, 0), tokens - first_token);
      share = ShareOf<kRows>(params, facts, b, first_token, q_len, scheduled.kv_len);
    }
    if (finds) shared.last_parts = min(max(scheduled.parts, 1), static_cast<int>(gridDim.x) - block);
  } else {
    const ListSearch<Traits> mine(params, facts);
    const WorkList list(mine.total, static_cast<int>(gridDim.x), facts.even, mine.all_even);
    if (threadIdx.x == 0) {
      shared.list = list;
      shared.last_parts = 0;
      if (blockIdx.x == 0) *workspace.slots_in_use = fixed_parts ? list.total : 2 * static_cast<int64_t>(gridDim.x);
    }
    if (block < list.blocks) list.Range(block, facts.even, &position, &end);
    // The first part's sequence is found by the thread that has it.
    finds = mine.Has(position);
    share = mine.share;
    b = mine.b;
    offset = mine.Offset(position);
  }
  // Slots of this block that no part will claim say so; slots of other parts are set when their part is.
  if (threadIdx.x == 0 && !fixed_parts) {
    workspace.info[2 * blockIdx.x] = workspace.info[2 * blockIdx.x + 1] = SlotInfo{};
  }
  Part* const parts = shared.parts;
  if (finds && position < end) {
    if (Seek<kRows>(params, facts, &b, &share, &offset)) {
      FillPart<Traits>(params, facts, b, share, offset, position, end, &parts[0]);
    } else {
      parts[0].b = -1;
    }
  }
  __syncthreads();

  if (position < end && threadIdx.x >= kThreads) {
    CopierSm90<Traits> copier(params, facts, shared);
    const bool first_lane = threadIdx.x == kThreads;
    b = parts[0].b;
    share = parts[0].share;
    // Of the part, in its sequence's share.
    offset = 0;
    if (b >= 0) {
      const int unit = parts[0].head + parts[0].first_row / kRows * static_cast<int>(params.cache.num_kv_heads);
      offset = int64_t{unit} * share.parts + parts[0].within;
    }
#pragma unroll 1
    for (int n = 0;; ++n) {
      Part& part = parts[n % kParts];
      if (n > 0) {
        WaitBarrier(&shared.done[n % kParts], n / kParts % 2 ^ 1, kWaitDone);
        if (first_lane) {
          if (position < end && Seek<kRows>(params, facts, &b, &share, &offset)) {
            FillPart<Traits>(params, facts, b, share, offset, position, end, &part);
          } else {
            part.b = -1;
          }
        }
        __syncwarp();
      }
      if (first_lane) Arrive(&shared.found[n % kParts]);
      if (part.b < 0) break;
      copier.CopyPart(part);
      const int taken = fixed_parts ? 1 : part.num_blocks;
      position += taken;
      offset += taken;
    }
  } else if (position < end) {
    RingPlace<Traits::kSteps> place;
    const int warp = threadIdx.x / kWarp;
#pragma unroll 1
    for (int n = 0;; ++n) {
      const Part& part = parts[n % kParts];
      WaitBarrier(&shared.found[n % kParts], n / kParts % 2, kWaitFound);
      b = part.b;
      if (b < 0) break;
      const int head = part.head, first_row = part.first_row, rows = part.rows;
      const int first_token = part.share.first_token;
      const bool one_token = part.share.q_len == 1;
      QueryChunks<Traits> query(params, facts.group, first_token, head, first_row, rows, one_token);
      // The turns of a sequence's only token are for all rows of the query, and its key: a pair a thread.
      const RopeParams& rope = params.prologue.rope;
      const bool turns_pair = one_token && threadIdx.x < rope.dim / 2;
      const uint64_t rope_step = turns_pair && rope.turns != nullptr ? RopeStep(rope.turns, threadIdx.x) : 0;
      const NewRows<Traits> new_rows(params, facts, part.view, part.blocks, b, head, part.first_block,
                                     part.first_block + part.num_blocks);
      SyncNamed(kConsumers, kThreads);  // the part before this one has been read
      const int r = kThreads - 1 - threadIdx.x;
      if (r < kRows) FillRow<kRows>(params, facts, part.view, head, first_row, rows, r, &shared.rows);
      if (turns_pair) {
        const int j = threadIdx.x;
        const int64_t at = part.view.position;
        shared.turns()[j] = rope.turns != nullptr
                                ? RopeTurn(rope, RopeAngle(rope_step, RopePosition(rope, j, first_token, at)))
                                : AnyTurn(rope, b, j, first_token, at);
      }
      query.Put(shared.query());
      SyncNamed(kConsumers, kThreads);
      if (params.append.key != nullptr) {
        new_rows.Store(params.seqs.layer[b], shared.new_row(), one_token && facts.same_rope ? shared.turns() : nullptr);
        Arrive(&shared.stored);
      }
      if (PrologueOf(params) != nullptr) {
        const auto element = [&](int r, int d) -> E& {
          return shared.query()[SwizzledChunk<kDim / kChunk>(r, d / kChunk) * kChunk + d % kChunk];
        };
        const auto turn = [&](int r, int j) {
          return one_token ? shared.turns()[j] : AnyTurn(rope, b, j, shared.rows.token[r], shared.rows.position[r]);
        };
        // The other two warps have a token's K and V.
        if (params.append.key != nullptr && one_token) {
          constexpr int kFirst = kThreads / 2;
          if (threadIdx.x < kFirst) {
            ApplyPrologue<E, kDim, kFirst>(params.prologue, shared.rows, 0, rows, threadIdx.x, element, turn);
          }
        } else {
          ApplyPrologue<E, kDim, kThreads>(params.prologue, shared.rows, 0, rows, threadIdx.x, element, turn);
        }
        SyncNamed(kConsumers, kThreads);
      }
      if constexpr (Traits::kQuantised) {
        MakeCodeQuery<Traits>(shared.query(), shared.code_query, rows);
        SyncNamed(kConsumers, kThreads);
      }
      MainloopSm90<Traits> mainloop(params, shared, part, place);
      mainloop.TakeQuery();
      mainloop.Run();

      // The warps' outputs take the place of some steps.
      RingPlace<Traits::kSteps> places[Traits::kOutputSteps];
      const auto output = [&](int w) -> WarpOutput<Traits>& {
        int slot = places[0].slot;
#pragma unroll
        for (int i = 1; i < Traits::kOutputSteps; ++i) {
          if (w / Traits::kStepOutputs == i) slot = places[i].slot;
        }
        return reinterpret_cast<WarpOutput<Traits>*>(shared.tile[slot][0])[w % Traits::kStepOutputs];
      };
#pragma unroll
      for (int i = 0; i < Traits::kOutputSteps; ++i) {
        places[i] = place;
        WaitBarrier(&shared.full[place.slot], place.phase, kWaitOutputs);
        place.Next();
      }
      mainloop.Publish(output(warp), shared.states);
      SyncNamed(kConsumers, kThreads);

      const int within = part.within, blocks = part.share.blocks;
      const int64_t at = part.position;
      const bool whole = part.num_blocks == blocks;
      const int64_t slot = fixed_parts ? at : 2 * static_cast<int64_t>(blockIdx.x) + (within == 0 ? 1 : 0);
      float* partial = workspace.data + slot * kSlotFloats<kRows, kDim>;
      if (threadIdx.x == 0 && !whole) {
        SlotInfo info = {0, rows, first_token, head, first_row};
        if (within == 0 && fixed_parts) {
          info.parts = part.share.parts;
        } else if (within == 0) {
          const int last_parts = shared.last_parts;
          info.parts = last_parts > 0 ? last_parts : shared.list.BlockOf(at + blocks - 1) - block + 1;
        }
        workspace.info[slot] = info;
      }
      if (threadIdx.x == 0 && whole && fixed_parts) workspace.info[slot] = SlotInfo{};
#pragma unroll 1
      for (int i = threadIdx.x; i < rows * (kDim / 4); i += kThreads) {
        const int row = i / (kDim / 4), d = i % (kDim / 4) * 4;
        float max, sum;
        const float4 x =
            SumOverWarps<Traits>(shared.states, row, [&](int w) { return &output(w).o[row][d]; }, &max, &sum);
        if (whole) {
          FinishQuad<E, kDim>(params, shared.rows.token[row], shared.rows.head[row], d, max, sum, x);
        } else {
          *reinterpret_cast<float4*>(partial + row * kDim + d) = x;
          if (d == 0) {
            partial[kRows * kDim + row] = max;
            partial[kRows * kDim + kRows + row] = sum;
          }
        }
      }
      __syncwarp();
      if (threadIdx.x % kWarp == 0) {
#pragma unroll
        for (int i = 0; i < Traits::kOutputSteps; ++i) Arrive(&shared.empty[places[i].slot]);
        Arrive(&shared.done[n % kParts]);
      }
    }
  }
  constexpr int kBlockWarps = Traits::kBlockThreads / kWarp;
  FillUnownedRows(params, static_cast<int64_t>(blockIdx.x) * kBlockWarps + threadIdx.x / kWarp,
                  static_cast<int64_t>(gridDim.x) * kBlockWarps);
}

}  // namespace turboattn::decode

#endif  // TURBOATTN_KERNELS_DECODE_KERNEL_SM90_CUH_

// DecodeSm80's work (see kernel.cuh) with keys copied by a warp that does nothing else: it finds the block's parts one
// after the other and copies the next one's keys while this one's are multiplied.
#ifndef TURBOATTN_KERNELS_DECODE_KERNEL_SM90_CUH_
#define TURBOATTN_KERNELS_DECODE_KERNEL_SM90_CUH_

#include <type_traits>

#include "kernels/decode/kernel.cuh"
#include "kernels/decode/mainloop_sm90.cuh"
#include "kernels/decode/mainloop_sm90_columns.cuh"

namespace turboattn::decode {

// The part at `position` of the list, whose places for the block end at `end`; from where Seek goes on. By one thread.
template <class Traits>
__device__ void FindPart(const PagedAttentionParams& params, const CallFacts& facts, int* b, Share* share,
                         int64_t* offset, int64_t position, int64_t end, Part* part) {
  PartPlace at;
  if (position >= end || !SeekPart<Traits>(params, facts, b, share, offset, &position, end, &at)) {
    part->b = -1;
    return;
  }
  const int heads = static_cast<int>(params.cache.num_kv_heads);
  const int tile = at.unit < heads ? 0 : at.unit / heads;
  part->b = *b;
  part->share = *share;
  part->offset = *offset;
  part->position = position;
  part->head = at.unit - tile * heads;
  part->first_row = tile * Traits::kRows;
  part->rows = min(share->q_len * facts.group - part->first_row, Traits::kRows);
  part->first_block = at.block;
  part->num_blocks = at.count;
  if (facts.plain) {
    ViewPlain(params, *share, KeysOf(facts, share->kv_len), &part->view, &part->blocks);
  } else {
    ViewAny(params, *b, share->q_len, &part->view, &part->blocks);
  }
  part->new_block = FirstNewBlock(params, facts, part->view, part->blocks) - part->first_block;
}

template <class Traits>
using SharedOfSm90 = std::conditional_t<Traits::kSplitsColumns, SharedSm90Columns<Traits>, SharedSm90<Traits>>;

template <class Traits>
__global__ void __launch_bounds__(Traits::kBlockThreads, Traits::kBlocks)
    DecodeSm90(const __grid_constant__ PagedAttentionParams params, const __grid_constant__ CallFacts facts) {
  constexpr int kThreads = Traits::kThreads, kWarpsBarrier = 1;
  extern __shared__ __align__(128) unsigned char s_ring_bytes[];
  using Shared = SharedOfSm90<Traits>;
  Shared& shared = *reinterpret_cast<Shared*>(s_ring_bytes);
  LaunchDependents();  // the merge
  auto [position, end, finds, b, share, offset] = FindWork<Traits>(params, facts, shared, kThreads, [&] {
    if (threadIdx.x == kThreads) {
      for (int i = 0; i < Traits::kSteps; ++i) {
        InitBarrier(&shared.full[i], 1 + kWarp);  // lane 0 says what is mapped; all lanes' copies
        InitBarrier(&shared.empty[i], kWarps);
      }
      for (int i = 0; i < kParts; ++i) {
        InitBarrier(&shared.found[i], 1);
        InitBarrier(&shared.done[i], kWarps);
      }
      InitBarrier(&shared.stored, kThreads);
    }
    // By the last warps: who finds the first part is mostly in another.
    static_assert(kParts <= kWarps);
    const int i = static_cast<int>(kThreads - 1 - threadIdx.x) / kWarp;
    if (facts.plain && threadIdx.x < kThreads && threadIdx.x % kWarp == 0 && i < kParts) {
      StartPlainView(params, &shared.parts[i].view, &shared.parts[i].blocks);
    }
  });
  if (finds && position < end) {
    FindPart<Traits>(params, facts, &b, &share, &offset, position, end, &shared.parts[0]);
  }
  __syncthreads();

  if (position < end && threadIdx.x >= kThreads) {
    CopierSm90<Traits> copier(params, facts, shared);
    const bool first_lane = threadIdx.x == kThreads;
    b = shared.parts[0].b;
    share = shared.parts[0].share;
#pragma unroll 1
    for (int n = 0;; ++n) {
      Part& part = shared.parts[n % kParts];
      if (n > 0) {
        WaitBarrier(&shared.done[n % kParts], n / kParts % 2 ^ 1, kWaitDone);
        if (first_lane) FindPart<Traits>(params, facts, &b, &share, &offset, position, end, &part);
        __syncwarp();
      }
      if (first_lane) Arrive(&shared.found[n % kParts]);
      if (part.b < 0) break;
      copier.CopyPart(part);
      position = part.position + part.num_blocks;
      offset = part.offset + part.num_blocks;
    }
    CommitCopies();
    WaitCopies<0>();  // it does not leave with arrivals to come
  } else if (position < end) {
    RingSlot<Traits::kSteps> place{0};
    const int warp = threadIdx.x / kWarp;
    const auto sync = [] { SyncNamed(kWarpsBarrier, kThreads); };
#pragma unroll 1
    for (int n = 0;; ++n) {
      const Part& part = shared.parts[n % kParts];
      WaitBarrier(&shared.found[n % kParts], n / kParts % 2, kWaitFound);
      if (part.b < 0) break;
      const PartQuery<Traits> query(params, facts, part.view, part.blocks, part.share, part.b, part.head,
                                    part.first_row, part.rows, part.first_block, part.first_block + part.num_blocks);
      sync();  // the part before this one has been read
      query.Put(shared, params.seqs.layer[part.b], sync, [&] {
        if (params.append.key == nullptr) return;
        __threadfence_block();  // ptxas lets an arrival go before the stores that it follows: the copier reads them
        Arrive(&shared.stored);
      });
      if constexpr (Traits::kSplitsColumns) {
        MainloopSm90Columns<Traits> mainloop(params, shared, part, place, kWarpsBarrier);
        mainloop.TakeQuery();
        mainloop.Run();
        mainloop.Publish(sync);
        WritePart<Traits>(params, shared, part.share, part.head, part.first_row, part.rows, part.first_block,
                          part.num_blocks, part.position, [&](int row, int d, float* max, float* sum) {
                            return mainloop.Columns(shared, row, d, max, sum);
                          });
        __syncwarp();
        if (threadIdx.x % kWarp == 0) Arrive(&shared.done[n % kParts]);
      } else {
        MainloopSm90<Traits> mainloop(params, shared, part, place);
        mainloop.TakeQuery();
        mainloop.Run();

        // The warps' outputs take the place of the next steps.
        const int first_slot = place.index;
#pragma unroll 1
        for (int i = 0; i < Traits::kOutputSteps; ++i) {
          WaitBarrier(&shared.full[place.index], place.parity, kWaitOutputs);
          place.Advance();
        }
        const auto slot_of = [&](int step) { return (first_slot + step) % Traits::kSteps; };
        const auto output = [&](int w) -> WarpOutput<Traits>& {
          return reinterpret_cast<WarpOutput<Traits>*>(
              shared.tile[slot_of(w / Traits::kStepOutputs)])[w % Traits::kStepOutputs];
        };
        mainloop.Publish(output(warp), shared.states);
        sync();
        WritePart<Traits>(params, shared, part.share, part.head, part.first_row, part.rows, part.first_block,
                          part.num_blocks, part.position, [&](int row, int d, float* max, float* sum) {
                            return SumOverWarps<Traits>(
                                shared.states, row, [&](int w) { return &output(w).o[row][d]; }, max, sum);
                          });
        __syncwarp();
        if (threadIdx.x % kWarp == 0) {
#pragma unroll 1
          for (int i = 0; i < Traits::kOutputSteps; ++i) Arrive(&shared.empty[slot_of(i)]);
          Arrive(&shared.done[n % kParts]);
        }
      }
    }
  }
  constexpr int kBlockWarps = Traits::kBlockThreads / kWarp;
  FillUnownedRows(params, static_cast<int64_t>(blockIdx.x) * kBlockWarps + threadIdx.x / kWarp,
                  static_cast<int64_t>(gridDim.x) * kBlockWarps);
  WaitForPrerequisites();  // prefill: who comes after this grid takes its end for both
}

}  // namespace turboattn::decode

#endif  // TURBOATTN_KERNELS_DECODE_KERNEL_SM90_CUH_

// Paged attention of few query rows over many keys: persistent blocks over one flat list of work, and the merge of
// units whose keys more than one block took in.
//
// A unit is (sequence, kv head, tile of rows). Its keys are cut in blocks of kDecodeKeys; all units' blocks follow each
// other in one list, cut in equal parts over the grid, so a long sequence among short ones keeps no block waiting.
// Batch-invariant calls cut each unit at fixed multiples instead, and deal these parts out. A part that is a whole unit
// writes its rows; others leave (O, max, sum) in a slot of the workspace, and Merge puts the slots of a unit together
// in their order.
#ifndef TURBOATTN_KERNELS_DECODE_KERNEL_CUH_
#define TURBOATTN_KERNELS_DECODE_KERNEL_CUH_

#include "core/heuristics.h"
#include "kernels/common/merge_parts.cuh"
#include "kernels/decode/mainloop_sm80.cuh"
#include "kernels/decode/new_rows.cuh"

namespace turboattn::decode {

// What a slot says of itself. parts == 0: it is not the first of its unit, or not in use.
struct SlotInfo {
  int parts;  // of the unit: the slots from this one on, see SlotOfPart
  int rows;
  int first_token;
  int head;       // kv head
  int first_row;  // row of the sequence, 32 bits: decode sequences are short
  int unused[3];
};
static_assert(sizeof(SlotInfo) == kSlotInts * sizeof(int32_t));

struct WorkspaceView {
  int64_t* slots_in_use;
  SlotInfo* info;
  float* data;

  __device__ explicit WorkspaceView(const PagedAttentionParams& params) {
    char* base = static_cast<char*>(params.workspace.data);
    slots_in_use = reinterpret_cast<int64_t*>(base);
    info = reinterpret_cast<SlotInfo*>(base + kWorkspaceHeader);
    data = reinterpret_cast<float*>(info + params.plan.slots);
  }
};

// Where part `part` of a unit lies whose first part is in `slot`. Parts cut by the grid: the unit goes on in slot 0 of
// each block after the first.
__device__ inline int64_t SlotOfPart(int64_t slot, int part, bool fixed_parts) {
  return fixed_parts || part == 0 ? slot + part : slot + 2 * part - 1;
}

template <int kRows, int kDim>
constexpr int64_t kSlotFloats = kRows * (kDim + 2);

// Four neighbouring columns.
template <class E>
__device__ __forceinline__ void StoreFour(void* out, DType out_dtype, int64_t element, float4 x) {
  if (out_dtype == DType::kFloat32) {
    *reinterpret_cast<float4*>(static_cast<float*>(out) + element) = x;
  } else {
    *reinterpret_cast<uint2*>(static_cast<E*>(out) + element) = {Pack<E>(x.x, x.y), Pack<E>(x.z, x.w)};
  }
}

// The share of sequence b, whose `view` and `list` go to the caller too.
template <int kRows>
__device__ Share ShareOf(const PagedAttentionParams& params, int64_t b, SequenceView* view,
                         BlockList<kDecodeKeys>* list) {
  const TokenRange range = QueryRange(params.seqs, b);
  const int64_t q_len = range.hi - range.lo;
  if (q_len == 0 || q_len > params.plan.decode_q_len) return {0, 1, 0};
  *view = ViewSequence(params, b);
  *list = BlockList<kDecodeKeys>(*view, 0, q_len - 1);
  const int blocks = list->total() > 0 ? list->total() : 1;
  const int part = params.batch_invariant
                       ? static_cast<int>(InvariantSplit(static_cast<int64_t>(blocks) * kDecodeKeys) / kDecodeKeys)
                       : 0;
  return {params.cache.num_kv_heads * Divide(q_len * GroupOf(params) + kRows - 1, kRows), blocks, part};
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocks)
    DecodeSm80(const __grid_constant__ PagedAttentionParams params) {
  using E = typename Traits::E;
  constexpr int kRows = Traits::kRows, kDim = Traits::kDim, kThreads = Traits::kThreads;
  extern __shared__ __align__(512) unsigned char s_bytes[];  // rows of up to 512 bytes
  SharedSm80<Traits>& shared = *reinterpret_cast<SharedSm80<Traits>*>(s_bytes);
  LaunchDependents();  // the merge: its blocks wait for this grid's end where there is room for them
  const WorkspaceView workspace(params);
  const int64_t batch = params.seqs.batch, group = GroupOf(params);
  const bool fixed_parts = params.batch_invariant;

  // A thread has a few sequences that follow each other, mostly one.
  SequenceView view;
  BlockList<kDecodeKeys> list;
  const int64_t each_thread = Divide(batch + kThreads - 1, kThreads);
  const int64_t my_first = threadIdx.x * each_thread, my_end = min(my_first + each_thread, batch);
  int64_t my_cost = 0, my_begin;
  for (int64_t b = my_first; b < my_end; ++b) my_cost += ShareOf<kRows>(params, b, &view, &list).cost();
  const int64_t total = ScanOverThreads<kThreads>(my_cost, &my_begin);
  const int64_t blocks = total < gridDim.x ? total : gridDim.x;  // that have work
  const int64_t each = blocks == 0 ? 0 : Divide(total, blocks), left = total - each * blocks;
  const auto begin_of = [&](int64_t block) { return block * each + (block < left ? block : left); };

  // Slots of this block that no part will claim say so; slots of other parts are set when their part is.
  if (threadIdx.x == 0) {
    if (blockIdx.x == 0) *workspace.slots_in_use = fixed_parts ? total : 2 * static_cast<int64_t>(gridDim.x);
    if (!fixed_parts) workspace.info[2 * blockIdx.x] = workspace.info[2 * blockIdx.x + 1] = SlotInfo{};
  }

  if (blockIdx.x < blocks) {
    int64_t position = begin_of(blockIdx.x);
    const int64_t end = begin_of(blockIdx.x + 1);
    // The first part's sequence is found by the thread that has it, the next ones by thread 0, which goes on from there.
    bool finds = position >= my_begin && position - my_begin < my_cost;
    int64_t b = my_first, offset = position - my_begin;
    while (position < end) {
      if (finds) {
        Share share = ShareOf<kRows>(params, b, &view, &list);
        while (offset >= share.cost()) {
          offset -= share.cost();
          share = ShareOf<kRows>(params, ++b, &view, &list);
        }
        shared.b = b;
        shared.offset = offset;
        shared.share = share;
        shared.view = view;
        shared.blocks = list;
      }
      __syncthreads();  // and the part before this one has been read
      const Share share = shared.share;
      b = shared.b;
      const int64_t unit = Divide(shared.offset, share.parts());
      const int within = static_cast<int>(shared.offset - unit * share.parts());
      const int first_block = fixed_parts ? within * share.part_blocks : within;
      int num_blocks = share.blocks - first_block;
      if (fixed_parts) {
        num_blocks = min(num_blocks, share.part_blocks);
      } else if (num_blocks > end - position) {
        num_blocks = static_cast<int>(end - position);
      }
      const int64_t heads = params.cache.num_kv_heads, tile = Divide(unit, heads), head = unit - tile * heads;
      const int64_t q_len = shared.view.q_len, first_row = tile * kRows;
      const int rows = static_cast<int>(q_len * group - first_row < kRows ? q_len * group - first_row : kRows);

      // A sequence without a key to see has one block in the list and none here.
      const int keyed = shared.blocks.total() == 0 ? 0 : num_blocks;
      MainloopSm80<Traits> mainloop(params, shared, b, head, first_block, keyed, q_len > 1 || shared.view.has_tree);
      mainloop.LookUp(0);
      QueryChunks<Traits> query(params, shared.view.first_token, head, first_row, rows);
      const NewRows<Traits> new_rows(params, shared.view, shared.blocks, b, head, first_block,
                                     first_block + num_blocks);
      FillTileRows<kRows>(params, shared.view, head, first_row, rows, &shared.rows);
      // New rows are stored before they are loaded back.
      const bool waits = new_rows.Touch(first_block + Traits::kSteps - 1);
      if (!waits) mainloop.Start();
      query.Put(shared.query());
      __syncthreads();
      new_rows.Store(shared.new_row());
      if (const QueryPrologue* prologue = PrologueOf(params)) {
        const auto element = [&](int r, int d) -> E& {
          return shared.query()[SwizzledChunk<kDim / kChunk>(r, d / kChunk) * kChunk + d % kChunk];
        };
        ApplyPrologue<E, kDim>(*prologue, b, shared.rows, 0, rows, threadIdx.x, kThreads, element);
        __syncthreads();
      }
      if constexpr (Traits::kQuantised) {
        MakeCodeQuery(shared);
        __syncthreads();
      }

      mainloop.TakeQuery();
      __syncthreads();  // the rings take the query's place, and the new rows are in the cache
      if (waits) mainloop.Start();
      mainloop.Run();
      __syncthreads();  // the rings become the exchange buffer
      mainloop.Publish();
      __syncthreads();

      const bool whole = num_blocks == share.blocks;
      const int64_t slot = fixed_parts ? position : 2 * static_cast<int64_t>(blockIdx.x) + (within == 0 ? 1 : 0);
      float* partial = workspace.data + slot * kSlotFloats<kRows, kDim>;
      if (threadIdx.x == 0 && !whole) {
        SlotInfo info = {0, rows, static_cast<int>(shared.view.first_token), static_cast<int>(head),
                         static_cast<int>(first_row)};
        if (within == 0 && fixed_parts) {
          info.parts = share.parts();
        } else if (within == 0) {
          info.parts = 1;
          for (int64_t next = blockIdx.x + 1; next < blocks && begin_of(next) < position + share.blocks; ++next)
            ++info.parts;
        }
        workspace.info[slot] = info;
      }
      if (threadIdx.x == 0 && whole && fixed_parts) workspace.info[slot] = SlotInfo{};
      const WarpResults<Traits>& results = shared.results;
      for (int i = threadIdx.x; i < kRows * (kDim / 4); i += kThreads) {
        const int row = i / (kDim / 4), d = i % (kDim / 4) * 4;
        float max = -Infinity(), sum = 0.f;
        for (int w = 0; w < kWarps; ++w) max = fmaxf(max, results.max[w][row]);
        float4 x = {0.f, 0.f, 0.f, 0.f};
        for (int w = 0; w < kWarps; ++w) {
          const float weight = results.max[w][row] == -Infinity() ? 0.f : Exp2(results.max[w][row] - max);
          const float4 o = *reinterpret_cast<const float4*>(&results.o[w][row][d]);
          sum += weight * results.sum[w][row];
          x = {x.x + weight * o.x, x.y + weight * o.y, x.z + weight * o.z, x.w + weight * o.w};
        }
        if (row >= rows) continue;
        if (whole) {
          const RowEnd end_of_row = EndRow(max, sum, params.score.sinks, shared.rows.head[row]);
          const int64_t out_row = shared.rows.token[row] * params.num_heads + shared.rows.head[row];
          const float f = end_of_row.factor;
          StoreFour<E>(params.out, params.out_dtype, out_row * kDim + d, {x.x * f, x.y * f, x.z * f, x.w * f});
          if (d == 0) params.lse[out_row] = end_of_row.lse;
        } else {
          *reinterpret_cast<float4*>(partial + row * kDim + d) = x;
          if (d == 0) {
            partial[kRows * kDim + row] = max;
            partial[kRows * kDim + kRows + row] = sum;
          }
        }
      }
      const int64_t taken = fixed_parts ? 1 : num_blocks;
      position += taken;
      finds = threadIdx.x == 0;
      if (finds) offset = shared.offset + taken;
    }
  }
  FillUnownedRows(params, static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32,
                  static_cast<int64_t>(gridDim.x) * kWarps);
}

// A block a unit of several parts: the partial results, in their order. A warp takes 64 columns of a row at a time.
// Slots that are not the first of a unit end at once.
template <class Traits>
__global__ void __launch_bounds__(kMergeThreads, 2) MergeSm80(const __grid_constant__ PagedAttentionParams params) {
  constexpr int kRows = Traits::kRows, kDim = Traits::kDim, kColumns = 64, kPieces = kDim / kColumns;
  WaitForPrerequisites();
  const WorkspaceView workspace(params);
  const bool fixed_parts = params.batch_invariant;
  const int64_t slots = fixed_parts ? *workspace.slots_in_use : 2 * static_cast<int64_t>(gridDim.x);
  const int group = GroupOf(params), warp = threadIdx.x / kWarp;
  // Parts cut by the grid: the first of a unit has its block's second slot.
  for (int64_t i = blockIdx.x; i < (fixed_parts ? slots : gridDim.x); i += gridDim.x) {
    const int64_t slot = fixed_parts ? i : 2 * i + 1;
    const SlotInfo info = workspace.info[slot];
    if (info.parts == 0) continue;
    for (int item = warp; item < info.rows * kPieces; item += kMergeThreads / kWarp) {
      const int row = item / kPieces, r = info.first_row + row, token = r / group;
      const auto part_of = [&](int part) {
        const float* data = workspace.data + SlotOfPart(slot, part, fixed_parts) * kSlotFloats<kRows, kDim>;
        return PartRow{data + row * kDim, data + kRows * kDim + row, data + kRows * kDim + kRows + row};
      };
      MergeParts<typename Traits::E, kDim, kColumns>(params, info.parts, part_of, info.first_token + token,
                                                     info.head * group + (r - token * group),
                                                     item % kPieces * kColumns);
    }
  }
}

}  // namespace turboattn::decode

#endif  // TURBOATTN_KERNELS_DECODE_KERNEL_CUH_

// Paged attention of few query rows over many keys: persistent blocks over one flat list of work, and the merge of
// units whose keys more than one block took in.
//
// A unit is (sequence, kv head, tile of rows). Its keys are cut in blocks of kDecodeKeys; all units' blocks follow each
// other in one list, with places for what a unit's start costs, cut in equal parts over the grid: neither a long
// sequence among short ones nor many short ones side by side keep a block waiting.
// Batch-invariant calls cut each unit at fixed multiples instead: a block has the parts that begin among its places. A
// part that is a whole unit writes its rows; others leave (O, max, sum) in a slot of the workspace, and the slots of a
// unit are put together in their order: by MergeDecode, or, where few units are cut (kMerges), by the last block to
// have done its part of the unit (MergeOpenUnits), without a second kernel that mostly finds nothing.
#ifndef TURBOATTN_KERNELS_DECODE_KERNEL_CUH_
#define TURBOATTN_KERNELS_DECODE_KERNEL_CUH_

#include <cfloat>

#include "core/heuristics.h"
#include "kernels/common/score.cuh"
#include "kernels/decode/mainloop_sm80.cuh"
#include "kernels/decode/new_rows.cuh"
#include "kernels/decode/work_list.h"

namespace turboattn::decode {

// For MergeDecode: what a slot says of itself. parts == 0: it is not the first of its unit, or not in use.
struct alignas(16) SlotInfo {
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
  // For MergeOpenUnits: how many parts are there of the unit that begins in block `block` and goes on.
  __device__ uint64_t* Arrivals(int block) const {
    return reinterpret_cast<uint64_t*>(info + 2 * static_cast<int64_t>(block) + 1);
  }
};

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

// Columns d to d + 3 of a row, which are unnormalised in x.
template <class E, int kDim>
__device__ __forceinline__ void FinishQuad(const PagedAttentionParams& params, int64_t token, int head, int d,
                                           float max, float sum, float4 x) {
  const RowEnd end = EndRow(max, sum, params.score.sinks, head);
  const int64_t row = token * params.num_heads + head;
  const float f = end.factor;
  StoreFour<E>(params.out, params.out_dtype, row * kDim + d, {x.x * f, x.y * f, x.z * f, x.w * f});
  if (d == 0) params.lse[row] = end.lse;
}

__device__ inline int BlocksOf(int keys) { return static_cast<int>((keys + (kDecodeKeys - 1u)) / kDecodeKeys); }
// Plain calls.
__device__ inline int KeysOf(const CallFacts& facts, int kv_len) { return min(max(kv_len, 0), facts.max_keys); }

// The blocks of sequence b, which are counted, and go to view and list unless these are null. Not inline: it is long,
// and plain calls go without it.
__device__ __noinline__ inline int ViewAny(const PagedAttentionParams& params, int b, int q_len, SequenceView* view,
                                           BlockList<kDecodeKeys>* list) {
  const SequenceView found = ViewSequence(params, b);
  const BlockList<kDecodeKeys> blocks(found, 0, q_len - 1);
  if (view != nullptr) {
    *view = found;
    *list = blocks;
  }
  return blocks.total();
}

template <int kRows>
__device__ __noinline__ void FillAnyRow(const PagedAttentionParams& params, const SequenceView& view, int head,
                                        int first_row, int rows, int r, TileRows<kRows>* tile) {
  FillTileRow<kRows>(params, view, head, first_row, rows, r, tile);
}

// What ViewAny finds in plain calls: what is the same for all sequences, by one thread at the kernel's start, and the
// rest.
__device__ inline void StartPlainView(const PagedAttentionParams& params, SequenceView* view,
                                      BlockList<kDecodeKeys>* list) {
  const bool has_tree = params.score.tree_mask != nullptr;
  view->rule = {params.score.is_causal && !has_tree, -1, -1};
  view->runs[0] = {};
  view->runs[kOwnRun].stride = 1;
  view->runs[kOwnRun].first = 0;
  view->has_tree = has_tree;
  list->seen[0] = list->common[0] = {0, 0};
  list->seen[kOwnRun].lo = list->common[kOwnRun].lo = 0;
  list->first[0] = list->first[kOwnRun] = list->count[0] = 0;
}
__device__ inline void ViewPlain(const PagedAttentionParams& params, const Share& share, int keys, SequenceView* view,
                                 BlockList<kDecodeKeys>* list) {
  view->first_token = share.first_token;
  view->q_len = share.q_len;
  view->position = int64_t{share.kv_len} - share.q_len;
  view->runs[kOwnRun].count = keys;
  // Lengths below 0 have no keys.
  const bool has_tree = params.score.tree_mask != nullptr;
  const int before = max(share.kv_len, 0) - share.q_len;
  const int common = has_tree ? before : params.score.is_causal ? before + 1 : keys;
  list->seen[kOwnRun].hi = keys;
  list->common[kOwnRun].hi = min(max(common, 0), keys);
  list->count[kOwnRun] = BlocksOf(keys);
}

// Row r of the tile; r < kRows.
template <int kRows>
__device__ inline void FillRow(const PagedAttentionParams& params, const CallFacts& facts, const SequenceView& view,
                               int head, int first_row, int rows, int r, TileRows<kRows>* tile) {
  if (!facts.plain) return FillAnyRow<kRows>(params, view, head, first_row, rows, r, tile);
  const int row = first_row + r, i = row < facts.group ? 0 : static_cast<int>(static_cast<unsigned>(row) / facts.group);
  const int keys = r < rows ? view.runs[kOwnRun].count : 0;
  const int64_t position = view.position + i;
  for (int run = 0; run < kRuns; ++run) tile->lo[run][r] = tile->hi[run][r] = 0;
  tile->hi[kOwnRun][r] = view.rule.is_causal ? static_cast<int>(Clamp(position + 1, 0, keys)) : keys;
  tile->position[r] = position;
  tile->token[r] = view.first_token + i;
  const int query_head = head * facts.group + row - i * facts.group;
  tile->head[r] = query_head;
  tile->slope[r] = r < rows && params.score.alibi_slopes != nullptr ? params.score.alibi_slopes[query_head] : 0.f;
  tile->segment[r] = 0;
}

// Places of so many units in the list.
__device__ inline int64_t CostOf(int units, int places) {
  return static_cast<int64_t>(static_cast<uint64_t>(static_cast<unsigned>(units)) * static_cast<unsigned>(places));
}

// The share of sequence b where the host knows how many units each has (CallFacts::units).
template <class Traits>
__device__ Share CountedShare(const CallFacts& facts, int b, int q_len, int units, int kv_len) {
  Share share = {};
  share.first_token = b * q_len;
  share.q_len = q_len;
  share.kv_len = kv_len;
  share.blocks = max(BlocksOf(KeysOf(facts, kv_len)), 1);
  share.units = units;
  share.cost = CostOf(units, share.Places(Traits::kStart));
  return share;
}

// The share of sequence b, which has these tokens and, in plain calls, this length.
template <class Traits>
__device__ Share ShareOf(const PagedAttentionParams& params, const CallFacts& facts, int b, int first_token, int q_len,
                         int kv_len) {
  Share share = {};
  share.first_token = first_token;
  share.q_len = q_len;
  share.kv_len = kv_len;
  if (q_len == 0 || q_len > facts.decode_q_len) return share;
  share.blocks = facts.plain ? BlocksOf(KeysOf(facts, kv_len)) : ViewAny(params, b, q_len, nullptr, nullptr);
  share.blocks = max(share.blocks, 1);
  constexpr int kRows = Traits::kRows;
  share.units = static_cast<int>(params.cache.num_kv_heads) * ((share.q_len * facts.group + kRows - 1) / kRows);
  share.cost = CostOf(share.units, share.Places(Traits::kStart));
  if (params.batch_invariant) {
    share.part_blocks =
        static_cast<int>(InvariantSplit(static_cast<int64_t>(share.blocks) * kDecodeKeys) / kDecodeKeys);
    share.parts = (share.blocks + share.part_blocks - 1) / share.part_blocks;
  }
  return share;
}

template <class Traits>
__device__ Share ShareOf(const PagedAttentionParams& params, const CallFacts& facts, int b) {
  const Sequences& seqs = params.seqs;
  const int kv_len = facts.plain ? seqs.kv_lens[b] : 0;
  if (facts.units > 0) return CountedShare<Traits>(facts, b, static_cast<int>(seqs.uniform_q_len), facts.units, kv_len);
  if (seqs.q_ranges == nullptr) {
    const int q_len = static_cast<int>(seqs.uniform_q_len);
    return ShareOf<Traits>(params, facts, b, b * q_len, q_len, kv_len);
  }
  const int tokens = static_cast<int>(seqs.num_tokens);
  const int begin = min(max(seqs.q_ranges[2 * static_cast<int64_t>(b)], 0), tokens);
  const int end = min(max(seqs.q_ranges[2 * static_cast<int64_t>(b) + 1], begin), tokens);
  return ShareOf<Traits>(params, facts, b, begin, end - begin, kv_len);
}

template <class Traits>
__device__ bool HasFixedParts(const PagedAttentionParams& params, const CallFacts& facts) {
  return !Traits::kMerges && facts.units == 0 && params.batch_invariant;
}

// From place `offset` of sequence b's share to the sequence that has the place, and where in its share. False: none
// has, which only a schedule can ask for.
template <class Traits>
__device__ bool Seek(const PagedAttentionParams& params, const CallFacts& facts, int* b, Share* share,
                     int64_t* offset) {
  while (*offset < 0 || *offset >= share->cost) {
    const bool back = *offset < 0;
    if (!back) *offset -= share->cost;
    *b += back ? -1 : 1;
    if (*b == static_cast<int>(params.seqs.batch)) return false;
    Share next = ShareOf<Traits>(params, facts, *b);
    next.first_slot = back ? share->first_slot - next.Slots() : share->first_slot + share->Slots();
    *share = next;
    if (back) *offset += share->cost;
  }
  return true;
}

// The same, to the next place that a part begins at; places up to `end` are the block's.
template <class Traits>
__device__ bool SeekPart(const PagedAttentionParams& params, const CallFacts& facts, int* b, Share* share,
                         int64_t* offset, int64_t* position, int64_t end, PartPlace* at) {
  const bool fixed_parts = HasFixedParts<Traits>(params, facts);
  while (Seek<Traits>(params, facts, b, share, offset)) {
    const int places = share->Places(Traits::kStart);
    at->unit = static_cast<int>(Divide(*offset, places));
    const int place = static_cast<int>(*offset - int64_t{at->unit} * places) - Traits::kStart;  // < 0: in the start
    at->block = max(place, 0);
    if (fixed_parts) {
      at->block = (at->block + share->part_blocks - 1) / share->part_blocks * share->part_blocks;
    }
    const int skipped = min(at->block, share->blocks) - place;
    *offset += skipped;
    *position += skipped;
    if (*position >= end) return false;
    if (at->block >= share->blocks) continue;
    const int64_t most = fixed_parts ? int64_t{share->part_blocks} : end - *position;
    at->count = static_cast<int>(min(int64_t{share->blocks} - at->block, most));
    return true;
  }
  return false;
}

// What a search begins with, loaded before all else: the lengths of the thread's first sequence and of the call's.
struct FirstLengths {
  int own = 0, call = 0;

  __device__ FirstLengths(const PagedAttentionParams& params, const CallFacts& facts) {
    const unsigned first = threadIdx.x * facts.each_thread;
    if (facts.units == 0) return;
    if (first < static_cast<unsigned>(params.seqs.batch)) own = params.seqs.kv_lens[first];
    call = params.seqs.kv_lens[0];
  }
};

// How a block finds its part of the list: each thread has a few sequences that follow each other, mostly one.
template <class Traits>
struct ListSearch {
  int b = 0;         // the thread's last sequence
  Share share = {};  // of that
  int64_t cost = 0;  // of all that the thread has
  int64_t begin = 0;
  int64_t total;
  int64_t total_slots = 0;  // fixed parts
  bool all_even = false;

  __device__ ListSearch(const PagedAttentionParams& params, const CallFacts& facts, const FirstLengths& lengths) {
    const unsigned batch = static_cast<unsigned>(params.seqs.batch);
    const unsigned first = threadIdx.x * facts.each_thread;
    const int end = static_cast<int>(min(first + facts.each_thread, batch)), units = facts.units;
    const bool fixed_parts = HasFixedParts<Traits>(params, facts);
    b = static_cast<int>(first);
    bool same = true;
    int64_t slots = 0;
    if (units > 0) {
      const int q_len = static_cast<int>(params.seqs.uniform_q_len);
      const Share even = CountedShare<Traits>(facts, 0, q_len, units, lengths.call);
      if (b < end) {
        int kv_len = lengths.own;
#pragma unroll 1
        while (true) {
          share = CountedShare<Traits>(facts, b, q_len, units, kv_len);
          same = same && share.blocks == even.blocks;
          cost += share.cost;
          if (++b == end) break;
          kv_len = params.seqs.kv_lens[b];
        }
      }
      if (facts.even.units > 0) all_even = __syncthreads_and(same);
      if (all_even) {  // what comes before a thread's sequences is known without a sum
        total = static_cast<uint64_t>(even.cost) * batch;
        begin = static_cast<uint64_t>(even.cost) * first;
        --b;
        return;
      }
    } else {
#pragma unroll 1
      for (; b < end; ++b) {
        const int64_t before = share.cost;
        share = ShareOf<Traits>(params, facts, b);
        same = same && (b == static_cast<int>(first) || share.cost == before);
        cost += share.cost;
        slots += share.Slots();
      }
    }
    const bool has_any = b > static_cast<int>(first);
    --b;
    total = ScanOverThreads<Traits::kBlockThreads>(cost, &begin);
    if (fixed_parts) {
      int64_t first_slot = 0;
      __syncthreads();  // the scan before this one has been read
      total_slots = ScanOverThreads<Traits::kBlockThreads>(slots, &first_slot);
      share.first_slot = first_slot + slots - share.Slots();
    }
    if (facts.units == 0 && facts.even.units > 0) {
      all_even = __syncthreads_and(!has_any || (same && share.cost * batch == total));
    }
  }
  __device__ bool Has(int64_t place) const { return place >= begin && place - begin < cost; }
  // Of a place from the start of the last sequence's share, negative before it.
  __device__ int64_t Offset(int64_t place) const { return place - (begin + cost - share.cost); }
};

// An entry of a schedule, as a decode block reads it: it may hold anything.
struct alignas(16) ScheduledPart {
  int grid;                        // the blocks that it was made for; 0: it says nothing
  int count;                       // of the block's places in the list
  int b, offset;                   // the first one's sequence, and where in its share it is
  int first_token, q_len, kv_len;  // of that sequence
  // Of the last place's unit, if its keys begin in this block: blocks that have some of them. kMerges: in the low half;
  // in the other, so many blocks before this one the first place's unit begins.
  int parts;
};
static_assert(sizeof(ScheduledPart) == kScheduleInts * sizeof(int32_t) && kMaxDecodeBlocks < 1 << 15);

// The schedule of a grid of `grid` blocks: a block for each entry, those past the grid too.
template <class Traits>
__global__ void __launch_bounds__(Traits::kBlockThreads)
    PlanDecode(const __grid_constant__ PagedAttentionParams params, const __grid_constant__ CallFacts call, int grid) {
  CallFacts facts = call;
  facts.plain = true;  // no other calls have a schedule: ViewAny is left out
  const ListSearch<Traits> mine(params, facts, FirstLengths(params, facts));
  const WorkList list(mine.total, grid, Traits::kStart, facts.even, mine.all_even);
  const int block = static_cast<int>(blockIdx.x);
  ScheduledPart& part = reinterpret_cast<ScheduledPart*>(params.new_schedule)[block];
  int16_t* const halves = reinterpret_cast<int16_t*>(&part.parts);
  const bool fits = block < grid && list.total <= INT_MAX;
  if (!fits || block >= list.blocks) {
    if (threadIdx.x == 0) part = ScheduledPart{fits ? grid : 0};
    return;
  }
  int64_t begin = 0, end = 0;
  list.Range(block, facts.even, &begin, &end);
  if (mine.Has(begin)) {
    int b = mine.b;
    Share share = mine.share;
    int64_t offset = mine.Offset(begin);
    Seek<Traits>(params, facts, &b, &share, &offset);
    part.grid = grid;
    part.count = static_cast<int>(end - begin);
    part.b = b;
    part.offset = static_cast<int>(offset);
    part.first_token = share.first_token;
    part.q_len = share.q_len;
    part.kv_len = share.kv_len;
    const int64_t first = begin - offset % share.Places(Traits::kStart) + Traits::kStart;  // the unit's
    if (Traits::kMerges) halves[1] = static_cast<int16_t>(max(block - list.BlockOf(first), 0));
  }
  if (mine.Has(end - 1)) {
    int b = mine.b;
    Share share = mine.share;
    int64_t offset = mine.Offset(end - 1);
    Seek<Traits>(params, facts, &b, &share, &offset);
    const int places = share.Places(Traits::kStart);
    const int64_t last = end - 1 - offset % places + places - 1;  // the unit's
    const int parts = list.BlockOf(last) - block + 1;
    if (Traits::kMerges) {
      halves[0] = static_cast<int16_t>(parts);
    } else {
      part.parts = parts;
    }
  }
}

// The rows of a unit whose parts are the blocks of a cluster. Each block finishes some quads of four columns: the
// others send it theirs.
template <class Traits>
class ClusterMerge {
 public:
  __device__ ClusterMerge(const CallFacts& facts, SharedSm80<Traits>& shared, int rows)
      : shared_(shared),
        rows_(rows),
        shift_(facts.cluster_shift),
        rank_(blockIdx.x & ((1 << shift_) - 1)),
        log_quads_(kLogRowQuads + (rows > 1) + (rows > 2) + (rows > 4) + (rows > 8) - shift_) {}

  // Quad i of the unit's rows, of this block's part.
  __device__ void Send(int i, float4 x, float max, float sum) const {
    const int to = i >> log_quads_, at = rank_ * (Quads() + 1) + (i & (Quads() - 1));
    StorePeer(PeerAddress(SharedAddress(&shared_.parts.x[at]), to), x);
    StorePeer(PeerAddress(SharedAddress(&shared_.parts.state[at]), to), float2{max, sum});
  }

  // After all have sent. As many lanes as there are parts take one each; the order is theirs.
  __device__ void Finish(const PagedAttentionParams& params) const {
    const int parts = 1 << shift_, part = threadIdx.x & (parts - 1), quads = Quads();
#pragma unroll 1
    for (int base = 0; base < quads; base += Traits::kThreads >> shift_) {
      const int mine = base + (threadIdx.x >> shift_), at = part * (quads + 1) + min(mine, quads - 1);
      const float2 state = shared_.parts.state[at];
      float4 x = shared_.parts.x[at];
      float max = state.x;
#pragma unroll 1
      for (int step = 1; step < parts; step *= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, step));
      const float weight = state.x == -Infinity() ? 0.f : Exp2(state.x - max);
      float sum = weight * state.y;
      x = {weight * x.x, weight * x.y, weight * x.z, weight * x.w};
#pragma unroll 1
      for (int step = 1; step < parts; step *= 2) {
        sum += __shfl_xor_sync(~0u, sum, step);
        x.x += __shfl_xor_sync(~0u, x.x, step);
        x.y += __shfl_xor_sync(~0u, x.y, step);
        x.z += __shfl_xor_sync(~0u, x.z, step);
        x.w += __shfl_xor_sync(~0u, x.w, step);
      }
      const int i = rank_ * quads + mine, row = i / kQuads, d = i % kQuads * 4;
      if (part != 0 || mine >= quads || row >= rows_) continue;
      FinishQuad<typename Traits::E, Traits::kDim>(params, shared_.rows.token[row], shared_.rows.head[row], d, max, sum,
                                                   x);
    }
  }

 private:
  static constexpr int kQuads = Traits::kDim / 4;  // of a row
  static constexpr int kLogRowQuads = kQuads == 16 ? 4 : kQuads == 32 ? 5 : 6;
  static_assert(1 << kLogRowQuads == kQuads && Traits::kRows <= 16);

  __device__ int Quads() const { return 1 << log_quads_; }

  SharedSm80<Traits>& shared_;
  const int rows_, shift_, rank_;
  const int log_quads_;  // that a block finishes, of as many rows as the next power of two
};

// Four columns of a row of the part: what the warps have, the first of which warp w has at o(w).
template <class Traits, class Output>
__device__ float4 SumOverWarps(const WarpState<Traits>& states, int row, Output o, float* max_out, float* sum_out) {
  float max = -Infinity(), sum = 0.f;
  for (int w = 0; w < kWarps; ++w) max = fmaxf(max, states.max[w][row]);
  float4 x = {0.f, 0.f, 0.f, 0.f};
  for (int w = 0; w < kWarps; ++w) {
    const float weight = states.max[w][row] == -Infinity() ? 0.f : Exp2(states.max[w][row] - max);
    const float4 y = *reinterpret_cast<const float4*>(o(w));
    sum += weight * states.sum[w][row];
    x = {x.x + weight * y.x, x.y + weight * y.y, x.z + weight * y.z, x.w + weight * y.w};
  }
  *max_out = max;
  *sum_out = sum;
  return x;
}

// A block's places in the list, and where the first one is: threads that `finds` is true in, one at most, have its
// sequence, or one that Seek goes on from.
struct BlockWork {
  int64_t position = 0, end = 0;
  bool finds = false;
  int b = 0;
  Share share = {};
  int64_t offset = 0;
};

// By the whole block. `lone`: the thread that is to know a schedule's first part. Leaves last_parts, first_owner and,
// without a schedule, the list. The block's arrivals have begun and no unit is open; or slots of this block that no
// part will claim say so, those of other parts are set when their part is. meanwhile(): what does not depend on
// lengths, while these are on their way.
template <class Traits, class Shared, class Meanwhile>
__device__ BlockWork FindWork(const PagedAttentionParams& params, const CallFacts& facts, Shared& shared, int lone,
                              Meanwhile meanwhile) {
  const int block = static_cast<int>(blockIdx.x), batch = static_cast<int>(params.seqs.batch);
  const FirstLengths lengths(params, facts);
  ScheduledPart scheduled = {};
  if (facts.schedule != nullptr) scheduled = reinterpret_cast<const ScheduledPart*>(facts.schedule)[block];
  // Which of the pages' names the block needs depends on lengths. The grid has them brought to L2 in the meantime,
  // those of a very large table in part.
  constexpr int kLine = 32;  // entries
  const int entry = (block * Traits::kBlockThreads + threadIdx.x) * kLine;
  if (entry < facts.table_entries) Prefetch(params.seqs.page_table + entry);
  if (entry < batch) Prefetch(params.seqs.layer + entry);
  const WorkspaceView workspace(params);
  if (!Traits::kMerges && threadIdx.x == Traits::kThreads - 1 && !params.batch_invariant) {
    workspace.info[2 * blockIdx.x] = workspace.info[2 * blockIdx.x + 1] = SlotInfo{};
  }
  meanwhile();
  BlockWork work;
  if (scheduled.grid == static_cast<int>(gridDim.x)) {
    // Any contents name rows, keys and slots that exist, and come to an end: that of the last sequence.
    work.finds = threadIdx.x == lone;
    work.b = scheduled.b;
    work.end = work.b >= 0 && work.b < batch ? scheduled.count : 0;
    work.offset = max(scheduled.offset, 0);
    if (work.finds && work.position < work.end) {
      if (facts.units > 0) {
        const int q_len = static_cast<int>(params.seqs.uniform_q_len);
        work.share = CountedShare<Traits>(facts, work.b, q_len, facts.units, scheduled.kv_len);
      } else {
        const int tokens = static_cast<int>(params.seqs.num_tokens);
        const int first_token = min(max(scheduled.first_token, 0), tokens);
        const int q_len = min(max(scheduled.q_len, 0), tokens - first_token);
        work.share = ShareOf<Traits>(params, facts, work.b, first_token, q_len, scheduled.kv_len);
      }
    }
    if (work.finds) {
      const int parts = Traits::kMerges ? scheduled.parts & 0xffff : scheduled.parts;
      shared.last_parts = min(max(parts, 1), static_cast<int>(gridDim.x) - block);
      if constexpr (Traits::kMerges) shared.open.first_owner = block - min(max(scheduled.parts >> 16, 0), block);
    }
  } else {
    const ListSearch<Traits> mine(params, facts, lengths);
    const WorkList list(mine.total, static_cast<int>(gridDim.x), Traits::kStart, facts.even, mine.all_even);
    if (block < list.blocks) list.Range(block, facts.even, &work.position, &work.end);
    // By a thread that mostly has no sequence: who finds the first part has more to do.
    if (threadIdx.x == Traits::kThreads - 1) {
      shared.list = list;
      shared.last_parts = 0;
      if constexpr (Traits::kMerges) shared.open.first_owner = -1;
      if (blockIdx.x == 0 && !Traits::kMerges) {
        *workspace.slots_in_use = params.batch_invariant ? mine.total_slots : 2 * static_cast<int64_t>(gridDim.x);
      }
    }
    // The first part's sequence is found by the thread that has it.
    work.finds = mine.Has(work.position);
    work.share = mine.share;
    work.b = mine.b;
    work.offset = mine.Offset(work.position);
  }
  if constexpr (Traits::kMerges) {
    if (threadIdx.x == Traits::kThreads - 1) {
      StoreWord(workspace.Arrivals(block), work.position < work.end ? ArrivalWord::kBegun : 0);
      shared.open.unit[0].state = shared.open.unit[1].state = OpenUnit::kNone;
    }
  }
  return work;
}

// The query tile of a part and its new rows, on their way.
template <class Traits>
class PartQuery {
 public:
  using E = typename Traits::E;

  __device__ PartQuery(const PagedAttentionParams& params, const CallFacts& facts, const SequenceView& view,
                       const BlockList<kDecodeKeys>& blocks, const Share& share, int b, int head, int first_row,
                       int rows, int first_block, int end_block)
      : params_(params),
        facts_(facts),
        view_(view),
        first_token_(share.first_token),
        b_(b),
        head_(head),
        first_row_(first_row),
        rows_(rows),
        one_token_(share.q_len == 1),
        turns_pair_(facts.turns && one_token_ && threadIdx.x < params.prologue.rope.dim / 2),
        chunks_(params, facts.group, share.first_token, head, first_row, rows, one_token_),
        rope_step_(facts.by_table && turns_pair_ ? RopeStep(params.prologue.rope.turns, threadIdx.x) : 0),
        new_rows_(params, facts, view, blocks, b, head, first_block, end_block) {}

  // Leaves the tile's rows in place, and the query for TakeQuery(). sync(): a barrier of the kThreads threads that call
  // this; stored(): the thread's new rows are in memory. A barrier before the tile is used.
  template <class Shared, class Sync, class Stored>
  __device__ void Put(Shared& shared, int32_t layer, Sync sync, Stored stored) const {
    constexpr int kRows = Traits::kRows, kDim = Traits::kDim, kThreads = Traits::kThreads;
    // Opaque: else what does not depend on the part is worked out at the kernel's start, before its first loads.
    const int thread = static_cast<int>(Opaque(threadIdx.x)), rows = static_cast<int>(Opaque(rows_));
    // Instructions of several warps arrive at the same time: each has work of its own, as far as it goes.
    const int r = kThreads - 1 - thread;
    if (r < kRows) FillRow<kRows>(params_, facts_, view_, head_, first_row_, rows, r, &shared.rows);
    const RopeParams& rope = params_.prologue.rope;
    // The turns of a sequence's only token are for all rows of the query, and its key: a pair a thread.
    if (turns_pair_) {
      const int j = thread;
      const int64_t token = first_token_, at = view_.position;
      shared.turns()[j] = rope.turns != nullptr
                              ? RopeTurn(rope, RopeAngle(rope_step_, RopePosition(rope, j, token, at)))
                              : AnyTurn(rope, b_, j, token, at);
    }
    chunks_.Put(shared.query(), thread);
    sync();
    new_rows_.Store(layer, shared.new_row(), shared.turns(), one_token_ && facts_.same_rope);
    stored();
    if (PrologueOf(params_) != nullptr) {
      const auto element = [&](int r, int d) -> E& {
        return shared.query()[SwizzledChunk<kDim / kChunk>(r, d / kChunk) * kChunk + d % kChunk];
      };
      const auto turn = [&](int r, int j) {
        return one_token_ ? shared.turns()[j] : AnyTurn(rope, b_, j, shared.rows.token[r], shared.rows.position[r]);
      };
      // The other two warps have a token's K and V.
      if (params_.append.key != nullptr && one_token_) {
        constexpr int kFirst = kThreads / 2;
        if (thread < kFirst) {
          ApplyPrologue<E, kDim, kFirst>(params_.prologue, shared.rows, 0, rows, thread, element, turn);
        }
      } else {
        ApplyPrologue<E, kDim, kThreads>(params_.prologue, shared.rows, 0, rows, thread, element, turn);
      }
      sync();
    }
    if constexpr (Traits::kQuantised) {
      MakeCodeQuery<Traits>(shared.query(), shared.code_query, rows);
      sync();
    }
  }

 private:
  const PagedAttentionParams& params_;
  const CallFacts& facts_;
  const SequenceView& view_;
  const int first_token_, b_, head_, first_row_, rows_;
  const bool one_token_, turns_pair_;
  const QueryChunks<Traits> chunks_;
  const uint64_t rope_step_;
  const NewRows<Traits> new_rows_;
};

// By one thread, with WritePart: a part that is not all of its unit. Not inline, nor is ArriveAtUnit: most parts go
// without them.
template <class Shared>
__device__ __noinline__ void OpenPart(Shared& shared, const Share& share, int head, int first_row, int rows,
                                      int first_block, int64_t position) {
  const int block = static_cast<int>(blockIdx.x), owner = shared.open.first_owner;
  OpenUnit unit = {rows, share.first_token, head, first_row, block, 0, OpenUnit::kHere};
  if (first_block == 0) {
    unit.parts = shared.last_parts;
    if (unit.parts == 0) unit.parts = shared.list.BlockOf(position + share.blocks - 1) - block + 1;
  } else {
    unit.owner = owner >= 0 ? owner : shared.list.BlockOf(position - first_block);
  }
  shared.open.unit[first_block == 0 ? 1 : 0] = unit;
}

// A part that is the whole unit writes its rows, others their slot of the workspace. row_at(row, d, &max, &sum): four
// columns of what the block's warps have.
template <class Traits, class Shared, class RowAt>
__device__ void WritePart(const PagedAttentionParams& params, const Shared& shared, const Share& share, int head,
                          int first_row, int rows, int first_block, int num_blocks, int64_t position, RowAt row_at) {
  constexpr int kRows = Traits::kRows, kDim = Traits::kDim;
  const WorkspaceView workspace(params);
  const bool whole = num_blocks == share.blocks, fixed_parts = !Traits::kMerges && params.batch_invariant;
  int64_t slot = 2 * static_cast<int64_t>(blockIdx.x) + (first_block == 0 ? 1 : 0);
  if (fixed_parts) {
    const int64_t unit = int64_t{first_row / kRows} * params.cache.num_kv_heads + head;  // of the sequence's
    slot = share.first_slot + unit * share.parts + first_block / share.part_blocks;
  }
  float* partial = workspace.data + slot * kSlotFloats<kRows, kDim>;
  if (!Traits::kMerges && threadIdx.x == 0 && !whole) {
    SlotInfo info = {0, rows, share.first_token, head, first_row};
    if (first_block == 0 && fixed_parts) {
      info.parts = share.parts;
    } else if (first_block == 0) {
      const int parts = shared.last_parts, block = static_cast<int>(blockIdx.x);
      info.parts = parts > 0 ? parts : shared.list.BlockOf(position + share.blocks - 1) - block + 1;
    }
    workspace.info[slot] = info;
  }
  if (threadIdx.x == 0 && whole && fixed_parts) workspace.info[slot] = SlotInfo{};
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * (kDim / 4); i += Traits::kThreads) {
    const int row = i / (kDim / 4), d = i % (kDim / 4) * 4;
    float max, sum;
    const float4 x = row_at(row, d, &max, &sum);
    if (whole) {
      FinishQuad<typename Traits::E, kDim>(params, shared.rows.token[row], shared.rows.head[row], d, max, sum, x);
    } else {
      *reinterpret_cast<float4*>(partial + row * kDim + d) = x;
      if (d == 0) {
        partial[kRows * kDim + row] = max;
        partial[kRows * kDim + kRows + row] = sum;
      }
    }
  }
}

// What some parts of a row add up to.
struct RowSum {
  float max = -FLT_MAX;  // in exponents of 2; finite, so that a part without a key (-Inf) has the weight 0
  float sum = 0.f;
  float4 x = {0.f, 0.f, 0.f, 0.f};

  __device__ void Add(float part_max, float part_sum, float4 part_x) {
    const float both = fmaxf(max, part_max), old = Exp2(max - both), weight = Exp2(part_max - both);
    max = both;
    sum = sum * old + weight * part_sum;
    x = {x.x * old + weight * part_x.x, x.y * old + weight * part_x.y, x.z * old + weight * part_x.z,
         x.w * old + weight * part_x.w};
  }
};

// Adds up the parts of a unit. By kThreads threads, in `room`, which holds the weights of all parts and copies of some
// at a time.
template <class Traits>
__device__ void MergeUnit(const PagedAttentionParams& params, const CallFacts& facts, const OpenUnit& unit,
                          float* room) {
  constexpr int kRows = Traits::kRows, kDim = Traits::kDim, kLanes = kDim / 4, kGroups = Traits::kThreads / kLanes;
  constexpr int kRowsEach = (kRows + kGroups - 1) / kGroups, kRoom = sizeof(SharedSm80<Traits>::rings) / sizeof(float);
  static_assert(kRows * (kMaxDecodeBlocks + 8 + kDim) <= kRoom, "a part at a time");
  static_assert(kDim % (kWarp * 4) == 0, "warps copy whole rows");
  const WorkspaceView workspace(params);
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, quad = threadIdx.x % kLanes;
  const auto part_data = [&](int part) {
    return workspace.data + SlotOfPart(2 * int64_t{unit.owner} + 1, part, false) * kSlotFloats<kRows, kDim>;
  };
  const int weights = (2 + unit.parts + 3) / 4 * 4;  // of a row: its maximum and sum, then the parts' weights
  const int rows = unit.rows, part_floats = rows * kDim;
  float* copies = room + rows * weights;
  const int at_once = (kRoom - rows * weights) / part_floats;
  float4 x[kRowsEach] = {};
#pragma unroll 1
  for (int base = 0; base < unit.parts; base += at_once) {
    const int count = min(at_once, unit.parts - base);
#pragma unroll 1
    for (int part = warp; part < count; part += kWarps) {
      const float* from = part_data(base + part) + lane * 4;
      const uint32_t to = SharedAddress(copies + part * part_floats + lane * 4);
#pragma unroll 4
      for (int i = 0; i < part_floats; i += kWarp * 4) CopyAsync16(to + i * 4, from + i, true);
    }
    CommitCopies();
    if (base == 0) {
#pragma unroll 1
      for (int row = warp; row < rows; row += kWarps) {
        float* of_row = room + row * weights;
        RowSum all;
#pragma unroll 1
        for (int part = lane; part < unit.parts; part += kWarp) {
          const float* states = part_data(part) + kRows * kDim + row;
          const float max = __ldcg(states), sum = __ldcg(states + kRows);
          all.Add(max, sum, float4{});
          of_row[2 + part] = max;
        }
#pragma unroll
        for (int step = 1; step < kWarp; step *= 2) {
          const float max = __shfl_xor_sync(~0u, all.max, step), sum = __shfl_xor_sync(~0u, all.sum, step);
          all.Add(max, sum, float4{});
        }
#pragma unroll 1
        for (int part = lane; part < unit.parts; part += kWarp) of_row[2 + part] = Exp2(of_row[2 + part] - all.max);
        if (lane == 0) *reinterpret_cast<float2*>(of_row) = {all.max, all.sum};
      }
    }
    WaitCopies<0>();
    __syncthreads();
#pragma unroll
    for (int k = 0; k < kRowsEach; ++k) {
      const int row = threadIdx.x / kLanes + k * kGroups;
      if (row >= rows) continue;
      const float4* copied = reinterpret_cast<const float4*>(copies + row * kDim) + quad;
      const float* weight = room + row * weights + 2 + base;
#pragma unroll 8
      for (int part = 0; part < count; ++part) {
        const float w = weight[part];
        const float4 y = copied[part * (part_floats / 4)];
        x[k] = {x[k].x + w * y.x, x[k].y + w * y.y, x[k].z + w * y.z, x[k].w + w * y.w};
      }
    }
    if (base + at_once < unit.parts) __syncthreads();
  }
#pragma unroll
  for (int k = 0; k < kRowsEach; ++k) {
    const int row = threadIdx.x / kLanes + k * kGroups;
    if (row >= rows) continue;
    const float2 state = *reinterpret_cast<const float2*>(room + row * weights);
    const int r = unit.first_row + row, token = r < facts.group ? 0 : r / facts.group;
    const int head = unit.head * facts.group + (r - token * facts.group);
    FinishQuad<typename Traits::E, kDim>(params, int64_t{unit.first_token} + token, head, quad * 4, state.x, state.y,
                                         x[k]);
  }
  __syncthreads();  // before what is next
}

// By one thread, after a barrier that follows WritePart.
__device__ __noinline__ inline void ArriveAtUnit(const PagedAttentionParams& params, const CallFacts& facts,
                                                 OpenUnit* unit) {
  uint64_t* arrivals = WorkspaceView(params).Arrivals(unit->owner);
  const uint64_t mine = ArrivalWord::Of(unit->parts);
  uint64_t now = AddInOrder(arrivals, mine) + mine;  // after the part's slot, before the others'
  // An arrival before the owner has begun is lost, so it is made again. Blocks begin in the order of their numbers, and
  // nobody waits for one of a higher number. A schedule may name an owner that has also come to its end.
  constexpr int kTries = 1000;  // of about a microsecond
  for (int tries = 0; !ArrivalWord::HasBegun(now) && (facts.schedule == nullptr || tries < kTries); ++tries) {
    if (ArrivalWord::HasBegun(LoadInOrder(arrivals))) now = AddInOrder(arrivals, mine) + mine;
  }
  unit->state = OpenUnit::kLeft;
  if (ArrivalWord::IsLast(now)) {
    StoreWord(arrivals, 0);
    unit->parts = min(ArrivalWord::Parts(now), static_cast<int>(gridDim.x) - unit->owner);
    unit->state = OpenUnit::kMerges;
  }
}

// After a barrier that follows a part: the unit that has come from blocks before this one is done here, and mostly the
// block before is the last to arrive there.
__device__ inline void ArriveEarly(const PagedAttentionParams& params, const CallFacts& facts, OpenUnits& open) {
  OpenUnit& unit = open.unit[0];
  if (threadIdx.x == kWarp && unit.state == OpenUnit::kHere) ArriveAtUnit(params, facts, &unit);
}

// At a block's end: the units that it shares with others, at most one that has come from blocks before it and one that
// goes on. Whoever is the last to arrive at a unit merges it: nobody waits for another block's keys. By threads that
// have written their parts; `room` is theirs after a barrier.
template <class Traits>
__device__ void MergeOpenUnits(const PagedAttentionParams& params, const CallFacts& facts, OpenUnits& open,
                               float* room) {
  __syncthreads();
  const int i = threadIdx.x;
  const OpenUnit::State states[2] = {open.unit[0].state, open.unit[1].state};
  if (i == 0 && states[1] == OpenUnit::kNone) StoreWord(WorkspaceView(params).Arrivals(blockIdx.x), 0);  // nobody comes
  if (states[0] == OpenUnit::kHere || states[1] == OpenUnit::kHere) {
    __syncthreads();  // all have read that
    if (i < 2 && open.unit[i].state == OpenUnit::kHere) ArriveAtUnit(params, facts, &open.unit[i]);
    __syncthreads();
  }
#pragma unroll 1
  for (int k = 0; k < 2; ++k) {
    if (open.unit[k].state == OpenUnit::kMerges) MergeUnit<Traits>(params, facts, open.unit[k], room);
  }
}

template <class Traits>
__global__ void __launch_bounds__(Traits::kThreads, Traits::kBlocks)
    DecodeSm80(const __grid_constant__ PagedAttentionParams params, const __grid_constant__ CallFacts facts) {
  constexpr int kRows = Traits::kRows, kDim = Traits::kDim, kThreads = Traits::kThreads;
  extern __shared__ __align__(512) unsigned char s_bytes[];  // rows of up to 512 bytes
  SharedSm80<Traits>& shared = *reinterpret_cast<SharedSm80<Traits>*>(s_bytes);
  LaunchDependents();  // the merge, where it is a kernel: its blocks wait for this grid's end where there is room
  const int heads = static_cast<int>(params.cache.num_kv_heads), group = facts.group;

  const auto start_view = [&] {
    if (facts.plain && threadIdx.x == kThreads / 2) StartPlainView(params, &shared.view, &shared.blocks);
  };

  // A cluster knows its unit. Else a schedule knows the block's part of the list, or the block finds it.
  const bool clustered = !Traits::kMerges && facts.cluster_shift >= 0;
  BlockWork work;
  bool moves = true;
  if (clustered) {
    const FirstLengths lengths(params, facts);
    // Which pages it is depends on the length; where they are named does not.
    constexpr int kLine = 32;  // entries
    const int entry = threadIdx.x * kLine;
    if (entry < facts.table_entries) Prefetch(params.seqs.page_table + entry);
    if (threadIdx.x == kThreads - 1) Prefetch(params.seqs.layer);
    start_view();
    work.finds = threadIdx.x == 0;
    if (work.finds) {
      work.share = facts.units > 0 ? CountedShare<Traits>(facts, 0, static_cast<int>(params.seqs.uniform_q_len),
                                                          facts.units, lengths.call)
                                   : ShareOf<Traits>(params, facts, 0);
    }
    work.end = 1;
  } else {
    work = FindWork<Traits>(params, facts, shared, 0, start_view);
  }
  auto& [position, end, finds, b, share, offset] = work;

  // The next parts' sequences are found by thread 0, which goes on from there.
  while (position < end) {
    if (finds) {
      const int from = b;
      const bool found = clustered || SeekPart<Traits>(params, facts, &b, &share, &offset, &position, end, &shared.at);
      moves = found && (moves || b != from);
      if (!found) b = -1;
      shared.b = b;
      shared.offset = offset;
      shared.position = position;
      shared.end = end;
      if (moves) {
        shared.share = share;
        if (share.cost == 0) {
          // A cluster without work.
        } else if (facts.plain) {
          ViewPlain(params, share, KeysOf(facts, share.kv_len), &shared.view, &shared.blocks);
        } else {
          ViewAny(params, b, share.q_len, &shared.view, &shared.blocks);
        }
      }
    }
    __syncthreads();  // and the part before this one has been read
    if constexpr (Traits::kMerges) ArriveEarly(params, facts, shared.open);
    share = shared.share;
    b = shared.b;
    offset = shared.offset;
    if (b < 0) break;
    int unit, first_block, num_blocks;
    if (clustered) {
      const unsigned peers = 1u << facts.cluster_shift, rank = blockIdx.x & (peers - 1), blocks = share.blocks;
      unit = static_cast<int>(blockIdx.x >> facts.cluster_shift);
      first_block = static_cast<int>(blocks * rank >> facts.cluster_shift);
      num_blocks = static_cast<int>(blocks * (rank + 1) >> facts.cluster_shift) - first_block;  // may be 0
      if (unit >= share.units) break;  // the sequence has fewer rows than it could
    } else {
      unit = shared.at.unit;
      first_block = shared.at.block;
      num_blocks = shared.at.count;
    }
    // A sequence without a key to see has one block in the list and none here.
    const int keyed = shared.blocks.total() == 0 ? 0 : num_blocks;
    const FirstEntries entries(params, facts, shared.blocks, b, share.kv_len, first_block, keyed);
    const int tile = unit < heads ? 0 : unit / heads, head = unit - tile * heads, first_row = tile * kRows;
    const int rows = min(share.q_len * group - first_row, kRows);
    const PartQuery<Traits> query(params, facts, shared.view, shared.blocks, share, b, head, first_row, rows,
                                  first_block, first_block + num_blocks);
    MainloopSm80<Traits> mainloop(params, facts, shared, entries, b, head, first_block, keyed,
                                  share.q_len > 1 || shared.view.has_tree);
    mainloop.Run(FirstNewBlock(params, facts, shared.view, shared.blocks) - first_block, [&] {
      // Opaque: else 64 bits are made of it as soon as it is asked for, and the first loads wait.
      query.Put(shared, static_cast<int32_t>(Opaque(mainloop.layer)), [] { __syncthreads(); }, [] {});
      mainloop.TakeQuery();
      __syncthreads();  // the rings take the query's place, and the new rows are in the cache
    });
    __syncthreads();  // the rings become the exchange buffer
    if (clustered) ArriveAtCluster();
    mainloop.Publish(shared.outputs[threadIdx.x / 32], shared.states);
    // Read once more: registers were the mainloop's. Before the barrier: then the next sequence may take its place.
    share = shared.share;
    b = shared.b;
    offset = shared.offset;
    position = shared.position;
    end = shared.end;
    __syncthreads();

    const auto row_at = [&](int row, int d, float* max, float* sum) {
      return SumOverWarps<Traits>(shared.states, row, [&](int w) { return &shared.outputs[w].o[row][d]; }, max, sum);
    };
    if (clustered) {
      const ClusterMerge<Traits> cluster(facts, shared, rows);
      WaitForCluster();  // for the others' memory
#pragma unroll 1
      for (int i = threadIdx.x; i < rows * (kDim / 4); i += kThreads) {
        float max, sum;
        const float4 x = row_at(i / (kDim / 4), i % (kDim / 4) * 4, &max, &sum);
        cluster.Send(i, x, max, sum);
      }
      ArriveAtCluster();
      WaitForCluster();
      cluster.Finish(params);
      break;
    }
    if constexpr (Traits::kMerges) {
      if (threadIdx.x == 0 && num_blocks < share.blocks) {
        OpenPart(shared, share, head, first_row, rows, first_block, position);
      }
    }
    WritePart<Traits>(params, shared, share, head, first_row, rows, first_block, num_blocks, position, row_at);
    position += num_blocks;
    offset += num_blocks;
    finds = threadIdx.x == 0;
    moves = false;
  }
  if constexpr (Traits::kMerges) {
    MergeOpenUnits<Traits>(params, facts, shared.open, reinterpret_cast<float*>(s_bytes));
  }
  FillUnownedRows(params, static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32,
                  static_cast<int64_t>(gridDim.x) * kWarps);
  WaitForPrerequisites();  // prefill: who comes after this grid takes its end for both
}

// A block a unit of several parts and row: blockIdx.y. Each of kGroups groups of threads adds every kGroups-th part, in
// their order, then the first adds up what the others have. Slots that are not the first of a unit end at once.
template <class Traits>
__global__ void __launch_bounds__(kMergeThreads)
    MergeDecode(const __grid_constant__ PagedAttentionParams params, const __grid_constant__ CallFacts facts) {
  constexpr int kRows = Traits::kRows, kDim = Traits::kDim, kLanes = kDim / 4, kGroups = kMergeThreads / kLanes;
  __shared__ float4 s_x[kGroups][kLanes];
  __shared__ float2 s_state[kGroups];
  WaitForPrerequisites();
  const WorkspaceView workspace(params);
  const bool fixed_parts = params.batch_invariant;
  const int64_t slots = fixed_parts ? *workspace.slots_in_use : static_cast<int64_t>(gridDim.x);
  const int row = blockIdx.y, group = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  // Parts cut by the grid: the first of a unit has its block's second slot.
  for (int64_t i = blockIdx.x; i < slots; i += gridDim.x) {
    const int64_t slot = fixed_parts ? i : 2 * i + 1;
    const SlotInfo info = workspace.info[slot];
    if (info.parts == 0 || row >= info.rows) continue;
    RowSum all;
#pragma unroll 2
    for (int part = group; part < info.parts; part += kGroups) {
      const float* data = workspace.data + SlotOfPart(slot, part, fixed_parts) * kSlotFloats<kRows, kDim>;
      const float* states = data + kRows * kDim + row;
      all.Add(states[0], states[kRows], reinterpret_cast<const float4*>(data + row * kDim)[lane]);
    }
    s_x[group][lane] = all.x;
    if (lane == 0) s_state[group] = {all.max, all.sum};
    __syncthreads();
    if (group == 0) {
#pragma unroll 1
      for (int g = 1; g < min(kGroups, info.parts); ++g) all.Add(s_state[g].x, s_state[g].y, s_x[g][lane]);
      const int r = info.first_row + row, token = r < facts.group ? 0 : r / facts.group;
      const int head = info.head * facts.group + (r - token * facts.group);
      FinishQuad<typename Traits::E, kDim>(params, int64_t{info.first_token} + token, head, lane * 4, all.max, all.sum,
                                           all.x);
    }
    __syncthreads();  // before the next unit's
  }
}

}  // namespace turboattn::decode

#endif  // TURBOATTN_KERNELS_DECODE_KERNEL_CUH_

// One sequence of an attention call as the CUDA kernels see it: which rows it owns, where they stand, and its keys as
// one or two runs. The same functions read paged calls and plain arrays, so that a kernel is written once.
#ifndef TURBOATTN_KERNELS_COMMON_SEQUENCE_CUH_
#define TURBOATTN_KERNELS_COMMON_SEQUENCE_CUH_

#include <climits>
#include <cstdint>

#include "core/params.h"
#include "kernels/common/mask.h"
#include "kernels/common/page_walk.h"

namespace turboattn {

// The page sizes that PagedKeys takes: a group of 8 keys lies on one page.
inline bool HasGroups(const KvCache& cache) {
  return cache.page_size >= 8 && (cache.page_size & (cache.page_size - 1)) == 0;
}

// Keys 0 .. count - 1; key j stands at position first + j * stride.
struct KeyRun {
  int count = 0;
  int stride = 1;
  int64_t first = 0;

  // Number of keys before `position`.
  __device__ int Before(int64_t position) const {
    if (position <= first) return 0;
    const int64_t distance = position - first;
    const int64_t n = stride == 1 ? distance : Divide(distance + stride - 1, stride);
    return static_cast<int>(n < count ? n : count);
  }
  __device__ int64_t Position(int j) const { return first + static_cast<int64_t>(j) * stride; }
};

// Keys of one run, by index: 0 <= lo <= hi. Compared by differences: sums may pass INT_MAX.
struct RunRange {
  int lo;
  int hi;

  __device__ bool Holds(int key) const { return key >= lo && key < hi; }
  // All of `count` keys from `first`.
  __device__ bool HoldsAll(int first, int count) const { return first >= lo && hi - first >= count; }
  // One or more of them.
  __device__ bool Meets(int first, int count) const { return first < hi && lo - first < count; }
};

// The keys of a shared prefix (run 0, mostly empty), then the sequence's own (run 1).
constexpr int kRuns = 2;
constexpr int kOwnRun = 1;

struct SequenceView {
  int64_t first_token = 0;  // row of the query array, without the head axis
  int64_t q_len = 0;
  int64_t position = 0;  // of token 0
  MaskRule rule = {};
  KeyRun runs[kRuns];
  bool has_tree = false;  // new tokens see each other by tree_mask instead of by causality

  __device__ RunRange Clip(int run, KeyRange positions) const {
    if (runs[run].count == 0) return {0, 0};  // mostly, there is no prefix
    const int lo = runs[run].Before(positions.lo), hi = runs[run].Before(positions.hi);
    return {lo, hi < lo ? lo : hi};
  }
  // Keys that one or more of tokens t0 .. t1 see.
  __device__ RunRange UnionOf(int run, int64_t t0, int64_t t1) const {
    return Clip(run, {VisibleKeys(rule, position + t0).lo, VisibleKeys(rule, position + t1).hi});
  }
  // Keys that all of them see, tree_mask and segments aside.
  __device__ RunRange CommonTo(int run, int64_t t0, int64_t t1) const {
    int64_t end = VisibleKeys(rule, position + t0).hi;
    if (has_tree && position < end) end = position;  // the new tokens are looked at one by one
    return Clip(run, {VisibleKeys(rule, position + t1).lo, end});
  }
};

// Blocks of keys that a tile of rows takes in: those of run 0, then those of run 1, numbered from 0.
template <int kKeys>
struct BlockList {
  RunRange seen[kRuns];    // by one or more rows of the tile
  RunRange common[kRuns];  // by all of them
  int first[kRuns];        // first block, in units of kKeys keys of the run
  int count[kRuns];

  BlockList() = default;
  __device__ BlockList(const SequenceView& view, int64_t t0, int64_t t1) {
    for (int run = 0; run < kRuns; ++run) {
      seen[run] = t1 < t0 ? RunRange{0, 0} : view.UnionOf(run, t0, t1);
      common[run] = t1 < t0 ? RunRange{0, 0} : view.CommonTo(run, t0, t1);
      first[run] = seen[run].lo / kKeys;
      count[run] = seen[run].hi > seen[run].lo ? (seen[run].hi - 1) / kKeys + 1 - first[run] : 0;
    }
  }
  // Keys are looked at row by row in every block: not all rows of the tile see what the list was made for.
  __device__ void ForgetCommon() {
    for (int run = 0; run < kRuns; ++run) common[run] = {0, 0};
  }
  __device__ int total() const { return count[0] + count[1]; }
  __device__ int RunOf(int block) const { return block < count[0] ? 0 : 1; }
  __device__ int FirstKey(int block) const {
    return (block < count[0] ? first[0] + block : first[1] + block - count[0]) * kKeys;
  }
};

__device__ inline SequenceView ViewSequence(const PagedAttentionParams& params, int64_t b) {
  const Sequences& seqs = params.seqs;
  const int64_t page_size = params.cache.page_size;
  const TokenRange q = QueryRange(seqs, b);
  const int64_t rank = CpRank(seqs, b);
  SequenceView view;
  view.first_token = q.lo;
  view.q_len = q.hi - q.lo;
  const int64_t start = FirstPosition(seqs);
  view.position = start + seqs.kv_lens[b] - view.q_len;
  view.has_tree = params.score.tree_mask != nullptr;
  view.rule = MakeMaskRule(params.score.is_causal && !view.has_tree, params.score.window, b);
  view.runs[0].count = static_cast<int>(PrefixKeyCount(seqs, page_size));
  KeyRun& own = view.runs[kOwnRun];
  own.stride = seqs.cp_size;
  if (rank != kUnmapped) {
    own.first = start + rank;
    own.count = static_cast<int>(LocalKeyCount(KeyLimit(seqs, b, page_size), rank, seqs.cp_size));
  }
  return view;
}

// first_key: if asked for, the row of the sequence's first key, ragged or in its own array.
__device__ inline SequenceView ViewSequence(const LinearAttentionParams& params, int64_t b,
                                            int64_t* first_key = nullptr) {
  SequenceView view;
  KeyRun& keys = view.runs[kOwnRun];
  if (params.ragged) {
    const TokenRange q = ClampRange(params.q_ranges, b, params.num_tokens);
    const TokenRange kv = ClampRange(params.kv_ranges, b, params.num_keys);
    view.first_token = q.lo;
    view.q_len = q.hi - q.lo;
    keys.count = static_cast<int>(kv.hi - kv.lo);
    view.position = keys.count - view.q_len;
    view.rule = MakeMaskRule(params.score.is_causal, params.score.window, b);
    if (first_key != nullptr) *first_key = kv.lo;
  } else {
    view.first_token = b * params.num_tokens;
    view.q_len = params.num_tokens;
    keys.count = static_cast<int>(params.num_keys);
    // Behind one branch: most calls have none of them.
    const int32_t* const window = params.score.window;
    view.rule = {params.score.is_causal, -1, -1};
    if (params.query_lens != nullptr || params.kv_lens != nullptr || params.query_offset != nullptr ||
        window != nullptr) {
      if (params.query_lens != nullptr) view.q_len = Clamp(params.query_lens[b], 0, params.num_tokens);
      if (params.kv_lens != nullptr) keys.count = static_cast<int>(Clamp(params.kv_lens[b], 0, params.num_keys));
      if (params.query_offset != nullptr) view.position = params.query_offset[b];
      view.rule = MakeMaskRule(params.score.is_causal, window, b);
    }
    if (first_key != nullptr) *first_key = 0;
  }
  return view;
}

// Where the keys of one run are found in a pool: 8 keys that start at a multiple of 8 lie on one page, in consecutive
// rows that start at a multiple of 8. Such a group is named by its first row divided by 8, which 32 bits hold for pools
// of up to 2^34 rows (a terabyte at 64 bytes a row).
constexpr int kNoGroup = -1;

struct PagedKeys {
  const KvCache* cache;
  const int32_t* pages;
  int32_t layer;
  int64_t head;

  // The table's entry for key j, which must be below the run's count. Apart from Group() so that the load can be early.
  // Pages are powers of two.
  __device__ int32_t Entry(int j) const { return pages[j >> (__ffs(static_cast<int>(cache->page_size)) - 1)]; }
  __device__ int Group(int j, int32_t entry) const {
    const int64_t page = PageOf(*cache, layer, entry);
    return page == kUnmapped
               ? kNoGroup
               : static_cast<int>(CacheRow(*cache, page, head, j & (static_cast<int>(cache->page_size) - 1)) / 8);
  }
};

__device__ inline PagedKeys KeysOf(const PagedAttentionParams& params, int64_t b, int64_t head, int run) {
  const Sequences& seqs = params.seqs;
  return {&params.cache, run == kOwnRun ? seqs.page_table + b * seqs.max_pages : seqs.prefix_pages, seqs.layer[b],
          head};
}

// The scale of kv head `head` of sequence b in an fp8 cache's parameters, [L,K]. No key of a sequence whose layer does
// not exist is on a page, so any scale will do for its zeros.
__device__ inline float HeadScale(const PagedAttentionParams& params, const void* scales, int64_t b, int64_t head) {
  const int64_t layer = params.seqs.layer[b];
  if (layer < 0 || layer >= params.cache.num_layers) return 0.f;
  return static_cast<const float*>(scales)[layer * params.cache.num_kv_heads + head];
}

// Row of key 0 in plain arrays, whose keys are num_kv_heads rows apart; pages have none.
__device__ inline int64_t FirstKeyRow(const PagedAttentionParams&, int64_t, int64_t) { return 0; }
__device__ inline int64_t FirstKeyRow(const LinearAttentionParams& params, int64_t b, int64_t head) {
  const int64_t first = params.ragged ? ClampRange(params.kv_ranges, b, params.num_keys).lo : b * params.num_keys;
  return first * params.num_kv_heads + head;
}

// What the kernels ask of either kind of call.
TA_HD const void* KeyArray(const PagedAttentionParams& params) { return params.cache.key; }
TA_HD const void* KeyArray(const LinearAttentionParams& params) { return params.key; }
TA_HD const void* ValueArray(const PagedAttentionParams& params) { return params.cache.value; }
TA_HD const void* ValueArray(const LinearAttentionParams& params) { return params.value; }
TA_HD int64_t BatchOf(const PagedAttentionParams& params) { return params.seqs.batch; }
TA_HD int64_t BatchOf(const LinearAttentionParams& params) { return params.batch; }
TA_HD int64_t KvHeadsOf(const PagedAttentionParams& params) { return params.cache.num_kv_heads; }
TA_HD int64_t KvHeadsOf(const LinearAttentionParams& params) { return params.num_kv_heads; }
__device__ inline int GroupOf(const PagedAttentionParams& params) {
  return static_cast<int>(params.num_heads) / static_cast<int>(params.cache.num_kv_heads);
}
__device__ inline int GroupOf(const LinearAttentionParams& params) {
  return static_cast<int>(params.num_heads) / static_cast<int>(params.num_kv_heads);
}
// Keys that follow each other in the pool; plain arrays have no such pages.
TA_HD int64_t PageSizeOf(const PagedAttentionParams& params) { return params.cache.page_size; }
TA_HD int64_t PageSizeOf(const LinearAttentionParams&) { return 0; }
TA_HD int64_t ValueDimOf(const PagedAttentionParams& params) { return params.cache.value_dim; }
TA_HD int64_t ValueDimOf(const LinearAttentionParams& params) { return params.value_dim; }
// Rows of the query array, without the head axis.
TA_HD int64_t QueryRows(const PagedAttentionParams& params) { return params.seqs.num_tokens; }
TA_HD int64_t QueryRows(const LinearAttentionParams& params) {
  return params.ragged ? params.num_tokens : params.batch * params.num_tokens;
}
// Query tokens of every sequence when they all have the same number, else 0.
TA_HD int64_t UniformQueryLength(const PagedAttentionParams& params) {
  return params.seqs.q_ranges == nullptr ? params.seqs.uniform_q_len : 0;
}
TA_HD int64_t UniformQueryLength(const LinearAttentionParams& params) { return params.ragged ? 0 : params.num_tokens; }
TA_HD const int32_t* QueryRanges(const PagedAttentionParams& params) { return params.seqs.q_ranges; }
TA_HD const int32_t* QueryRanges(const LinearAttentionParams& params) { return params.q_ranges; }

}  // namespace turboattn

#endif  // TURBOATTN_KERNELS_COMMON_SEQUENCE_CUH_

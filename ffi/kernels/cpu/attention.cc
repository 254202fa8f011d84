// Attention on the CPU: which tile of rows meets which keys, on which thread, and in which order partial results merge.
//
// A unit is one tile of up to kTileRows (token, head) rows of one sequence and kv head. Its keys are cut at multiples
// of kSplitKeys; each split makes a partial result and the partials merge in ascending order, whether one thread walks
// the splits or many share them. Results therefore have the same bits for any number of threads, and a row's bits
// depend on its own sequence only, so batch_invariant costs nothing here.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "kernels/common/mask.h"
#include "kernels/common/page_walk.h"
#include "kernels/common/softmax.h"
#include "kernels/cpu/attention_tile.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/prologue.h"

namespace turboattn::cpu {
namespace {

// Keys of a split. At D = 128 float32 a split reads 512 KB, about 20 us; starting and merging one of 4 rows moves 4 KB.
constexpr int64_t kSplitKeys = 512;

// One sequence of the call.
struct SequenceView {
  int64_t first_token = 0;  // row of the packed query array
  int64_t q_len = 0;
  int64_t position = 0;  // of the first token
  MaskRule rule = {};
  // Its keys, by index: first those of the shared prefix, at positions 0, 1, ...; then its own local keys, the j-th at
  // start + j * cp_size + cp_rank.
  int64_t prefix_keys = 0;
  int64_t start = 0;
  int64_t limit = 0;  // own global keys
  int64_t cp_rank = 0;
  int64_t cp_size = 1;

  // Smallest range of key indices that holds every key with a position in `positions`.
  KeyRange Indices(KeyRange positions) const {
    const KeyRange prefix = ClampKeys(positions, prefix_keys);
    const KeyRange own = LocalKeys(ClampKeys({positions.lo - start, positions.hi - start}, limit), cp_rank, cp_size);
    const int64_t lo = prefix.lo < prefix.hi ? prefix.lo : prefix_keys + own.lo;
    const int64_t hi = own.lo < own.hi ? prefix_keys + own.hi : prefix.hi;
    return {lo, std::max(lo, hi)};
  }
};

// Where keys come from: plain arrays or pages.
class KeySource {
 public:
  virtual ~KeySource() = default;
  virtual SequenceView Sequence(int64_t b) const = 0;
  // Fills *block with existing keys from the indices [begin, end) of sequence b and kv head `head`; returns where to go
  // on. No key: there is none left.
  virtual int64_t Collect(int64_t b, int64_t head, int64_t begin, int64_t end, KeyBlock* block) const = 0;
};

class LinearSource final : public KeySource {
 public:
  explicit LinearSource(const LinearAttentionParams& params) : params_(params) {}

  SequenceView Sequence(int64_t b) const override {
    SequenceView view;
    if (params_.ragged) {
      const TokenRange q = ClampRange(params_.q_ranges, b, params_.num_tokens);
      const TokenRange kv = ClampRange(params_.kv_ranges, b, params_.num_keys);
      view.first_token = q.lo;
      view.q_len = q.hi - q.lo;
      view.limit = kv.hi - kv.lo;
      view.position = view.limit - view.q_len;
    } else {
      view.first_token = b * params_.num_tokens;
      view.q_len =
          params_.query_lens != nullptr ? Clamp(params_.query_lens[b], 0, params_.num_tokens) : params_.num_tokens;
      view.limit = params_.kv_lens != nullptr ? Clamp(params_.kv_lens[b], 0, params_.num_keys) : params_.num_keys;
      view.position = params_.query_offset != nullptr ? params_.query_offset[b] : 0;
    }
    view.rule = MakeMaskRule(params_.score.is_causal, params_.score.window, b);
    return view;
  }

  int64_t Collect(int64_t b, int64_t head, int64_t begin, int64_t end, KeyBlock* block) const override {
    const int64_t first = params_.ragged ? ClampRange(params_.kv_ranges, b, params_.num_keys).lo : b * params_.num_keys;
    const int64_t key_bytes = RowBytes(params_.dtype, params_.head_dim),
                  value_bytes = RowBytes(params_.dtype, params_.value_dim);
    const int64_t stop = std::min(end, begin + kBlockKeys);
    for (int64_t j = begin; j < stop; ++j) {
      const int64_t i = j - begin, row = (first + j) * params_.num_kv_heads + head;
      block->key[i] = static_cast<const char*>(params_.key) + row * key_bytes;
      block->value[i] = static_cast<const char*>(params_.value) + row * value_bytes;
      block->position[i] = j;
      if (params_.segment_ids_kv != nullptr) block->segment[i] = params_.segment_ids_kv[first + j];
    }
    block->count = static_cast<int>(stop - begin);
    return stop;
  }

 private:
  const LinearAttentionParams& params_;
};

class PagedSource final : public KeySource {
 public:
  explicit PagedSource(const PagedAttentionParams& params)
      : cache_(params.cache), seqs_(params.seqs), score_(params.score) {}

  SequenceView Sequence(int64_t b) const override {
    const TokenRange q = QueryRange(seqs_, b);
    const int64_t rank = CpRank(seqs_, b);
    SequenceView view;
    view.first_token = q.lo;
    view.q_len = q.hi - q.lo;
    view.prefix_keys = PrefixKeyCount(seqs_, cache_.page_size);
    view.start = FirstPosition(seqs_);
    view.position = view.start + seqs_.kv_lens[b] - view.q_len;
    view.cp_size = seqs_.cp_size;
    view.cp_rank = rank == kUnmapped ? 0 : rank;
    view.limit = rank == kUnmapped ? 0 : KeyLimit(seqs_, b, cache_.page_size);
    view.rule = MakeMaskRule(score_.is_causal && score_.tree_mask == nullptr, score_.window, b);
    return view;
  }

  int64_t Collect(int64_t b, int64_t head, int64_t begin, int64_t end, KeyBlock* block) const override {
    block->count = 0;
    const int64_t prefix = PrefixKeyCount(seqs_, cache_.page_size);
    if (begin < prefix) {
      const Run run = {seqs_.prefix_pages, seqs_.layer[b], head, 0, 1};
      begin = CollectRun(run, begin, std::min(end, prefix), block);
      if (block->count > 0)
        return begin;  // a block does not reach into the sequence's own keys: its positions must ascend
    }
    const Run run = {seqs_.page_table + b * seqs_.max_pages, seqs_.layer[b], head,
                     FirstPosition(seqs_) + CpRank(seqs_, b), seqs_.cp_size};
    return prefix + CollectRun(run, begin - prefix, end - prefix, block);
  }

 private:
  // Keys in consecutive slots of the pages of one table.
  struct Run {
    const int32_t* pages;
    int32_t layer;
    int64_t head;
    int64_t position;  // of key 0
    int64_t stride;    // between positions
  };

  int64_t CollectRun(const Run& run, int64_t begin, int64_t end, KeyBlock* block) const {
    const int64_t key_bytes = RowBytes(cache_.kv_dtype, cache_.head_dim),
                  value_bytes = RowBytes(cache_.kv_dtype, cache_.value_dim);
    const int64_t pair_bytes = 2 * RowBytes(cache_.dtype, 1);
    const bool shared = cache_.value == nullptr;
    int64_t j = begin;
    int count = 0;
    while (j < end && count < kBlockKeys) {
      const int64_t slot = j % cache_.page_size;
      const int64_t page = PageOf(cache_, run.layer, run.pages[j / cache_.page_size]);
      if (page == kUnmapped) {
        j += cache_.page_size - slot;
        continue;
      }
      const int64_t present = std::min({cache_.page_size - slot, end - j, int64_t{kBlockKeys - count}});
      const int64_t row = CacheRow(cache_, page, run.head, slot);
      for (int64_t i = 0; i < present; ++i, ++count) {
        block->key[count] = static_cast<const char*>(cache_.key) + (row + i) * key_bytes;
        // Without a value pool, values are the first Dv columns of the keys.
        block->value[count] =
            shared ? block->key[count] : static_cast<const char*>(cache_.value) + (row + i) * value_bytes;
        block->position[count] = run.position + (j + i) * run.stride;
        if (HasRowParams(cache_.kv_dtype)) {
          block->key_params[count] = static_cast<const char*>(cache_.key_params) + (row + i) * pair_bytes;
          block->value_params[count] = shared ? block->key_params[count]
                                              : static_cast<const char*>(cache_.value_params) + (row + i) * pair_bytes;
        } else if (cache_.kv_dtype == DType::kFloat8E4M3) {
          const int64_t scale = run.layer * cache_.num_kv_heads + run.head;
          block->key_params[count] = static_cast<const float*>(cache_.key_params) + scale;
          block->value_params[count] =
              shared ? block->key_params[count] : static_cast<const float*>(cache_.value_params) + scale;
        }
      }
      j += present;
    }
    block->count = count;
    return std::min(j, end);
  }

  const KvCache& cache_;
  const Sequences& seqs_;
  const ScoreParams& score_;
};

// What both kinds of attention have in common.
struct Problem {
  const KeySource* source;
  TileSpec spec;
  ScoreParams score;
  QueryPrologue prologue;
  const void* query;             // [rows, H, D] E
  const int32_t* query_segment;  // [rows]; may be null
  void* out;                     // [rows, H, Dv] out_dtype
  float* lse;                    // [rows, H]
  DType out_dtype;
  int64_t batch;
  int64_t query_rows;  // T, dense B*T
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t group() const { return num_heads / num_kv_heads; }
};

struct Unit {
  int64_t b;
  int64_t head;       // kv head
  int64_t first_row;  // (token, head of the group) row of the sequence, token-major
  int rows;
  KeyRange keys;  // indices of keys that some row may see
  int64_t first_split() const { return keys.lo / kSplitKeys; }
  int64_t num_splits() const { return keys.hi > keys.lo ? (keys.hi - 1) / kSplitKeys - first_split() + 1 : 0; }
  // Time in arbitrary units. Few rows are bound by reading keys, which costs as much as computing about 8 rows.
  double cost() const { return static_cast<double>(keys.hi - keys.lo + kBlockKeys) * (rows + 8); }
};

// Softmax-weighted value sums of a tile's rows over some of their keys.
struct Partial {
  float* max;  // [rows]
  float* sum;  // [rows]
  float* acc;  // [rows, Padded(Dv)]
};

// One allocation, cut in pieces that start at multiples of 64 bytes.
class Scratch {
 public:
  template <class T>
  void Plan(T** piece, int64_t count) {
    pieces_.push_back({piece, bytes_});
    bytes_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
  }
  bool Allocate() {
    memory_.reset(new (std::nothrow) char[bytes_ + 64]);
    if (memory_ == nullptr) return false;
    char* base = memory_.get() + (64 - reinterpret_cast<uintptr_t>(memory_.get()) % 64) % 64;
    for (const Piece& piece : pieces_) {
      char* address = base + piece.offset;
      std::memcpy(piece.where, &address, sizeof(address));  // *where is a T*; all object pointers look alike
    }
    return true;
  }

 private:
  struct Piece {
    void* where;
    int64_t offset;
  };
  std::vector<Piece> pieces_;
  int64_t bytes_ = 0;
  std::unique_ptr<char[]> memory_;
};

void PlanPartial(Scratch& scratch, Partial* partial, int rows, int64_t value_dim) {
  scratch.Plan(&partial->max, rows);
  scratch.Plan(&partial->sum, rows);
  scratch.Plan(&partial->acc, rows * Padded(value_dim));
}

// A thread's working memory.
struct Worker {
  Tile tile = {};
  Partial part = {};   // of one split
  Partial total = {};  // of the splits so far
  SinCos* turns = nullptr;
  KeyBlock blocks[2];  // the one being worked on and the next
  Scratch scratch;

  bool Allocate(const Problem& problem, int rows) {
    const int64_t width = Padded(problem.spec.head_dim), value_width = Padded(problem.spec.value_dim);
    scratch.Plan(&tile.query, rows * width);
    scratch.Plan(&tile.visible_lo, rows);
    scratch.Plan(&tile.visible_hi, rows);
    scratch.Plan(&tile.position, rows);
    scratch.Plan(&tile.slope, rows);
    scratch.Plan(&tile.segment, rows);
    scratch.Plan(&tile.tree, rows);
    scratch.Plan(&tile.score, int64_t{rows} * kBlockKeys);
    scratch.Plan(&tile.alpha, rows);
    scratch.Plan(&tile.key, kBlockKeys * width);
    scratch.Plan(&tile.key_t, kBlockKeys * width);
    scratch.Plan(&tile.value, kBlockKeys * value_width);
    scratch.Plan(&tile.zeros, value_width);
    scratch.Plan(&tile.ones, rows);
    scratch.Plan(&tile.key_t_rows, width);
    PlanPartial(scratch, &part, rows, problem.spec.value_dim);
    PlanPartial(scratch, &total, rows, problem.spec.value_dim);
    scratch.Plan(&turns, problem.prologue.rope.dim / 2);
    if (!scratch.Allocate()) return false;
    // Columns that pad rows are read and never written.
    std::fill(tile.query, tile.query + rows * width, 0.f);
    std::fill(tile.zeros, tile.zeros + value_width, 0.f);
    std::fill(tile.ones, tile.ones + rows, 1.f);
    if (width != problem.spec.head_dim) std::fill(tile.key, tile.key + kBlockKeys * width, 0.f);
    if (value_width != problem.spec.value_dim) std::fill(tile.value, tile.value + kBlockKeys * value_width, 0.f);
    for (int64_t d = 0; d < width; ++d) tile.key_t_rows[d] = tile.key_t + d * kBlockKeys;
    return true;
  }
};

void Clear(const Partial& partial, int rows, int64_t value_dim) {
  for (int r = 0; r < rows; ++r) {
    partial.max[r] = EmptySoftmax().max;
    partial.sum[r] = EmptySoftmax().sum;
  }
  std::memset(partial.acc, 0, sizeof(float) * rows * Padded(value_dim));
}

// *total takes in the next partial result. Called in ascending order of splits.
void Fold(const Partial& total, const Partial& next, int rows, int64_t value_dim) {
  const int64_t width = Padded(value_dim);
  for (int r = 0; r < rows; ++r) {
    SoftmaxState state = {total.max[r], total.sum[r]};
    const MergeWeights weights = MergeSoftmax(&state, {next.max[r], next.sum[r]});
    total.max[r] = state.max;
    total.sum[r] = state.sum;
    float* acc = total.acc + r * width;
    const float* other = next.acc + r * width;
    for (int64_t d = 0; d < width; ++d) acc[d] = acc[d] * weights.first + other[d] * weights.second;
  }
}

// log(p + 1) / log(m) for tokens past the trained length m, else 1.
float LognFactor(const QueryPrologue& prologue, int64_t token, int64_t sequence_position) {
  if (prologue.logn == 0) return 1.f;
  const RopeParams& rope = prologue.rope;
  const int64_t position = rope.positions != nullptr ? rope.positions[token * rope.position_axes] : sequence_position;
  const int64_t reached = prologue.logn_zero_based ? position : position + 1;
  if (reached <= prologue.logn) return 1.f;
  return static_cast<float>(std::log(static_cast<double>(reached)) / std::log(static_cast<double>(prologue.logn)));
}

template <class E>
void LoadQuery(const Problem& problem, const SequenceView& sequence, const Unit& unit, Worker& worker) {
  const QueryPrologue& prologue = problem.prologue;
  const int64_t dim = problem.spec.head_dim;
  int64_t turned_token = -1;
  float logn = 1.f;
  for (int r = 0; r < unit.rows; ++r) {
    const int64_t i = (unit.first_row + r) / problem.group();
    const int64_t head = unit.head * problem.group() + (unit.first_row + r) % problem.group();
    const int64_t token = sequence.first_token + i, position = sequence.position + i;
    float* row = worker.tile.query + r * Padded(dim);
    LoadWithBias(static_cast<const E*>(problem.query) + (token * problem.num_heads + head) * dim, prologue.bias,
                 head * dim, prologue.bias_dtype, dim, row);
    if (token != turned_token) {
      MakeTurns(prologue.rope, unit.b, token, position, worker.turns);
      logn = LognFactor(prologue, token, position);
      turned_token = token;
    }
    Rotate(prologue.rope, worker.turns, row);
    if (logn != 1.f) {
      for (int64_t d = 0; d < dim; ++d) row[d] = MulRn(row[d], logn);
    }
    for (int64_t d = 0; d < dim; ++d)
      row[d] = RoundTo<E>(row[d]);  // one rounding, after the whole prologue; exact without one
  }
}

void StartUnit(const Problem& problem, const Unit& unit, Worker& worker) {
  const SequenceView sequence = problem.source->Sequence(unit.b);
  Tile& tile = worker.tile;
  tile.rows = unit.rows;
  tile.tree_start = sequence.position;
  switch (problem.spec.dtype) {
    case DType::kBfloat16:
      LoadQuery<bf16>(problem, sequence, unit, worker);
      break;
    case DType::kFloat16:
      LoadQuery<fp16>(problem, sequence, unit, worker);
      break;
    default:
      LoadQuery<float>(problem, sequence, unit, worker);
      break;
  }
  for (int r = 0; r < unit.rows; ++r) {
    const int64_t i = (unit.first_row + r) / problem.group();
    const KeyRange visible = VisibleKeys(sequence.rule, sequence.position + i);
    tile.position[r] = sequence.position + i;
    tile.visible_lo[r] = visible.lo;
    tile.visible_hi[r] = visible.hi;
    if (problem.spec.has_alibi)
      tile.slope[r] = problem.score.alibi_slopes[unit.head * problem.group() + (unit.first_row + r) % problem.group()];
    if (problem.spec.has_segments) tile.segment[r] = problem.query_segment[sequence.first_token + i];
    if (problem.spec.has_tree)
      tile.tree[r] = problem.score.tree_mask + (sequence.first_token + i) * problem.score.tree_columns;
  }
}

// The started unit's rows over the keys of split number `split` of the unit (0 is the first).
void AttendSplit(const Problem& problem, TakeBlock take, const Unit& unit, int64_t split, Worker& worker,
                 const Partial& result) {
  Clear(result, unit.rows, problem.spec.value_dim);
  Tile tile = worker.tile;
  tile.max = result.max;
  tile.sum = result.sum;
  tile.acc = result.acc;
  const int64_t start = (unit.first_split() + split) * kSplitKeys;
  const int64_t end = std::min(start + kSplitKeys, unit.keys.hi);
  KeyBlock *block = &worker.blocks[0], *next = &worker.blocks[1];
  int64_t j = problem.source->Collect(unit.b, unit.head, std::max(start, unit.keys.lo), end, block);
  while (block->count > 0) {
    j = problem.source->Collect(unit.b, unit.head, j, end, next);
    take(problem.spec, *block, *next, tile);
    std::swap(block, next);
  }
}

template <class Out>
void WriteRow(const float* acc, float factor, int64_t elements, Out* out) {
  for (int64_t d = 0; d < elements; ++d) out[d] = FromFloat<Out>(acc[d] * factor);
}

void FinishUnit(const Problem& problem, const Unit& unit, const Partial& total) {
  const SequenceView sequence = problem.source->Sequence(unit.b);
  const int64_t dim = problem.spec.value_dim;
  for (int r = 0; r < unit.rows; ++r) {
    const int64_t token = sequence.first_token + (unit.first_row + r) / problem.group();
    const int64_t head = unit.head * problem.group() + (unit.first_row + r) % problem.group();
    SoftmaxState state = {total.max[r], total.sum[r]};
    const bool empty = state.sum == 0.f;  // no visible key: zeros and the sink as it is, be it infinite
    const float* sink = problem.score.sinks != nullptr ? &problem.score.sinks[head] : nullptr;
    const float weight = sink != nullptr ? AddSink(&state, *sink) : 1.f;
    const float factor = empty ? 0.f : weight * InverseSum(state);
    const float* acc = total.acc + r * Padded(dim);
    const int64_t row = token * problem.num_heads + head;
    switch (problem.out_dtype) {
      case DType::kBfloat16:
        WriteRow(acc, factor, dim, static_cast<bf16*>(problem.out) + row * dim);
        break;
      case DType::kFloat16:
        WriteRow(acc, factor, dim, static_cast<fp16*>(problem.out) + row * dim);
        break;
      default:
        WriteRow(acc, factor, dim, static_cast<float*>(problem.out) + row * dim);
        break;
    }
    problem.lse[row] = empty && sink != nullptr ? *sink : LogSumExp(state);
  }
}

std::vector<Unit> MakeUnits(const Problem& problem) {
  std::vector<Unit> units;
  for (int64_t b = 0; b < problem.batch; ++b) {
    const SequenceView sequence = problem.source->Sequence(b);
    const int64_t rows = sequence.q_len * problem.group();
    for (int64_t first = 0; first < rows; first += kTileRows) {
      const int64_t last = std::min(first + kTileRows, rows) - 1;
      const int64_t p0 = sequence.position + first / problem.group(), p1 = sequence.position + last / problem.group();
      const KeyRange keys = sequence.Indices({VisibleKeys(sequence.rule, p0).lo, VisibleKeys(sequence.rule, p1).hi});
      for (int64_t head = 0; head < problem.num_kv_heads; ++head)
        units.push_back({b, head, first, static_cast<int>(last - first + 1), keys});
    }
  }
  return units;
}

// Rows that no sequence owns must hold zeros and -Inf; units then overwrite their own.
void FillEmpty(const Problem& problem, Parallel& parallel) {
  constexpr int64_t kRowsPerItem = 64;
  const int64_t row_bytes = RowBytes(problem.out_dtype, problem.num_heads * problem.spec.value_dim);
  parallel.For((problem.query_rows + kRowsPerItem - 1) / kRowsPerItem, [&](int64_t item, int) {
    const int64_t begin = item * kRowsPerItem, end = std::min(begin + kRowsPerItem, problem.query_rows);
    std::memset(static_cast<char*>(problem.out) + begin * row_bytes, 0, static_cast<size_t>((end - begin) * row_bytes));
    std::fill(problem.lse + begin * problem.num_heads, problem.lse + end * problem.num_heads, -Infinity());
  });
}

// Each unit on one thread from its first split to its last. Longest first, so that no long unit starts when the others
// are done.
void RunWholeUnits(const Problem& problem, TakeBlock take, std::vector<Unit>& units, std::vector<Worker>& workers,
                   Parallel& parallel) {
  std::stable_sort(units.begin(), units.end(), [](const Unit& a, const Unit& b) { return a.cost() > b.cost(); });
  parallel.For(static_cast<int64_t>(units.size()), [&](int64_t item, int w) {
    const Unit& unit = units[item];
    Worker& worker = workers[w];
    StartUnit(problem, unit, worker);
    Clear(worker.total, unit.rows, problem.spec.value_dim);
    for (int64_t split = 0; split < unit.num_splits(); ++split) {
      AttendSplit(problem, take, unit, split, worker, worker.part);
      Fold(worker.total, worker.part, unit.rows, problem.spec.value_dim);
    }
    FinishUnit(problem, unit, worker.total);
  });
}

// Partial results that are alive at a time when threads share splits: enough to keep them busy, and memory does not
// grow with the context.
int64_t NumSlots(const Parallel& parallel) { return std::max(64, 4 * parallel.num_workers()); }

// Splits shared among threads.
Status RunSplits(const Problem& problem, TakeBlock take, const std::vector<Unit>& units, std::vector<Worker>& workers,
                 int rows, Parallel& parallel) {
  const int64_t slots = NumSlots(parallel);
  struct Task {
    const Unit* unit;
    int64_t split;
  };
  std::vector<Partial> partials(slots);
  Partial total;
  Scratch scratch;
  for (Partial& partial : partials) PlanPartial(scratch, &partial, rows, problem.spec.value_dim);
  PlanPartial(scratch, &total, rows, problem.spec.value_dim);
  if (!scratch.Allocate()) return Status::Error("no memory for partial results");

  std::vector<Task> wave;
  const auto run_wave = [&] {
    parallel.For(static_cast<int64_t>(wave.size()), [&](int64_t item, int w) {
      const Task& task = wave[item];
      StartUnit(problem, *task.unit, workers[w]);
      AttendSplit(problem, take, *task.unit, task.split, workers[w], partials[item]);
    });
    for (size_t i = 0; i < wave.size(); ++i) {
      const Unit& unit = *wave[i].unit;
      if (wave[i].split == 0) Clear(total, unit.rows, problem.spec.value_dim);
      Fold(total, partials[i], unit.rows, problem.spec.value_dim);
      if (wave[i].split + 1 == unit.num_splits()) FinishUnit(problem, unit, total);
    }
    wave.clear();
  };
  for (const Unit& unit : units) {
    if (unit.num_splits() == 0) {
      Clear(total, unit.rows, problem.spec.value_dim);
      FinishUnit(problem, unit, total);
    }
  }
  for (const Unit& unit : units) {
    for (int64_t split = 0; split < unit.num_splits(); ++split) {
      wave.push_back({&unit, split});
      if (static_cast<int64_t>(wave.size()) == slots) run_wave();
    }
  }
  if (!wave.empty()) run_wave();
  return Status();
}

Status RunUnits(const Problem& problem, std::vector<Unit>& units, Parallel& parallel) {
  int rows = 0;
  double total_cost = 0, max_cost = 0;
  for (const Unit& unit : units) {
    rows = std::max(rows, unit.rows);
    total_cost += unit.cost();
    max_cost = std::max(max_cost, unit.cost());
  }
  // With every unit below a quarter of a thread's share, longest-first keeps the threads within a quarter of even.
  const bool whole = parallel.num_workers() == 1 || max_cost * 4 * parallel.num_workers() <= total_cost;
  const int64_t items = whole ? static_cast<int64_t>(units.size()) : NumSlots(parallel);
  std::vector<Worker> workers(std::min<int64_t>(parallel.num_workers(), items));
  for (Worker& worker : workers) {
    if (!worker.Allocate(problem, rows)) return Status::Error("no memory for a thread's working set");
  }
  const TakeBlock take = SelectTakeBlock();
  if (!whole) return RunSplits(problem, take, units, workers, rows, parallel);
  RunWholeUnits(problem, take, units, workers, parallel);
  return Status();
}

Status Run(const Problem& problem, Parallel& parallel) {
  const KeepSubnormals keep;
  FillEmpty(problem, parallel);
  if (problem.num_heads == 0 || problem.num_kv_heads == 0) return Status();
  std::vector<Unit> units = MakeUnits(problem);
  if (units.empty()) return Status();
  // Waking a thread of XLA's pool takes some 10 us. A unit of cost is about 5 ns at D = Dv = 128, so this is 40 us of
  // work.
  constexpr double kWorthThreads = 8000;
  double cost = 0;
  for (const Unit& unit : units) cost += unit.cost();
  if (cost * static_cast<double>(problem.spec.head_dim + problem.spec.value_dim) / 256 < kWorthThreads) {
    Inline in_line;
    return RunUnits(problem, units, in_line);
  }
  return RunUnits(problem, units, parallel);
}

TileSpec MakeSpec(const ScoreParams& score, DType dtype, DType kv_dtype, int64_t head_dim, int64_t value_dim,
                  bool has_segments) {
  TileSpec spec;
  spec.dtype = dtype;
  spec.kv_dtype = kv_dtype;
  spec.head_dim = head_dim;
  spec.value_dim = value_dim;
  spec.scale = score.scale;
  spec.soft_cap = score.soft_cap;
  spec.has_alibi = score.alibi_slopes != nullptr;
  spec.has_segments = has_segments;
  spec.has_tree = score.tree_mask != nullptr;
  spec.tree_columns = score.tree_columns;
  return spec;
}

}  // namespace

Status LinearAttention(const LinearAttentionParams& params, Parallel& parallel) {
  const LinearSource source(params);
  Problem problem = {};
  problem.source = &source;
  problem.spec = MakeSpec(params.score, params.dtype, params.dtype, params.head_dim, params.value_dim,
                          params.segment_ids_kv != nullptr);
  problem.score = params.score;
  problem.query = params.query;
  problem.query_segment = params.segment_ids_q;
  problem.out = params.out;
  problem.lse = params.lse;
  problem.out_dtype = params.out_dtype;
  problem.batch = params.batch;
  problem.query_rows = params.ragged ? params.num_tokens : params.batch * params.num_tokens;
  problem.num_heads = params.num_heads;
  problem.num_kv_heads = params.num_kv_heads;
  return Run(problem, parallel);
}

Status PagedAttention(const PagedAttentionParams& params, Parallel& parallel) {
  const PagedSource source(params);
  Problem problem = {};
  problem.source = &source;
  problem.spec = MakeSpec(params.score, params.cache.dtype, params.cache.kv_dtype, params.cache.head_dim,
                          params.cache.value_dim, false);
  problem.score = params.score;
  problem.prologue = params.prologue;
  problem.query = params.query;
  problem.out = params.out;
  problem.lse = params.lse;
  problem.out_dtype = params.out_dtype;
  problem.batch = params.seqs.batch;
  problem.query_rows = params.seqs.num_tokens;
  problem.num_heads = params.num_heads;
  problem.num_kv_heads = params.cache.num_kv_heads;
  return Run(problem, parallel);
}

}  // namespace turboattn::cpu

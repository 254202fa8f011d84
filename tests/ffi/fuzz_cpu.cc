// Calls the CPU kernels with random shapes and with integer arrays that hold anything, and checks what can be checked
// without trusting them:
//   memory      every array is its own heap block of the exact size, so a sanitizer build sees any access outside;
//   writes      readers leave the cache alone; append changes only slots that the page tables name; copy_pages only
//   destinations; whole       results do not depend on what the buffers held before, nor on the number of threads;
//   values      attention agrees with plain loops in double over what gather returns.
// usage: fuzz_cpu COUNT [SEED]. Exit status 1 and a line on stderr at the first failure.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "core/desc.h"
#include "kernels/common/kv_codec.h"
#include "kernels/cpu/kernels.h"

namespace turboattn {
namespace {

class Threads final : public cpu::Parallel {
 public:
  explicit Threads(int count) : count_(count) {}
  int num_workers() const override { return count_; }
  void For(int64_t items, const std::function<void(int64_t, int)>& body) override {
    std::atomic<int64_t> next{0};
    const auto work = [&](int worker) {
      const cpu::KeepSubnormals keep;
      for (int64_t item = next++; item < items; item = next++) body(item, worker);
    };
    std::vector<std::thread> threads;
    for (int worker = 1; worker < count_ && worker < items; ++worker) threads.emplace_back(work, worker);
    work(0);
    for (std::thread& thread : threads) thread.join();
  }

 private:
  int count_;
};

// A heap block of exactly the bytes asked for.
struct Block {
  explicit Block(int64_t bytes = 0) : bytes(bytes), data(new char[bytes]) {}
  void Fill(int byte) { std::memset(data.get(), byte, bytes); }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data.get());
  }
  bool operator==(const Block& other) const {
    return bytes == other.bytes && std::memcmp(data.get(), other.data.get(), bytes) == 0;
  }
  Block Copy() const {
    Block copy(bytes);
    std::memcpy(copy.data.get(), data.get(), bytes);
    return copy;
  }
  int64_t bytes;
  std::unique_ptr<char[]> data;
};

std::string g_case;  // what is being run, for the failure message

void Expect(bool holds, const std::string& what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz_cpu: %s: %s\n", g_case.c_str(), what.c_str());
  std::exit(1);
}

void Run(const Status& status) { Expect(status.ok(), status.message()); }

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int64_t Below(int64_t n) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n)); }
  int64_t Between(int64_t lo, int64_t hi) { return lo + Below(hi - lo + 1); }
  bool Chance(int percent) { return Below(100) < percent; }
  float Normal() { return normal_(engine_); }
  template <class T>
  T Pick(std::initializer_list<T> values) {
    return *(values.begin() + Below(static_cast<int64_t>(values.size())));
  }
  // `wild` percent of the values are anything at all, the rest in [lo, hi].
  int32_t Int(int64_t lo, int64_t hi, int wild) {
    if (!Chance(wild)) return static_cast<int32_t>(Between(lo, hi));
    constexpr int32_t kMin = std::numeric_limits<int32_t>::min(), kMax = std::numeric_limits<int32_t>::max();
    if (Chance(40)) return static_cast<int32_t>(Chance(50) ? lo - 1 : hi + 1);
    return Chance(50) ? Pick({kMin, kMin + 1, -1, kMax - 1, kMax, 1 << 30, -(1 << 30)})
                      : static_cast<int32_t>(engine_());
  }
  Block Ints(int64_t count, int64_t lo, int64_t hi, int wild) {
    Block block(4 * count);
    for (int64_t i = 0; i < count; ++i) block.as<int32_t>()[i] = Int(lo, hi, wild);
    return block;
  }
  Block Floats(int64_t count, float size) {
    Block block(4 * count);
    for (int64_t i = 0; i < count; ++i) block.as<float>()[i] = Normal() * size;
    return block;
  }
  // Elements of a float type; with `specials`, some are NaN, Inf or subnormal.
  Block Elements(DType dtype, int64_t count, bool specials) {
    Block block(RowBytes(dtype, count));
    for (int64_t i = 0; i < count; ++i) {
      float x = Normal();
      if (specials && Chance(3)) x = Pick({NAN, INFINITY, -INFINITY, 1e-40f, -0.f, 3e38f});
      if (dtype == DType::kFloat32) block.as<float>()[i] = x;
      if (dtype == DType::kBfloat16) block.as<bf16>()[i] = FromFloat<bf16>(x);
      if (dtype == DType::kFloat16) block.as<fp16>()[i] = FromFloat<fp16>(x);
    }
    return block;
  }
  // (lo, hi) rows for B sequences: mostly consecutive pieces of [0, rows).
  Block Ranges(int64_t batch, int64_t rows, int wild) {
    Block block(8 * batch);
    int64_t lo = 0;
    for (int64_t b = 0; b < batch; ++b) {
      const int64_t hi = std::min(rows, lo + Below(rows / std::max<int64_t>(batch, 1) + 2));
      block.as<int32_t>()[2 * b] = Chance(wild) ? Int(0, 0, 100) : static_cast<int32_t>(lo);
      block.as<int32_t>()[2 * b + 1] = Chance(wild) ? Int(0, 0, 100) : static_cast<int32_t>(hi);
      lo = hi;
    }
    return block;
  }

 private:
  std::mt19937_64 engine_;
  std::normal_distribution<float> normal_;
};

float Element(DType dtype, Block& block, int64_t i) {
  if (dtype == DType::kBfloat16) return ToFloat(block.as<bf16>()[i]);
  if (dtype == DType::kFloat16) return ToFloat(block.as<fp16>()[i]);
  return block.as<float>()[i];
}

// -- a paged cache with its tables --

struct PagedCase {
  KvCache cache;
  Sequences seqs;
  Block key, value, key_params, value_params, layer, page_table, kv_lens, q_ranges, cp_rank;
  int64_t num_heads;

  void Point() {
    cache.key = key.as<char>();
    cache.value = value.as<char>();
    cache.key_params = key_params.as<char>();
    cache.value_params = value_params.as<char>();
  }
};

// Random bytes are valid codes. Parameters are small; slots poisoned with NaN are left to the conformance suite.
Block Pool(Random& random, DType kv_dtype, int64_t rows, int64_t width) {
  if (!IsQuantised(kv_dtype)) return random.Elements(kv_dtype, rows * width, false);
  Block block(RowBytes(kv_dtype, rows * width));
  for (int64_t i = 0; i < block.bytes; ++i) {
    block.as<uint8_t>()[i] =
        static_cast<uint8_t>(random.Below(256)) & (kv_dtype == DType::kFloat8E4M3 ? 0xbf : 0xff);  // fp8 below 2
  }
  return block;
}

Block PoolParams(Random& random, const KvCache& cache) {
  if (HasRowParams(cache.kv_dtype)) {
    Block block = random.Elements(cache.dtype,
                                  cache.num_layers * cache.num_pages * cache.num_kv_heads * cache.page_size * 2, false);
    return block;
  }
  return random.Floats(cache.kv_dtype == DType::kFloat8E4M3 ? cache.num_layers * cache.num_kv_heads : 0, 1.f);
}

PagedCase MakePaged(Random& random, int wild) {
  PagedCase c;
  c.cache.dtype = random.Pick({DType::kFloat32, DType::kBfloat16, DType::kFloat16});
  c.cache.kv_dtype = random.Pick({c.cache.dtype, c.cache.dtype, DType::kInt8, DType::kInt4, DType::kFloat8E4M3});
  c.cache.num_layers = random.Between(1, 2);
  c.cache.num_pages = random.Below(12);
  c.cache.num_kv_heads = random.Between(1, 3);
  c.cache.page_size = random.Pick<int64_t>({8, 16, 64});
  c.cache.head_dim = 8 * random.Between(1, 5);
  c.cache.value_dim = random.Chance(50) ? c.cache.head_dim : 8 * random.Between(1, 5);
  c.num_heads = c.cache.num_kv_heads * random.Pick<int64_t>({1, 2, 3, 5, 12});
  const int64_t rows = c.cache.num_layers * c.cache.num_pages * c.cache.num_kv_heads * c.cache.page_size;
  c.key = Pool(random, c.cache.kv_dtype, rows, c.cache.head_dim);
  c.value = Pool(random, c.cache.kv_dtype, rows, c.cache.value_dim);
  c.key_params = PoolParams(random, c.cache);
  c.value_params = PoolParams(random, c.cache);
  c.Point();

  Sequences& s = c.seqs;
  s.batch = random.Below(5);
  s.max_pages = random.Below(6);
  s.cp_size = random.Pick({1, 1, 1, 2, 3});
  s.num_tokens = random.Below(30);
  const int64_t keys = s.max_pages * c.cache.page_size * s.cp_size;
  c.layer = random.Ints(s.batch, 0, c.cache.num_layers - 1, wild);
  c.page_table = random.Ints(s.batch * s.max_pages, 0, std::max<int64_t>(c.cache.num_pages - 1, 0), wild);
  c.kv_lens = random.Ints(s.batch, 0, keys, wild);
  c.q_ranges = random.Ranges(s.batch, s.num_tokens, wild / 2);
  c.cp_rank = random.Ints(s.batch, 0, s.cp_size - 1, wild);
  s.layer = c.layer.as<int32_t>();
  s.page_table = c.page_table.as<int32_t>();
  s.kv_lens = c.kv_lens.as<int32_t>();
  s.q_ranges = c.q_ranges.as<int32_t>();
  s.cp_rank = c.cp_rank.as<int32_t>();
  g_case += std::string(" E=") + to_string(c.cache.dtype) + " kv=" + to_string(c.cache.kv_dtype);
  return c;
}

bool RangesOverlap(const int32_t* ranges, int64_t batch, int64_t rows) {
  std::vector<bool> taken(rows);
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t lo = std::clamp<int64_t>(ranges[2 * b], 0, rows),
                  hi = std::clamp<int64_t>(ranges[2 * b + 1], lo, rows);
    for (int64_t row = lo; row < hi; ++row) {
      if (taken[row]) return true;
      taken[row] = true;
    }
  }
  return false;
}

// -- attention in double --

// One (token, head) row over keys 0 .. count - 1; `key`, `value` give element d of key j; `sees` and `position` its
// visibility and place.
struct ReferenceRow {
  std::vector<double> out;
  double lse;
  double spread;  // largest sum of p * |v|
  double peak;  // largest |logit|, cancellation in the dot product undone: what float32 logits are precise relative to
};

template <class Key, class Value, class Sees, class Position>
ReferenceRow AttendRow(const std::vector<double>& q, int64_t count, int64_t value_dim, const ScoreParams& score,
                       int64_t head, int64_t p, Key key, Value value, Sees sees, Position position) {
  std::vector<double> x(count, -INFINITY);
  double peak = 0;
  double max = score.sinks != nullptr ? score.sinks[head] : -INFINITY;
  for (int64_t j = 0; j < count; ++j) {
    if (!sees(j)) continue;
    double dot = 0, size = 0;
    for (size_t d = 0; d < q.size(); ++d) dot += q[d] * key(j, d), size += std::fabs(q[d] * key(j, d));
    x[j] = score.scale * dot;
    if (score.soft_cap != 0) x[j] = score.soft_cap * std::tanh(x[j] / score.soft_cap);
    if (score.alibi_slopes != nullptr)
      x[j] -= score.alibi_slopes[head] * std::fabs(static_cast<double>(p - position(j)));
    max = std::max(max, x[j]);
    peak = std::max({peak, std::fabs(score.scale) * size, std::fabs(x[j])});
  }
  ReferenceRow row{std::vector<double>(value_dim), -INFINITY, 0, peak};
  if (max == -INFINITY) return row;
  double sum = score.sinks != nullptr ? std::exp(score.sinks[head] - max) : 0;
  for (int64_t j = 0; j < count; ++j) sum += x[j] == -INFINITY ? 0 : std::exp(x[j] - max);
  for (int64_t d = 0; d < value_dim; ++d) {
    double spread = 0;
    for (int64_t j = 0; j < count; ++j) {
      if (x[j] == -INFINITY) continue;
      const double weighted = std::exp(x[j] - max) / sum * value(j, d);
      row.out[d] += weighted;
      spread += std::fabs(weighted);
    }
    row.spread = std::max(row.spread, spread);
  }
  row.lse = max + std::log(sum);
  return row;
}

bool InWindow(const ScoreParams& score, int64_t b, int64_t p, int64_t s) {
  if (score.is_causal && s > p) return false;
  if (score.window == nullptr) return true;
  const int64_t left = score.window[2 * b], right = score.window[2 * b + 1];
  return (left == -1 || p - s <= left) && (right == -1 || s - p <= right);
}

// 16-bit results carry 2^-9 or 2^-12 of rounding; float32 logits a few ulp of their peak.
void Compare(const ReferenceRow& want, const float* out, float lse, double epsilon) {
  const double tolerance = epsilon + 2e-6 * (1 + want.peak);
  const double lse_error = std::isinf(want.lse) && want.lse == lse ? 0 : std::fabs(want.lse - lse);
  Expect(lse_error <= 2e-6 * (1 + want.peak), "lse " + std::to_string(lse) + ", want " + std::to_string(want.lse));
  for (size_t d = 0; d < want.out.size(); ++d) {
    Expect(std::fabs(want.out[d] - out[d]) <= tolerance * (want.spread + 1e-3),
           "out[" + std::to_string(d) + "] " + std::to_string(out[d]) + ", want " + std::to_string(want.out[d]));
  }
}

struct ScoreCase {
  ScoreParams score;
  Block window, sinks, slopes;
};

ScoreCase MakeScore(Random& random, int64_t batch, int64_t heads, int wild, bool allow_sinks) {
  ScoreCase c;
  c.score.is_causal = random.Chance(60);
  c.score.scale = random.Pick({0.3f, 0.3f, 1.f, 0.f, -0.5f});
  c.score.soft_cap = random.Pick({0.f, 0.f, 2.f, 30.f});
  c.window = random.Ints(2 * batch, -1, 40, wild);
  c.sinks = random.Floats(heads, 2.f);
  c.slopes = random.Floats(heads, 0.05f);
  if (random.Chance(30)) c.score.window = c.window.as<int32_t>();
  if (allow_sinks && random.Chance(30)) c.score.sinks = c.sinks.as<float>();
  if (wild == 0 && random.Chance(20)) c.score.alibi_slopes = c.slopes.as<float>();
  return c;
}

double Epsilon(DType out_dtype) {
  return out_dtype == DType::kBfloat16 ? 0x1p-8 : out_dtype == DType::kFloat16 ? 0x1p-10 : 0;
}

// -- one function a kernel --

void FuzzPagedAttention(Random& random) {
  const int wild = random.Pick({0, 0, 10, 60});
  PagedCase c = MakePaged(random, wild);
  if (random.Chance(20)) {  // uniform queries
    c.seqs.q_ranges = nullptr;
    c.seqs.uniform_q_len = random.Below(4);
    c.seqs.num_tokens = c.seqs.batch * c.seqs.uniform_q_len;
  }
  ScoreCase score = MakeScore(random, c.seqs.batch, c.num_heads, wild, true);
  const int64_t T = c.seqs.num_tokens, H = c.num_heads, D = c.cache.head_dim, Dv = c.cache.value_dim;
  Block query = random.Elements(c.cache.dtype, T * H * D, false);
  const int64_t K = c.cache.num_kv_heads, G = H / K;
  const int64_t num_prefix = random.Below(3);
  Block prefix_pages = random.Ints(num_prefix, 0, std::max<int64_t>(c.cache.num_pages - 1, 0), wild);
  Block prefix_len = random.Ints(1, 0, num_prefix * c.cache.page_size, wild);
  if (random.Chance(30)) {
    c.seqs.prefix_pages = prefix_pages.as<int32_t>();
    c.seqs.prefix_len = prefix_len.as<int32_t>();
    c.seqs.num_prefix_pages = num_prefix;
  }
  const int64_t tree_columns = random.Below(8);
  Block tree(T * tree_columns);
  for (int64_t i = 0; i < tree.bytes; ++i) tree.as<uint8_t>()[i] = random.Chance(60);
  if (score.score.is_causal && random.Chance(30)) {
    score.score.tree_mask = tree.as<uint8_t>();
    score.score.tree_columns = tree_columns;
  }
  PagedAttentionParams params;
  params.cache = c.cache;
  params.seqs = c.seqs;
  params.score = score.score;
  params.query = query.as<char>();
  params.num_heads = H;
  params.out_dtype = random.Pick({c.cache.dtype, DType::kFloat32});
  Block out[2], lse[2];
  Block before = c.key.Copy(), params_before = c.value_params.Copy();
  for (int run = 0; run < 2; ++run) {
    out[run] = Block(RowBytes(params.out_dtype, T * H * Dv));
    lse[run] = Block(4 * T * H);
    out[run].Fill(0x7f + run);
    lse[run].Fill(0x7f + run);
    params.out = out[run].as<char>();
    params.lse = lse[run].as<float>();
    Threads threads(run == 0 ? 1 : 3);
    Run(cpu::PagedAttention(params, threads));
  }
  Expect(before == c.key && params_before == c.value_params, "the cache changed");
  const bool overlap = c.seqs.q_ranges != nullptr && RangesOverlap(c.seqs.q_ranges, c.seqs.batch, T);
  if (overlap) return;
  Expect(out[0] == out[1] && lse[0] == lse[1], "results depend on the buffers' contents or on the number of threads");

  // Decoded keys, by local index; gather knows no ranks, so ask it for everything that is mapped.
  // The table is widened by the prefix, in front.
  const int64_t front = c.seqs.prefix_len != nullptr ? num_prefix : 0, M = front + c.seqs.max_pages,
                P = c.cache.page_size, F = front * P;
  Block table(4 * c.seqs.batch * M), all = random.Ints(c.seqs.batch, M * P, M * P, 0);
  for (int64_t b = 0; b < c.seqs.batch; ++b) {
    std::copy_n(prefix_pages.as<int32_t>(), front, table.as<int32_t>() + b * M);
    std::copy_n(c.seqs.page_table + b * c.seqs.max_pages, c.seqs.max_pages, table.as<int32_t>() + b * M + front);
  }
  GatherParams gather;
  gather.cache = c.cache;
  gather.seqs.layer = c.seqs.layer;
  gather.seqs.page_table = table.as<int32_t>();
  gather.seqs.kv_lens = all.as<int32_t>();
  gather.seqs.batch = c.seqs.batch;
  gather.seqs.max_pages = M;
  gather.out_dtype = c.cache.kv_dtype == DType::kFloat8E4M3 ? c.cache.dtype : DType::kFloat32;
  Block keys(RowBytes(gather.out_dtype, c.seqs.batch * M * P * K * D)),
      values(RowBytes(gather.out_dtype, c.seqs.batch * M * P * K * Dv));
  gather.key = keys.as<char>();
  gather.value = values.as<char>();
  cpu::Inline in_line;
  Run(cpu::Gather(gather, in_line));
  Expect(before == c.key, "gather changed the cache");
  const int64_t start = c.seqs.prefix_len != nullptr ? *c.seqs.prefix_len : 0;

  for (int64_t b = 0; b < c.seqs.batch; ++b) {
    const int64_t q = c.seqs.uniform_q_len;
    const int64_t lo = c.seqs.q_ranges == nullptr ? b * q : std::clamp<int64_t>(c.seqs.q_ranges[2 * b], 0, T);
    const int64_t hi = c.seqs.q_ranges == nullptr ? lo + q : std::clamp<int64_t>(c.seqs.q_ranges[2 * b + 1], lo, T);
    const int64_t rank = c.seqs.cp_rank[b];
    const bool rank_exists = rank >= 0 && rank < c.seqs.cp_size;
    const bool layer_exists = c.seqs.layer[b] >= 0 && c.seqs.layer[b] < c.cache.num_layers;
    for (int64_t row = lo; row < hi; ++row) {
      const int64_t first = start + c.seqs.kv_lens[b] - (hi - lo), p = first + (row - lo);
      for (int64_t h = 0; h < H; ++h) {
        std::vector<double> x(D);
        for (int64_t d = 0; d < D; ++d) x[d] = Element(c.cache.dtype, query, (row * H + h) * D + d);
        const auto position = [&](int64_t j) { return j < F ? j : start + (j - F) * c.seqs.cp_size + rank; };
        const auto sees = [&](int64_t j) {
          const int32_t page = gather.seqs.page_table[b * M + j / P];
          if (!layer_exists || page < 0 || page >= c.cache.num_pages) return false;
          if (j < F ? j >= start : !rank_exists || position(j) - start >= c.seqs.kv_lens[b]) return false;
          const int64_t column = position(j) - first;
          if (score.score.tree_mask == nullptr) return InWindow(score.score, b, p, position(j));
          ScoreParams without_causal = score.score;
          without_causal.is_causal = false;
          return InWindow(without_causal, b, p, position(j)) &&
                 (column < 0 || (column < tree_columns && score.score.tree_mask[row * tree_columns + column] != 0));
        };
        const auto key = [&](int64_t j, int64_t d) {
          return Element(gather.out_dtype, keys, ((b * M * P + j) * K + h / G) * D + d);
        };
        const auto value = [&](int64_t j, int64_t d) {
          return Element(gather.out_dtype, values, ((b * M * P + j) * K + h / G) * Dv + d);
        };
        const ReferenceRow want = AttendRow(x, M * P, Dv, score.score, h, p, key, value, sees, position);
        std::vector<float> got(Dv);
        for (int64_t d = 0; d < Dv; ++d) got[d] = Element(params.out_dtype, out[0], (row * H + h) * Dv + d);
        Compare(want, got.data(), lse[0].as<float>()[row * H + h], Epsilon(params.out_dtype));
      }
    }
  }
}

void FuzzLinearAttention(Random& random) {
  const int wild = random.Pick({0, 0, 10, 60});
  LinearAttentionParams params;
  params.ragged = random.Chance(50);
  params.dtype = random.Pick({DType::kFloat32, DType::kFloat32, DType::kBfloat16, DType::kFloat16});
  params.out_dtype = random.Pick({params.dtype, DType::kFloat32});
  const int64_t B = params.batch = random.Below(4), T = params.num_tokens = random.Below(40);
  const int64_t S = params.num_keys = random.Chance(10) ? random.Between(500, 1100) : random.Below(150);
  const int64_t K = params.num_kv_heads = random.Between(1, 2), G = random.Pick<int64_t>({1, 2, 5}),
                H = params.num_heads = K * G;
  const int64_t D = params.head_dim = random.Between(1, 40), Dv = params.value_dim = random.Between(1, 40);
  g_case += std::string(params.ragged ? " ragged " : " dense ") + to_string(params.dtype);
  const int64_t query_rows = params.ragged ? T : B * T, key_rows = params.ragged ? S : B * S;
  Block query = random.Elements(params.dtype, query_rows * H * D, false);
  Block key = random.Elements(params.dtype, key_rows * K * D, false),
        value = random.Elements(params.dtype, key_rows * K * Dv, false);
  Block query_lens = random.Ints(B, 0, T, wild), kv_lens = random.Ints(B, 0, S, wild),
        offset = random.Ints(B, -5, S, wild);
  Block segment_q = random.Ints(B * T, 0, 2, wild), segment_kv = random.Ints(B * S, 0, 2, wild);
  Block q_ranges = random.Ranges(B, T, wild / 2), kv_ranges = random.Ranges(B, S, wild / 2);
  ScoreCase score = MakeScore(random, B, H, wild, true);
  params.query = query.as<char>();
  params.key = key.as<char>();
  params.value = value.as<char>();
  params.score = score.score;
  if (params.ragged) {
    params.q_ranges = q_ranges.as<int32_t>();
    params.kv_ranges = kv_ranges.as<int32_t>();
  } else {
    if (random.Chance(50)) params.query_lens = query_lens.as<int32_t>();
    if (random.Chance(50)) params.kv_lens = kv_lens.as<int32_t>();
    if (random.Chance(50)) params.query_offset = offset.as<int32_t>();
    if (random.Chance(30))
      params.segment_ids_q = segment_q.as<int32_t>(), params.segment_ids_kv = segment_kv.as<int32_t>();
  }
  Block out[2], lse[2];
  for (int run = 0; run < 2; ++run) {
    out[run] = Block(RowBytes(params.out_dtype, query_rows * H * Dv));
    lse[run] = Block(4 * query_rows * H);
    out[run].Fill(0x7f + run);
    lse[run].Fill(0x7f + run);
    params.out = out[run].as<char>();
    params.lse = lse[run].as<float>();
    Threads threads(run == 0 ? 1 : 3);
    Run(cpu::LinearAttention(params, threads));
  }
  if (params.ragged && RangesOverlap(params.q_ranges, B, T)) return;
  Expect(out[0] == out[1] && lse[0] == lse[1], "results depend on the buffers' contents or on the number of threads");
  for (int64_t b = 0; b < B; ++b) {
    const auto clamp = [](const int32_t* ranges, int64_t b, int64_t rows) {
      const int64_t lo = std::clamp<int64_t>(ranges[2 * b], 0, rows);
      return std::make_pair(lo, std::clamp<int64_t>(ranges[2 * b + 1], lo, rows));
    };
    std::pair<int64_t, int64_t> q = {b * T, b * T + T}, kv = {b * S, b * S + S};
    if (params.query_lens != nullptr) q.second = q.first + std::clamp<int64_t>(params.query_lens[b], 0, T);
    if (params.kv_lens != nullptr) kv.second = kv.first + std::clamp<int64_t>(params.kv_lens[b], 0, S);
    if (params.ragged) q = clamp(params.q_ranges, b, T), kv = clamp(params.kv_ranges, b, S);
    const int64_t count = kv.second - kv.first;
    const int64_t first = params.ragged                    ? count - (q.second - q.first)
                          : params.query_offset != nullptr ? params.query_offset[b]
                                                           : 0;
    for (int64_t row = q.first; row < q.second; ++row) {
      const int64_t p = first + row - q.first;
      for (int64_t h = 0; h < H; ++h) {
        std::vector<double> x(D);
        for (int64_t d = 0; d < D; ++d) x[d] = Element(params.dtype, query, (row * H + h) * D + d);
        const auto sees = [&](int64_t j) {
          if (params.segment_ids_q != nullptr && params.segment_ids_q[row] != params.segment_ids_kv[kv.first + j])
            return false;
          return InWindow(score.score, b, p, j);
        };
        const auto k = [&](int64_t j, int64_t d) {
          return Element(params.dtype, key, ((kv.first + j) * K + h / G) * D + d);
        };
        const auto v = [&](int64_t j, int64_t d) {
          return Element(params.dtype, value, ((kv.first + j) * K + h / G) * Dv + d);
        };
        const ReferenceRow want = AttendRow(x, count, Dv, score.score, h, p, k, v, sees, [](int64_t j) { return j; });
        std::vector<float> got(Dv);
        for (int64_t d = 0; d < Dv; ++d) got[d] = Element(params.out_dtype, out[0], (row * H + h) * Dv + d);
        Compare(want, got.data(), lse[0].as<float>()[row * H + h], Epsilon(params.out_dtype));
      }
    }
  }
}

struct RopeCase {
  RopeParams rope;
  Block turns, base, positions;
};

RopeCase MakeRope(Random& random, const PagedCase& c, int wild) {
  RopeCase r;
  if (random.Chance(30)) return r;
  r.rope.dim = static_cast<int32_t>(8 * random.Between(0, c.cache.head_dim / 8));
  r.rope.offset = static_cast<int32_t>(random.Between(0, c.cache.head_dim - r.rope.dim));
  r.rope.interleaved = random.Chance(50);
  r.rope.attention_factor = random.Pick({1.f, 1.2f});
  r.rope.section_t = static_cast<int32_t>(random.Below(4));
  r.rope.section_h = static_cast<int32_t>(random.Below(4));
  r.rope.section_w = static_cast<int32_t>(random.Below(4));
  r.rope.sections_interleaved = random.Chance(50);
  r.turns = random.Ints(r.rope.dim, 0, 0, 100);
  r.base = random.Floats(c.seqs.batch, 1e4f);
  r.rope.position_axes = random.Pick({1, 3});
  r.positions = random.Ints(c.seqs.num_tokens * r.rope.position_axes, 0, 100000, wild);
  if (random.Chance(70)) {
    r.rope.turns = r.turns.as<uint32_t>();
  } else {
    r.rope.base = r.base.as<float>();
  }
  if (random.Chance(50)) r.rope.positions = r.positions.as<int32_t>();
  return r;
}

// Bytes of `pool` that differ from `before` lie in rows of [L,N,K,P] whose (page, slot) is in `allowed`.
void ExpectOnly(const Block& before, Block& pool, int64_t row_bytes, const KvCache& cache,
                const std::set<std::pair<int64_t, int64_t>>& allowed, const char* what) {
  for (int64_t i = 0; i < pool.bytes; ++i) {
    if (before.data[i] == pool.data[i]) continue;
    const int64_t row = i / row_bytes, slot = row % cache.page_size, page = row / cache.page_size / cache.num_kv_heads;
    Expect(allowed.count({page, slot}) != 0,
           std::string(what) + ": wrote page " + std::to_string(page) + " slot " + std::to_string(slot));
  }
}

void FuzzAppend(Random& random) {
  const int wild = random.Pick({0, 10, 60});
  PagedCase c = MakePaged(random, wild);
  const int64_t T = c.seqs.num_tokens, K = c.cache.num_kv_heads, P = c.cache.page_size;
  RopeCase rope = MakeRope(random, c, wild);
  Block key = random.Elements(c.cache.dtype, T * K * c.cache.head_dim, true),
        value = random.Elements(c.cache.dtype, T * K * c.cache.value_dim, true);
  Block key_bias = random.Floats(K * c.cache.head_dim, 1.f),
        value_bias = random.Elements(c.cache.dtype, K * c.cache.value_dim, false);
  Block read_only = random.Ints(c.seqs.batch, 0, 2, wild);
  AppendParams params;
  params.cache = c.cache;
  params.seqs = c.seqs;
  params.key = key.as<char>();
  params.value = value.as<char>();
  params.rope = rope.rope;
  if (random.Chance(30)) params.key_bias = key_bias.as<char>();  // float32
  if (params.key_bias == nullptr && random.Chance(30))
    params.bias_dtype = c.cache.dtype, params.value_bias = value_bias.as<char>();
  if (random.Chance(50)) params.read_only_pages = read_only.as<int32_t>();
  const Block key_before = c.key.Copy(), value_before = c.value.Copy(), key_params = c.key_params.Copy(),
              value_params = c.value_params.Copy();
  cpu::Inline in_line;  // two sequences may name one slot, which is a race that the contract leaves open
  Run(cpu::Append(params, in_line));

  std::set<std::pair<int64_t, int64_t>> allowed;
  for (int64_t b = 0; b < c.seqs.batch; ++b) {
    const int64_t lo = std::clamp<int64_t>(c.seqs.q_ranges[2 * b], 0, T),
                  hi = std::clamp<int64_t>(c.seqs.q_ranges[2 * b + 1], lo, T);
    for (int64_t i = 0; i < hi - lo; ++i) {
      const int64_t p = int64_t{c.seqs.kv_lens[b]} - (hi - lo) + i, local = p / c.seqs.cp_size, column = local / P;
      if (p < 0 || p % c.seqs.cp_size != c.seqs.cp_rank[b] || column >= c.seqs.max_pages) continue;
      const int32_t page = c.seqs.page_table[b * c.seqs.max_pages + column], layer = c.seqs.layer[b];
      if (page < 0 || page >= c.cache.num_pages || layer < 0 || layer >= c.cache.num_layers) continue;
      if (params.read_only_pages != nullptr && column < params.read_only_pages[b]) continue;
      allowed.insert({layer * c.cache.num_pages + page, local % P});
    }
  }
  ExpectOnly(key_before, c.key, RowBytes(c.cache.kv_dtype, c.cache.head_dim), c.cache, allowed, "key_cache");
  ExpectOnly(value_before, c.value, RowBytes(c.cache.kv_dtype, c.cache.value_dim), c.cache, allowed, "value_cache");
  if (HasRowParams(c.cache.kv_dtype)) {
    ExpectOnly(key_params, c.key_params, 2 * RowBytes(c.cache.dtype, 1), c.cache, allowed, "key_params");
    ExpectOnly(value_params, c.value_params, 2 * RowBytes(c.cache.dtype, 1), c.cache, allowed, "value_params");
  } else {
    Expect(key_params == c.key_params && value_params == c.value_params,
           "append changed parameters that it only reads");
  }

  // The attention half of the fused step, over what was stored: NaN may come out, nothing else is promised here but
  // memory safety.
  PagedAttentionParams step;
  step.cache = c.cache;
  step.seqs = c.seqs;
  step.prologue.rope = rope.rope;
  step.prologue.logn = random.Pick({0, 64});
  Block query = random.Elements(c.cache.dtype, T * c.num_heads * c.cache.head_dim, true),
        bias = random.Floats(c.num_heads * c.cache.head_dim, 1.f);
  if (random.Chance(50)) step.prologue.bias = bias.as<char>();
  Block out(4 * T * c.num_heads * c.cache.value_dim), lse(4 * T * c.num_heads);
  step.query = query.as<char>();
  step.out = out.as<char>();
  step.lse = lse.as<float>();
  step.num_heads = c.num_heads;
  Threads threads(2);
  Run(cpu::PagedAttention(step, threads));
}

void FuzzCopyPages(Random& random) {
  const int wild = random.Pick({0, 30});
  PagedCase c = MakePaged(random, wild);
  CopyPagesParams params;
  params.cache = c.cache;
  params.count = random.Below(8);
  Block layer = random.Ints(params.count, 0, c.cache.num_layers - 1, wild);
  Block source = random.Ints(params.count, 0, std::max<int64_t>(c.cache.num_pages - 1, 0), wild),
        destination = random.Ints(params.count, -1, 12, wild);
  params.layer = layer.as<int32_t>();
  params.source = source.as<int32_t>();
  params.destination = destination.as<int32_t>();
  Block want = c.key.Copy();
  const Block before = c.key.Copy();
  const int64_t page_bytes = c.cache.num_kv_heads * c.cache.page_size * RowBytes(c.cache.kv_dtype, c.cache.head_dim);
  const auto inside = [](int64_t x, int64_t n) { return x >= 0 && x < n; };
  for (int64_t i = 0; i < params.count; ++i) {
    const int64_t l = params.layer[i], from = params.source[i], to = params.destination[i];
    if (!inside(l, c.cache.num_layers) || !inside(from, c.cache.num_pages) || !inside(to, c.cache.num_pages)) continue;
    std::memcpy(want.data.get() + (l * c.cache.num_pages + to) * page_bytes,
                before.data.get() + (l * c.cache.num_pages + from) * page_bytes, page_bytes);
  }
  Threads threads(2);
  Run(cpu::CopyPages(params, threads));
  Expect(want == c.key, "copied pages differ");
}

void FuzzMerge(Random& random) {
  MergeParams params;
  params.dtype = random.Pick({DType::kFloat32, DType::kBfloat16, DType::kFloat16});
  params.out_dtype = random.Pick({params.dtype, DType::kFloat32});
  params.num_parts = random.Below(5);
  params.num_tokens = random.Below(20);
  params.num_heads = random.Between(1, 4);
  params.value_dim = random.Between(1, 40);
  const int64_t rows = params.num_tokens * params.num_heads;
  Block outs = random.Elements(params.dtype, params.num_parts * rows * params.value_dim, false),
        lses = random.Floats(params.num_parts * rows, 3.f);
  for (int64_t i = 0; i < params.num_parts * rows; ++i) {
    if (random.Chance(20)) lses.as<float>()[i] = -INFINITY;
  }
  Block sinks = random.Floats(params.num_heads, 1.f), out(RowBytes(params.out_dtype, rows * params.value_dim)),
        lse(4 * rows);
  params.outs = outs.as<char>();
  params.lses = lses.as<float>();
  if (random.Chance(50)) params.sinks = sinks.as<float>();
  params.out = out.as<char>();
  params.lse = lse.as<float>();
  Threads threads(2);
  Run(cpu::Merge(params, threads));
  for (int64_t row = 0; row < rows; ++row) {
    double sum = params.sinks != nullptr ? std::exp(static_cast<double>(params.sinks[row % params.num_heads])) : 0;
    for (int64_t r = 0; r < params.num_parts; ++r) sum += std::exp(static_cast<double>(params.lses[r * rows + row]));
    for (int64_t d = 0; d < params.value_dim; ++d) {
      double want = 0;
      for (int64_t r = 0; r < params.num_parts; ++r) {
        const double weight = std::exp(static_cast<double>(params.lses[r * rows + row]));
        if (weight != 0) want += weight / sum * Element(params.dtype, outs, (r * rows + row) * params.value_dim + d);
      }
      const double got = Element(params.out_dtype, out, row * params.value_dim + d);
      Expect(std::fabs(got - want) <= (Epsilon(params.out_dtype) + 1e-5) * (std::fabs(want) + 1),
             "merged value differs");
    }
    const double got = params.lse[row];
    Expect(sum == 0 ? got == -INFINITY : std::fabs(got - std::log(sum)) < 1e-4 * (1 + std::fabs(got)),
           "merged lse differs");
  }
}

}  // namespace
}  // namespace turboattn

int main(int argc, char** argv) {
  const int64_t count = argc > 1 ? std::atoll(argv[1]) : 500;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  const struct {
    const char* name;
    void (*run)(turboattn::Random&);
  } kernels[] = {{"paged_attention", turboattn::FuzzPagedAttention},
                 {"attention", turboattn::FuzzLinearAttention},
                 {"append", turboattn::FuzzAppend},
                 {"copy_pages", turboattn::FuzzCopyPages},
                 {"merge", turboattn::FuzzMerge}};
  for (int64_t i = 0; i < count; ++i) {
    for (const auto& kernel : kernels) {
      turboattn::g_case = std::string(kernel.name) + " case " + std::to_string(i) + " seed " + std::to_string(seed);
      turboattn::Random random(seed * 1000003 + static_cast<uint64_t>(i));
      kernel.run(random);
    }
  }
  std::printf("fuzz_cpu: %lld cases of each kernel\n", static_cast<long long>(count));
  return 0;
}

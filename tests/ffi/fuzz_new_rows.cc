// Which part of a fused decode step stores which new row (kernels/decode/new_rows.cuh), compiled for the host and held
// to append_kv's rule, for index arrays that hold anything and units that are cut anywhere:
//   whole    every row that append_kv writes is written, from its own token and turned as far, and no other;
//   order    a part that reads a new key has stored it itself, knows that it has to before it loads the key's block
//            (FirstNewBlock), and no other part of the unit has stored it;
//   memory   every array is its own heap block, so a sanitizer build sees any access outside.
// usage: fuzz_new_rows COUNT [SEED]. Exit status 1 and a line on stderr at the first failure.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "core/params.h"

#define __device__
#define __forceinline__ inline
#define __noinline__
#define TURBOATTN_KERNELS_COMMON_APPEND_ROW_CUH_  // in its place: what is below
struct {
  unsigned x;
} threadIdx;
using std::max;
using std::min;
inline int __ffs(int x) { return __builtin_ffs(x); }

#include "kernels/common/chunk.cuh"
#include "kernels/common/page_walk.h"
#include "kernels/common/rope.h"

namespace turboattn::append {

// (row of the pool, K or V) -> the elements that were stored there, by one thread after the other.
using Stored = std::map<std::pair<int64_t, bool>, std::set<uint16_t>>;
Stored g_stored;
std::map<uint16_t, float> g_turned;  // the cosine with which an element was turned

template <class Traits, int kWidth, class Turn>
void StoreWarpRow(const AppendParams&, bool is_key, int64_t row, int64_t, int64_t, const WarpRow<kWidth>& loaded,
                  Turn turn, float*) {
  for (const auto& half : loaded.half) {
    for (const uint32_t pair : half.pairs) {
      for (const uint32_t element : {pair & 0xffff, pair >> 16}) {
        g_turned[static_cast<uint16_t>(element)] = turn(0).cos;
        g_stored[{row, is_key}].insert(static_cast<uint16_t>(element));
      }
    }
  }
}

}  // namespace turboattn::append

#include "kernels/decode/new_rows.cuh"

namespace turboattn {
namespace {

using Traits = decode::TraitsSm80<DType::kBfloat16, DType::kBfloat16, 64, 8>;
constexpr int kBlock = kDecodeKeys;

void Check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz_new_rows: %s\n", what);
  std::exit(1);
}

struct Random {
  std::mt19937_64 engine;
  double wild = 0;  // chance of an int32 that means nothing

  int64_t In(int64_t low, int64_t high) { return low + static_cast<int64_t>(engine() % (high - low + 1)); }
  int32_t Int(int64_t low, int64_t high) {
    if (std::uniform_real_distribution<>()(engine) >= wild) return static_cast<int32_t>(In(low, high));
    const int64_t edges[] = {std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max(), -1, low - 1,
                             high + 1};
    return static_cast<int32_t>(In(0, 1) == 0 ? edges[In(0, 4)] : static_cast<int32_t>(engine()));
  }
  std::vector<int32_t> Ints(int64_t count, int64_t low, int64_t high) {
    std::vector<int32_t> found(count);
    for (int32_t& x : found) x = Int(low, high);
    return found;
  }
};

// What a row of K or V holds in its first element.
uint16_t Mark(int64_t token, int64_t heads, int64_t head, bool is_key) {
  return static_cast<uint16_t>(2 * (token * heads + head) + (is_key ? 0 : 1));
}

void FuzzStep(Random& random) {
  random.wild = random.In(0, 2) == 0 ? 0.2 : 0.0;
  const int64_t batch = random.In(1, 6), columns = random.In(1, 6), heads = random.In(1, 2);
  const int64_t tokens = random.In(0, 3) == 0 ? random.In(kBlock, 3 * kBlock) : random.In(1, 24);
  PagedAttentionParams params;
  KvCache& cache = params.cache;
  cache.num_layers = random.In(1, 2);
  cache.num_pages = batch * columns + 3;
  cache.num_kv_heads = heads;
  cache.page_size = int64_t{8} << random.In(0, 4);
  cache.head_dim = cache.value_dim = Traits::kDim;
  params.num_heads = heads;
  Sequences& seqs = params.seqs;
  seqs.batch = batch;
  seqs.max_pages = columns;
  seqs.num_tokens = tokens;
  seqs.cp_size = static_cast<int32_t>(random.In(0, 2) == 0 ? random.In(2, 3) : 1);
  const int64_t capacity = columns * cache.page_size * seqs.cp_size;

  // Sorted bounds in most calls, and pages of one sequence each: then every row has one owner.
  std::vector<int32_t> bounds = random.Ints(batch + 1, 0, tokens);
  if (random.wild == 0 || random.In(0, 1) == 0) std::sort(bounds.begin(), bounds.end());
  std::vector<int32_t> ranges;
  for (int64_t b = 0; b < batch; ++b) ranges.insert(ranges.end(), {bounds[b], bounds[b + 1]});
  std::vector<int32_t> table(batch * columns);
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(i);
  std::shuffle(table.begin(), table.end(), random.engine);
  for (int32_t& page : table) {
    if (random.In(0, 9) == 0) page = random.Int(-1, cache.num_pages);
  }
  const auto layer = random.Ints(batch, 0, cache.num_layers - 1), lens = random.Ints(batch, 0, capacity + 2);
  const auto ranks = random.Ints(batch, 0, seqs.cp_size - 1), window = random.Ints(2 * batch, -12, random.In(-2, 200));
  const auto read_only = random.Ints(batch, -1, columns), positions = random.Ints(tokens, 0, 1000);
  const auto prefix_pages = random.Ints(random.In(0, 3), 0, cache.num_pages - 1), prefix_len = random.Ints(1, 0, 100);
  const std::vector<uint8_t> tree(tokens);  // only whether there is one matters here
  const std::vector<uint32_t> turns = {0x01234567, 0x89abcdef};
  seqs.layer = layer.data();
  seqs.page_table = table.data();
  seqs.kv_lens = lens.data();
  seqs.q_ranges = ranges.data();
  if (random.In(0, 1) == 0 || seqs.cp_size > 1) seqs.cp_rank = ranks.data();
  if (random.In(0, 2) == 0) {
    seqs.prefix_pages = prefix_pages.data();
    seqs.prefix_len = prefix_len.data();
    seqs.num_prefix_pages = static_cast<int64_t>(prefix_pages.size());
  }
  params.score.is_causal = random.In(0, 1) == 0;
  if (random.In(0, 1) == 0) params.score.window = window.data();
  if (random.In(0, 3) == 0) params.score.tree_mask = tree.data();
  params.score.tree_columns = 1;
  std::vector<uint16_t> key(tokens * heads * Traits::kDim), value(key.size());
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t head = 0; head < heads; ++head) {
      const auto row = (t * heads + head) * Traits::kDim;
      std::fill_n(key.begin() + row, Traits::kDim, Mark(t, heads, head, true));
      std::fill_n(value.begin() + row, Traits::kDim, Mark(t, heads, head, false));
    }
  }
  AppendParams& append = params.append;
  append.cache = cache;
  append.seqs = seqs;
  append.key = key.data();
  append.value = value.data();
  if (random.In(0, 1) == 0) append.read_only_pages = read_only.data();
  append.rope.dim = 2;
  append.rope.turns = turns.data();
  if (random.In(0, 1) == 0) append.rope.positions = positions.data();

  // append_kv's rule: `must` for the lowest owner of a row of the packed arrays, `may` for any sequence that claims it.
  append::Stored must, may;
  for (int64_t t = 0; t < tokens; ++t) {
    bool owned = false;
    for (int64_t b = 0; b < batch; ++b) {
      const TokenRange range = QueryRange(seqs, b);
      if (t < range.lo || t >= range.hi) continue;
      const int64_t position = lens[b] - (range.hi - range.lo) + (t - range.lo);
      const WriteSlot to = FindWriteSlot(cache, seqs, append.read_only_pages, b, position);
      for (int64_t head = 0; head < heads && to.page != kUnmapped; ++head) {
        for (const bool is_key : {true, false}) {
          const std::pair<int64_t, bool> place = {CacheRow(cache, to.page, head, to.slot), is_key};
          may[place].insert(Mark(t, heads, head, is_key));
          if (!owned) must[place].insert(Mark(t, heads, head, is_key));
        }
      }
      owned = true;
    }
  }

  decode::CallFacts facts = {};
  facts.appends = true;
  facts.max_keys = static_cast<int>(columns * cache.page_size);
  while (1 << facts.page_shift < cache.page_size) ++facts.page_shift;
  facts.plain =
      seqs.prefix_len == nullptr && seqs.cp_rank == nullptr && seqs.cp_size == 1 && params.score.window == nullptr;

  append::Stored all;
  append::g_turned.clear();
  for (int64_t b = 0; b < batch; ++b) {
    const SequenceView view = ViewSequence(params, b);
    if (view.q_len == 0) continue;
    const BlockList<kBlock> blocks(view, 0, view.q_len - 1);
    const int64_t total = std::max(blocks.total(), 1);
    for (int64_t head = 0; head < heads; ++head) {
      append::Stored in_unit;
      for (int64_t begin = 0, end; begin < total; begin = end) {
        end = random.In(begin + 1, total);
        append::g_stored.clear();
        for (threadIdx.x = 0; threadIdx.x < Traits::kThreads; ++threadIdx.x) {
          const decode::NewRows<Traits> rows(params, facts, view, blocks, b, head, begin, end);
          float s_row[Traits::kDim];
          rows.Store(layer[b], s_row, nullptr, false);
        }
        for (const auto& [place, marks] : append::g_stored) {
          for (const uint16_t mark : marks) {
            Check(in_unit[place].insert(mark).second, "two parts of a unit store a row");
            all[place].insert(mark);
          }
        }
        for (int64_t block = begin; block < end && block < blocks.total(); ++block) {
          if (blocks.RunOf(static_cast<int>(block)) != kOwnRun) continue;
          const int first = blocks.FirstKey(static_cast<int>(block));
          for (int64_t t = 0; t < view.q_len; ++t) {
            const int64_t position = lens[b] - view.q_len + t, j = position / seqs.cp_size;
            if (position < 0 || j < first || j >= first + kBlock || !blocks.seen[kOwnRun].Holds(static_cast<int>(j)))
              continue;
            const WriteSlot to = FindWriteSlot(cache, seqs, append.read_only_pages, b, position);
            if (to.page == kUnmapped) continue;
            for (const bool is_key : {true, false}) {
              const auto found = append::g_stored.find({CacheRow(cache, to.page, head, to.slot), is_key});
              const uint16_t mark = Mark(view.first_token + t, heads, head, is_key);
              Check(found != append::g_stored.end() && found->second.count(mark) == 1, "a part reads before it stores");
              Check(decode::FirstNewBlock(params, facts, view, blocks) <= block, "a block with a new key is loaded before that is stored");
              const SinCos turn = RopeSinCos(append.rope, b, 0, view.first_token + t, FirstPosition(seqs) + position);
              Check(append::g_turned[mark] == turn.cos, "a row is turned by another angle");
            }
          }
        }
      }
    }
  }
  for (const auto& [place, marks] : must) {
    for (const uint16_t mark : marks) Check(all[place].count(mark) == 1, "a row is not stored");
  }
  for (const auto& [place, marks] : all) {
    for (const uint16_t mark : marks)
      Check(may[place].count(mark) == 1, "a row is stored that append_kv would not store");
  }
}

}  // namespace
}  // namespace turboattn

int main(int argc, char** argv) {
  const int64_t count = argc > 1 ? std::atoll(argv[1]) : 500;
  const uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  for (int64_t i = 0; i < count; ++i) {
    turboattn::Random random{std::mt19937_64(seed * 1000003 + static_cast<uint64_t>(i))};
    turboattn::FuzzStep(random);
  }
  std::printf("fuzz_new_rows: %lld calls\n", static_cast<long long>(count));
  return 0;
}

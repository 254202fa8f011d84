// append_kv on the CPU: bias, RoPE, one rounding to E, encode, store.
#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "kernels/common/kv_codec.h"
#include "kernels/common/page_walk.h"
#include "kernels/cpu/kernels.h"
#include "kernels/cpu/prologue.h"

namespace turboattn::cpu {
namespace {

// One of the two arrays that a token is written to.
struct Side {
  const void* source;  // [T,K,width] E
  const void* bias;    // [K,width]; may be null
  void* pool;          // [L,N,K,P,width] kv_dtype
  void* params;        // as KvCache::key_params
  int64_t width;       // D or Dv
};

template <class E, int kBits>
RowScale StoreParams(const float* x, int64_t width, E* pair) {
  float min = Infinity(), max = -Infinity();
  bool finite = true;
  for (int64_t d = 0; d < width; ++d) {
    finite &= IsFinite(x[d]);
    min = x[d] < min ? x[d] : min;
    max = x[d] > max ? x[d] : max;
  }
  const RowScale scale = MakeRowScale<E, kBits>(min, max, finite);
  pair[0] = FromFloat<E>(scale.scale);
  pair[1] = FromFloat<E>(scale.zero);
  return scale;
}

// Encodes x[width], E values, into row `row` of the pool [L,N,K,P]. layer_head: index into the fp8 scales [L,K].
template <class E>
void StoreRow(const Side& side, DType kv_dtype, int64_t row, int64_t layer_head, const float* x) {
  const int64_t width = side.width;
  switch (kv_dtype) {
    case DType::kInt8: {
      const RowScale scale = StoreParams<E, 8>(x, width, static_cast<E*>(side.params) + 2 * row);
      uint8_t* out = static_cast<uint8_t*>(side.pool) + row * width;
      for (int64_t d = 0; d < width; ++d) out[d] = EncodeCode<8>(x[d], scale);
      break;
    }
    case DType::kInt4: {
      const RowScale scale = StoreParams<E, 4>(x, width, static_cast<E*>(side.params) + 2 * row);
      uint8_t* out = static_cast<uint8_t*>(side.pool) + row * (width / 2);
      for (int64_t d = 0; d < width; d += 8) {
        uint8_t codes[8];
        for (int e = 0; e < 8; ++e) codes[e] = EncodeCode<4>(x[d + e], scale);
        const uint32_t packed = PackInt4(codes);
        for (int byte = 0; byte < 4; ++byte) out[d / 2 + byte] = static_cast<uint8_t>(packed >> (8 * byte));
      }
      break;
    }
    case DType::kFloat8E4M3: {
      const float scale = static_cast<const float*>(side.params)[layer_head];
      fp8_e4m3* out = static_cast<fp8_e4m3*>(side.pool) + row * width;
      for (int64_t d = 0; d < width; ++d) out[d] = EncodeFp8(x[d], scale);
      break;
    }
    default: {
      E* out = static_cast<E*>(side.pool) + row * width;
      for (int64_t d = 0; d < width; ++d) out[d] = FromFloat<E>(x[d]);
    }
  }
}

struct Scratch {
  std::unique_ptr<float[]> row;     // [max(D, Dv)]
  std::unique_ptr<SinCos[]> turns;  // [R/2]
};

template <class E>
void AppendToken(const AppendParams& params, int64_t b, int64_t token, int64_t position, Scratch& scratch) {
  const KvCache& cache = params.cache;
  const WriteSlot slot = FindWriteSlot(cache, params.seqs, params.read_only_pages, b, position);
  if (slot.page == kUnmapped) return;
  const int64_t layer = slot.page / cache.num_pages;
  const Side sides[2] = {{params.key, params.key_bias, cache.key, cache.key_params, cache.head_dim},
                         {params.value, params.value_bias, cache.value, cache.value_params, cache.value_dim}};
  float* x = scratch.row.get();
  MakeTurns(params.rope, b, token, FirstPosition(params.seqs) + position, scratch.turns.get());
  for (int s = 0; s < 2; ++s) {
    const Side& side = sides[s];
    if (side.source == nullptr) continue;
    for (int64_t head = 0; head < cache.num_kv_heads; ++head) {
      const E* source = static_cast<const E*>(side.source) + (token * cache.num_kv_heads + head) * side.width;
      LoadWithBias(source, side.bias, head * side.width, params.bias_dtype, side.width, x);
      if (s == 0) Rotate(params.rope, scratch.turns.get(), x);
      for (int64_t d = 0; d < side.width; ++d) x[d] = RoundTo<E>(x[d]);
      StoreRow<E>(side, cache.kv_dtype, CacheRow(cache, slot.page, head, slot.slot), layer * cache.num_kv_heads + head,
                  x);
    }
  }
}

// Consecutive tokens of one sequence.
struct Item {
  int64_t b;
  int64_t first;  // token of the sequence
  int64_t end;
};

}  // namespace

Status Append(const AppendParams& params, Parallel& parallel) {
  const KeepSubnormals keep;
  const Sequences& seqs = params.seqs;
  if (seqs.max_pages == 0 || params.cache.num_pages == 0 || params.cache.num_layers == 0) return Status();
  // About 16 KB of new keys and values an item: a few microseconds, far above the cost of handing it to a thread.
  const int64_t token_bytes =
      RowBytes(params.cache.dtype, params.cache.num_kv_heads * (params.cache.head_dim + params.cache.value_dim));
  const int64_t chunk = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, token_bytes));
  std::vector<Item> items;
  for (int64_t b = 0; b < seqs.batch; ++b) {
    const TokenRange range = QueryRange(seqs, b);
    for (int64_t i = 0; i < range.hi - range.lo; i += chunk)
      items.push_back({b, i, std::min(i + chunk, range.hi - range.lo)});
  }
  if (items.empty()) return Status();
  std::vector<Scratch> scratch(std::min<int64_t>(parallel.num_workers(), static_cast<int64_t>(items.size())));
  for (Scratch& s : scratch) {
    s.row.reset(new (std::nothrow) float[std::max(params.cache.head_dim, params.cache.value_dim)]);
    s.turns.reset(new (std::nothrow) SinCos[params.rope.dim / 2]);
    if (s.row == nullptr || s.turns == nullptr) return Status::Error("no memory for a row");
  }
  parallel.For(static_cast<int64_t>(items.size()), [&](int64_t n, int worker) {
    const Item& item = items[n];
    const TokenRange range = QueryRange(seqs, item.b);
    for (int64_t i = item.first; i < item.end; ++i) {
      const int64_t position = int64_t{seqs.kv_lens[item.b]} - (range.hi - range.lo) + i;
      switch (params.cache.dtype) {
        case DType::kBfloat16:
          AppendToken<bf16>(params, item.b, range.lo + i, position, scratch[worker]);
          break;
        case DType::kFloat16:
          AppendToken<fp16>(params, item.b, range.lo + i, position, scratch[worker]);
          break;
        default:
          AppendToken<float>(params, item.b, range.lo + i, position, scratch[worker]);
          break;
      }
    }
  });
  return Status();
}

}  // namespace turboattn::cpu

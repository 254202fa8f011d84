// gather_kv on the CPU: stored rows, decoded and laid out by sequence and position.
#include <cstring>

#include "kernels/common/kv_codec.h"
#include "kernels/common/page_walk.h"
#include "kernels/cpu/kernels.h"

namespace turboattn::cpu {
namespace {

// One of the two pools that are read.
struct Side {
  const void* pool;    // [L,N,K,P,width] kv_dtype
  const void* params;  // as KvCache::key_params
  void* out;           // [B,M*P,K,width] out_dtype
  int64_t width;       // D or Dv
};

// The first `width` columns of row `row` of [L,N,K,P] to out; a stored row is row_width long. fp8 decodes to Out,
// everything else to E first.
template <class E, class Out>
void DecodeRow(const Side& side, DType kv_dtype, int64_t row_width, int64_t row, int64_t layer_head, Out* out) {
  const int64_t width = side.width;
  switch (kv_dtype) {
    case DType::kInt8:
    case DType::kInt4: {
      const E* pair = static_cast<const E*>(side.params) + 2 * row;
      const RowScale scale = {ToFloat(pair[0]), ToFloat(pair[1])};
      const bool packed = kv_dtype == DType::kInt4;
      const uint8_t* codes = static_cast<const uint8_t*>(side.pool) + row * RowBytes(kv_dtype, row_width);
      for (int64_t d = 0; d < width; ++d)
        out[d] = FromFloat<Out>(DecodeCode<E>(packed ? Int4Code(codes, d) : codes[d], scale));
      break;
    }
    case DType::kFloat8E4M3: {
      const float scale = static_cast<const float*>(side.params)[layer_head];
      const fp8_e4m3* codes = static_cast<const fp8_e4m3*>(side.pool) + row * row_width;
      for (int64_t d = 0; d < width; ++d) out[d] = FromFloat<Out>(DecodeFp8<Out>(codes[d], scale));
      break;
    }
    default: {
      const E* values = static_cast<const E*>(side.pool) + row * row_width;
      for (int64_t d = 0; d < width; ++d) out[d] = FromFloat<Out>(ToFloat(values[d]));
    }
  }
}

// Column `column` of sequence b's page table: P tokens of all heads.
template <class E, class Out>
void GatherPage(const GatherParams& params, int64_t b, int64_t column) {
  const KvCache& cache = params.cache;
  const int64_t P = cache.page_size, K = cache.num_kv_heads;
  const int64_t first = column * P;
  const bool shared = cache.value == nullptr;  // values are the first columns of the keys
  const int64_t present = Clamp(KeyLimit(params.seqs, b, P) - first, 0, P);
  const int64_t page = present > 0 ? PageAt(cache, params.seqs, b, column) : kUnmapped;
  for (const Side& side : {Side{cache.key, cache.key_params, params.key, cache.head_dim},
                           shared ? Side{cache.key, cache.key_params, params.value, cache.value_dim}
                                  : Side{cache.value, cache.value_params, params.value, cache.value_dim}}) {
    for (int64_t slot = 0; slot < P; ++slot) {
      Out* out = static_cast<Out*>(side.out) + (b * params.seqs.max_pages * P + first + slot) * K * side.width;
      if (page == kUnmapped || slot >= present) {
        std::memset(out, 0, static_cast<size_t>(K * side.width) * sizeof(Out));
        continue;
      }
      for (int64_t head = 0; head < K; ++head) {
        DecodeRow<E>(side, cache.kv_dtype, side.pool == cache.key ? cache.head_dim : cache.value_dim,
                     CacheRow(cache, page, head, slot), page / cache.num_pages * K + head, out + head * side.width);
      }
    }
  }
}

template <class E>
void GatherAs(const GatherParams& params, int64_t b, int64_t column) {
  switch (params.out_dtype) {
    case DType::kBfloat16:
      return GatherPage<E, bf16>(params, b, column);
    case DType::kFloat16:
      return GatherPage<E, fp16>(params, b, column);
    default:
      return GatherPage<E, float>(params, b, column);
  }
}

}  // namespace

Status Gather(const GatherParams& params, Parallel& parallel) {
  const KeepSubnormals keep;
  const int64_t M = params.seqs.max_pages;
  parallel.For(params.seqs.batch * M, [&](int64_t item, int) {
    switch (params.cache.dtype) {
      case DType::kBfloat16:
        return GatherAs<bf16>(params, item / M, item % M);
      case DType::kFloat16:
        return GatherAs<fp16>(params, item / M, item % M);
      default:
        return GatherAs<float>(params, item / M, item % M);
    }
  });
  return Status();
}

}  // namespace turboattn::cpu

// gather_kv on the GPU: decoded, contiguous K and V. One block a (sequence, position), eight elements a thread.
#ifndef TURBOATTN_KERNELS_GATHER_KERNEL_CUH_
#define TURBOATTN_KERNELS_GATHER_KERNEL_CUH_

#include "core/params.h"
#include "kernels/common/chunk.cuh"
#include "kernels/common/kv_codec.h"
#include "kernels/common/page_walk.h"
#include "kernels/gather/traits.h"

namespace turboattn::gather {

// One of the two arrays that a token is read from.
struct Side {
  const void* pool;    // [L,N,K,P,pool_width] kv dtype
  const void* params;  // as KvCache::key_params
  int64_t pool_width;  // D or Dv
  void* out;           // [B,M*P,K,width] out dtype
  int64_t width;       // pool_width; less where the values are the first columns of the keys
};

// Elements d .. d + 7 of row `row` of [L,N,K,P], as float32. fp8 values are rounded straight to Out, the others are E
// values.
template <class Traits>
__device__ inline void DecodeChunk(const Side& side, int64_t row, int64_t layer_head, int64_t d, float x[kChunk]) {
  using E = typename Traits::E;
  constexpr DType kKv = Traits::kKvDType;
  [[maybe_unused]] RowScale scale{};
  if constexpr (kHasRowParams<kKv>) {
    const E* params = static_cast<const E*>(side.params) + 2 * row;
    scale = {ToFloat(params[0]), ToFloat(params[1])};
  }
  if constexpr (kKv == DType::kInt4) {
    const uint32_t packed = static_cast<const uint32_t*>(side.pool)[(row * side.pool_width + d) / kChunk];
    for (int e = 0; e < kChunk; ++e) x[e] = DecodeCode<E>(packed >> Int4Shift(e) & 0xf, scale);
  } else {
    const auto chunk = LoadChunk<Element<kKv>>(side.pool, row * side.pool_width + d);
    for (int e = 0; e < kChunk; ++e) {
      if constexpr (kKv == DType::kInt8) {
        x[e] = DecodeCode<E>(chunk.e[e], scale);
      } else if constexpr (kKv == DType::kFloat8E4M3) {
        x[e] = DecodeFp8<typename Traits::Out>(chunk.e[e], static_cast<const float*>(side.params)[layer_head]);
      } else {
        x[e] = ToFloat(chunk.e[e]);
      }
    }
  }
}

// Grid-stride over the B * M * P positions.
template <class Traits>
__global__ void __launch_bounds__(kMaxThreads, kMinBlocks) GatherKernel(const __grid_constant__ GatherParams params) {
  using Out = typename Traits::Out;
  const KvCache& cache = params.cache;
  const int64_t positions = params.seqs.max_pages * cache.page_size;  // a sequence
  const bool shared_value = cache.value == nullptr;
  for (int64_t item = blockIdx.x; item < params.seqs.batch * positions; item += gridDim.x) {
    // Which slot: the same for the whole block. Entries past kv_len are never dereferenced.
    const int64_t b = item / positions, position = item % positions;
    const bool in_range = position < KeyLimit(params.seqs, b, cache.page_size);
    const int64_t page = in_range ? PageAt(cache, params.seqs, b, position / cache.page_size) : kUnmapped;
    for (const bool is_key : {true, false}) {
      const Side side = is_key ? Side{cache.key, cache.key_params, cache.head_dim, params.key, cache.head_dim}
                        : shared_value
                            ? Side{cache.key, cache.key_params, cache.head_dim, params.value, cache.value_dim}
                            : Side{cache.value, cache.value_params, cache.value_dim, params.value, cache.value_dim};
      // The heads' rows of a position are one array in the output: a chunk after the other, whatever the row length.
      const unsigned row_chunks = static_cast<unsigned>(side.width / kChunk);
      const unsigned chunks = static_cast<unsigned>(cache.num_kv_heads) * row_chunks;
      for (unsigned i = threadIdx.x; i < chunks; i += blockDim.x) {
        const unsigned head = i / row_chunks, d = i % row_chunks * kChunk;
        float x[kChunk] = {};
        if (page != kUnmapped) {
          DecodeChunk<Traits>(side, CacheRow(cache, page, head, position % cache.page_size),
                              page / cache.num_pages * cache.num_kv_heads + head, d, x);
        }
        Chunk<Out> chunk;
        for (int e = 0; e < kChunk; ++e) chunk.e[e] = FromFloat<Out>(x[e]);
        StoreChunk(side.out, (item * chunks + i) * kChunk, chunk);
      }
    }
  }
}

}  // namespace turboattn::gather

#endif  // TURBOATTN_KERNELS_GATHER_KERNEL_CUH_

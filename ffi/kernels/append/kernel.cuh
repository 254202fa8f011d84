// append_kv on the GPU: bias, RoPE, one rounding to E, encode, store. One block a token, one warp a (token, head) row
// of K or V.
#ifndef TURBOATTN_KERNELS_APPEND_KERNEL_CUH_
#define TURBOATTN_KERNELS_APPEND_KERNEL_CUH_

#include <climits>

#include "core/params.h"
#include "kernels/append/traits.h"
#include "kernels/common/chunk.cuh"
#include "kernels/common/kv_codec.h"
#include "kernels/common/page_walk.h"
#include "kernels/common/rope.h"

namespace turboattn::append {

// The lowest sequence that owns row `token` of the packed arrays, or INT_MAX. Run by the whole block; ranges are not
// trusted to be sorted, so every one is looked at (256 at a time). `s_owner`: one shared int.
__device__ inline int FindOwner(const Sequences& seqs, int64_t token, int* s_owner) {
  if (seqs.q_ranges == nullptr) return static_cast<int>(token / seqs.uniform_q_len);
  if (threadIdx.x == 0) *s_owner = INT_MAX;
  __syncthreads();
  for (int64_t b = threadIdx.x; b < seqs.batch; b += blockDim.x) {
    const TokenRange range = QueryRange(seqs, b);
    if (token >= range.lo && token < range.hi) atomicMin(s_owner, static_cast<int>(b));
  }
  __syncthreads();
  return *s_owner;
}

// One of the two arrays that a token is written to.
struct Side {
  const void* source;  // [T,K,width] E
  const void* bias;    // [K,width] bias_dtype; may be null
  void* pool;          // [L,N,K,P,width] kv dtype
  void* params;        // as KvCache::key_params
  int64_t width;       // D or Dv
};

// source + bias, as float32, for one row: into s_row[width]. Run by one warp.
template <class E>
__device__ inline void LoadRow(const Side& side, DType bias_dtype, int64_t source_row, int64_t head, float* s_row) {
  for (int64_t d = threadIdx.x % kWarp * kChunk; d < side.width; d += kWarp * kChunk) {
    const Chunk<E> chunk = LoadChunk<E>(side.source, source_row * side.width + d);
    float x[kChunk];
    for (int e = 0; e < kChunk; ++e) x[e] = ToFloat(chunk.e[e]);
    if (side.bias != nullptr && bias_dtype == DType::kFloat32) {
      const Chunk<float> bias = LoadChunk<float>(side.bias, head * side.width + d);
      for (int e = 0; e < kChunk; ++e) x[e] = AddRn(x[e], bias.e[e]);
    } else if (side.bias != nullptr) {
      const Chunk<E> bias = LoadChunk<E>(side.bias, head * side.width + d);
      for (int e = 0; e < kChunk; ++e) x[e] = AddRn(x[e], ToFloat(bias.e[e]));
    }
    for (int e = 0; e < kChunk; ++e) s_row[d + e] = x[e];
  }
  __syncwarp();
}

// Scale and zero of the row in s_row, whose elements are E values. Run by one warp; every lane gets the result.
template <class E, int kBits>
__device__ inline RowScale WarpRowScale(const float* s_row, int64_t width) {
  float min = Infinity(), max = -Infinity();
  bool finite = true;
  for (int64_t d = threadIdx.x % kWarp; d < width; d += kWarp) {
    const float x = s_row[d];
    finite = finite && IsFinite(x);
    min = x < min ? x : min;
    max = x > max ? x : max;
  }
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const float other_min = __shfl_xor_sync(~0u, min, step), other_max = __shfl_xor_sync(~0u, max, step);
    min = other_min < min ? other_min : min;
    max = other_max > max ? other_max : max;
  }
  return MakeRowScale<E, kBits>(min, max, __all_sync(~0u, finite));
}

// Encodes the row in s_row (E values) into row `row` of [L,N,K,P]. Run by one warp.
template <class Traits>
__device__ inline void StoreRow(const Side& side, int64_t row, int64_t layer_head, const float* s_row) {
  using E = typename Traits::E;
  constexpr DType kKv = Traits::kKvDType;
  const int lane = threadIdx.x % kWarp;
  [[maybe_unused]] RowScale scale{};
  if constexpr (kHasRowParams<kKv>) {
    scale = WarpRowScale<E, Traits::kBits>(s_row, side.width);
    if (lane < 2) static_cast<E*>(side.params)[2 * row + lane] = FromFloat<E>(lane == 0 ? scale.scale : scale.zero);
  }
  for (int64_t d = lane * kChunk; d < side.width; d += kWarp * kChunk) {
    if constexpr (kKv == DType::kInt4) {
      uint8_t codes[kChunk];
      for (int e = 0; e < kChunk; ++e) codes[e] = EncodeCode<4>(s_row[d + e], scale);
      static_cast<uint32_t*>(side.pool)[(row * side.width + d) / kChunk] = PackInt4(codes);
    } else {
      Chunk<Element<kKv>> chunk;
      for (int e = 0; e < kChunk; ++e) {
        if constexpr (kKv == DType::kInt8) {
          chunk.e[e] = EncodeCode<8>(s_row[d + e], scale);
        } else if constexpr (kKv == DType::kFloat8E4M3) {
          chunk.e[e] = EncodeFp8(s_row[d + e], static_cast<const float*>(side.params)[layer_head]);
        } else {
          chunk.e[e] = FromFloat<E>(s_row[d + e]);
        }
      }
      StoreChunk(side.pool, row * side.width + d, chunk);
    }
  }
}

// Elements of the longest row that a warp holds in shared memory.
__host__ __device__ inline int64_t RowWidth(const AppendParams& params) {
  const int64_t value_width = params.value != nullptr ? params.cache.value_dim : 0;
  return params.cache.head_dim > value_width ? params.cache.head_dim : value_width;
}

// Grid-stride over the T packed tokens. Dynamic shared memory: SinCos[R/2] of the token, then one float row a warp (see
// launch.cuh).
template <class Traits>
__global__ void __launch_bounds__(kMaxWarps* kWarp) AppendKernel(const __grid_constant__ AppendParams params) {
  using E = typename Traits::E;
  extern __shared__ float2 s_dynamic[];
  __shared__ int s_owner;
  const KvCache& cache = params.cache;
  const RopeParams& rope = params.rope;
  const int64_t pairs = rope.dim / 2;
  SinCos* s_turns = reinterpret_cast<SinCos*>(s_dynamic);
  float* s_row = reinterpret_cast<float*>(s_turns + pairs) + threadIdx.x / kWarp * RowWidth(params);

  for (int64_t token = blockIdx.x; token < params.seqs.num_tokens; token += gridDim.x) {
    __syncthreads();  // the previous token's owner and turns have been read
    // Whose token, where to: the same for the whole block, so the early exits are uniform.
    const int b = FindOwner(params.seqs, token, &s_owner);
    if (b >= params.seqs.batch) continue;
    const TokenRange range = QueryRange(params.seqs, b);
    const int64_t position = static_cast<int64_t>(params.seqs.kv_lens[b]) - (range.hi - range.lo) + (token - range.lo);
    const WriteSlot slot = FindWriteSlot(cache, params.seqs, params.read_only_pages, b, position);
    if (slot.page == kUnmapped) continue;
    const int64_t layer = slot.page / cache.num_pages;

    // Angles once a token, for all its heads.
    for (int64_t j = threadIdx.x; j < pairs; j += blockDim.x) s_turns[j] = RopeSinCos(rope, b, j, token, position);
    __syncthreads();

    const int64_t rows = cache.num_kv_heads * (params.value != nullptr ? 2 : 1);
    for (int64_t r = threadIdx.x / kWarp; r < rows; r += blockDim.x / kWarp) {
      const bool is_key = r < cache.num_kv_heads;
      const int64_t head = is_key ? r : r - cache.num_kv_heads;
      const Side side = is_key
                            ? Side{params.key, params.key_bias, cache.key, cache.key_params, cache.head_dim}
                            : Side{params.value, params.value_bias, cache.value, cache.value_params, cache.value_dim};
      LoadRow<E>(side, params.bias_dtype, token * cache.num_kv_heads + head, head, s_row);
      if (is_key) {
        for (int64_t j = threadIdx.x % kWarp; j < pairs; j += kWarp) {
          RopeRotate(s_turns[j], &s_row[RopeFirst(rope, j)], &s_row[RopeSecond(rope, j)]);
        }
        __syncwarp();
      }
      for (int64_t d = threadIdx.x % kWarp; d < side.width; d += kWarp) s_row[d] = RoundTo<E>(s_row[d]);
      __syncwarp();
      StoreRow<Traits>(side, CacheRow(cache, slot.page, head, slot.slot), layer * cache.num_kv_heads + head, s_row);
      __syncwarp();  // the row is free for the next head
    }
  }
}

}  // namespace turboattn::append

#endif  // TURBOATTN_KERNELS_APPEND_KERNEL_CUH_

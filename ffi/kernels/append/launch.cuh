// Which append kernel runs, its grid and its shared memory.
#ifndef TURBOATTN_KERNELS_APPEND_LAUNCH_CUH_
#define TURBOATTN_KERNELS_APPEND_LAUNCH_CUH_

#include <algorithm>
#include <climits>

#include "core/cuda_launch.h"
#include "kernels/append/kernel.cuh"

namespace turboattn::append {

constexpr int64_t kSharedBytes = 47 * 1024;  // beside what is static; without an opt-in it ends at 48 KB

// Tokens of a block: about `rows` rows where there are many tokens, fewer where the card would not be filled, at most
// `limit`.
inline int BlockTokens(const AppendParams& params, int64_t token_rows, int64_t rows, int64_t limit) {
  constexpr int64_t kFewBlocks = 512;  // four on each of 128 SMs
  const int64_t filling = (params.seqs.num_tokens + kFewBlocks - 1) / kFewBlocks;
  return static_cast<int>(std::clamp<int64_t>(std::min(rows / token_rows, filling), 1, limit));
}

// Rows of K, and of V, that a block moves at a time.
template <int kWidth>
constexpr int64_t kPassRows = kMaxWarps * kWarp / kRowLanes<kWidth>;

template <int kWidth>
int RegisterBlockTokens(const AppendParams& params) {
  constexpr int64_t kTurnBytes = kWidth / 2 * static_cast<int64_t>(sizeof(SinCos));
  constexpr int64_t kFitting = (kSharedBytes - kMaxWarps * kWarp * ComingRows::kThreadBytes) / kTurnBytes;
  return BlockTokens(params, params.cache.num_kv_heads, 16 * kPassRows<kWidth>,
                     std::min<int64_t>(kMaxTokens, kFitting));
}

template <class Traits, int kWidth>
cudaError_t LaunchRegisters(const AppendParams& params, int block_tokens, cudaStream_t stream) {
  const int64_t lanes = std::min(block_tokens * params.cache.num_kv_heads, kPassRows<kWidth>) * kRowLanes<kWidth>;
  const auto threads = static_cast<unsigned>((lanes + kWarp - 1) / kWarp * kWarp);
  const auto blocks = static_cast<unsigned>((params.seqs.num_tokens + block_tokens - 1) / block_tokens);
  const int64_t turn_bytes = block_tokens * (params.rope.dim / 2) * static_cast<int64_t>(sizeof(SinCos));
  const int64_t shared_bytes = turn_bytes + threads * ComingRows::kThreadBytes;
  AppendKernel<Traits, kWidth><<<blocks, threads, shared_bytes, stream>>>(params, block_tokens);
  return cudaGetLastError();
}

template <class Traits>
cudaError_t LaunchAny(const AppendParams& params, int64_t token_rows, cudaStream_t stream) {
  const int64_t row_bytes = RowWidth(params) * static_cast<int64_t>(sizeof(float));
  const int64_t token_bytes = params.rope.dim / 2 * static_cast<int64_t>(sizeof(SinCos));
  // At most 8 KB of turns, unless one token has more, leave room for 8 warps' rows up to D = 1,200; wider rows get
  // fewer warps, never a failure below D = 5,800.
  constexpr int64_t kTurnBytes = 8 * 1024;
  const int64_t token_limit =
      token_bytes == 0 ? kMaxAnyTokens : std::clamp<int64_t>(kTurnBytes / token_bytes, 1, kMaxAnyTokens);
  const int block_tokens = BlockTokens(params, token_rows, 2 * kMaxWarps, token_limit);
  const int64_t fitting = (kSharedBytes - block_tokens * token_bytes) / row_bytes;
  if (fitting < 1) return cudaErrorInvalidConfiguration;
  const int64_t warps = std::min({int64_t{kMaxWarps}, block_tokens * token_rows, fitting});
  const auto threads = static_cast<unsigned>(warps * kWarp);
  const auto blocks = static_cast<unsigned>((params.seqs.num_tokens + block_tokens - 1) / block_tokens);
  const int64_t shared_bytes = block_tokens * token_bytes + warps * row_bytes;
  AppendAnyKernel<Traits><<<blocks, threads, shared_bytes, stream>>>(params, block_tokens);
  return cudaGetLastError();
}

template <class Traits>
cudaError_t Launch(const AppendParams& params, cudaStream_t stream) {
  const KvCache& cache = params.cache;
  const Sequences& seqs = params.seqs;
  if (seqs.num_tokens == 0 || seqs.batch == 0 || seqs.max_pages == 0 || cache.num_pages == 0 ||
      cache.num_kv_heads == 0) {
    return cudaSuccess;
  }
  const bool has_value = params.value != nullptr;  // else the values are the first columns of the keys (MLA)
  if (cache.head_dim % kChunk != 0 || (has_value && cache.value_dim % kChunk != 0)) return cudaErrorInvalidValue;
  if (seqs.num_tokens > INT_MAX || cache.num_kv_heads > INT_MAX / (2 * kMaxTokens))
    return cudaErrorInvalidConfiguration;
  const int64_t token_rows = cache.num_kv_heads * (has_value ? 2 : 1);
  const bool one_width = !has_value || cache.value_dim == cache.head_dim;
  const bool whole_rope = params.rope.dim == 0 || params.rope.dim == cache.head_dim;
  // AppendKernel counts rows of the pool in 32 bits.
  const double pool_rows = static_cast<double>(cache.num_layers) * static_cast<double>(cache.num_pages) *
                           static_cast<double>(cache.num_kv_heads) * static_cast<double>(cache.page_size);
  const bool small = pool_rows <= UINT32_MAX;
  if (one_width && whole_rope && small) {
    switch (cache.head_dim) {
      case 64:
        return LaunchRegisters<Traits, 64>(params, RegisterBlockTokens<64>(params), stream);
      case 128:
        return LaunchRegisters<Traits, 128>(params, RegisterBlockTokens<128>(params), stream);
      case 256:
        return LaunchRegisters<Traits, 256>(params, RegisterBlockTokens<256>(params), stream);
    }
  }
  return LaunchAny<Traits>(params, token_rows, stream);
}

}  // namespace turboattn::append

#endif  // TURBOATTN_KERNELS_APPEND_LAUNCH_CUH_

// The layout of the workspace, the width of a word and the grid of the copy_pages kernels.
#ifndef TURBOATTN_KERNELS_COPY_PAGES_LAUNCH_CUH_
#define TURBOATTN_KERNELS_COPY_PAGES_LAUNCH_CUH_

#include <algorithm>
#include <climits>
#include <cstdint>

#include "core/cuda_launch.h"
#include "kernels/copy_pages/kernel.cuh"

namespace turboattn::copy_pages {

template <class Word>
cudaError_t LaunchWords(const CopyPagesParams& params, PageArrays pages, cudaStream_t stream) {
  int64_t most_words = 0;
  for (int a = 0; a < pages.count; ++a) {
    pages.arrays[a].page_words /= static_cast<int64_t>(sizeof(Word));
    most_words = std::max(most_words, pages.arrays[a].page_words);
  }
  constexpr int64_t kBlockWords = int64_t{kThreads} * kThreadWords;
  const int64_t slices = std::clamp<int64_t>((most_words + kBlockWords - 1) / kBlockWords, 1, kMaxSlices);
  const dim3 grid(static_cast<unsigned>(std::min<int64_t>(params.count, INT_MAX)), static_cast<unsigned>(slices));
  StageKernel<Word><<<grid, kThreads, 0, stream>>>(params, pages);
  WriteKernel<Word><<<grid, kThreads, 0, stream>>>(params, pages);
  return cudaGetLastError();
}

inline cudaError_t Launch(const CopyPagesParams& params, cudaStream_t stream) {
  const KvCache& cache = params.cache;
  if (params.count == 0) return cudaSuccess;
  const int64_t rows = cache.num_kv_heads * cache.page_size;  // a page
  const int64_t pair_bytes = 2 * RowBytes(cache.dtype, 1);
  // Page sizes in bytes for now; the launch of a word size turns them into words.
  const PageArrays::Array candidates[kMaxArrays] = {
      {cache.key, nullptr, rows * RowBytes(cache.kv_dtype, cache.head_dim)},
      {cache.value, nullptr, rows * RowBytes(cache.kv_dtype, cache.value_dim)},
      {cache.key_params, nullptr, rows * pair_bytes},
      {cache.value_params, nullptr, rows * pair_bytes}};
  PageArrays pages{};
  char* staged = static_cast<char*>(params.workspace.data);
  uintptr_t bits = 0;  // a power of two divides all addresses and sizes when it divides this
  for (const PageArrays::Array& array : candidates) {
    if (array.pool == nullptr || array.page_words == 0) continue;
    pages.arrays[pages.count++] = {array.pool, staged, array.page_words};
    bits |= reinterpret_cast<uintptr_t>(array.pool) | reinterpret_cast<uintptr_t>(staged) |
            static_cast<uintptr_t>(array.page_words);
    staged += params.count * array.page_words;
  }
  if (staged - static_cast<char*>(params.workspace.data) > params.workspace.bytes) return cudaErrorInvalidValue;
  if (bits % 16 == 0) return LaunchWords<uint4>(params, pages, stream);
  if (bits % 8 == 0) return LaunchWords<uint2>(params, pages, stream);
  if (bits % 4 == 0) return LaunchWords<uint32_t>(params, pages, stream);
  return LaunchWords<uint8_t>(params, pages, stream);
}

}  // namespace turboattn::copy_pages

#endif  // TURBOATTN_KERNELS_COPY_PAGES_LAUNCH_CUH_

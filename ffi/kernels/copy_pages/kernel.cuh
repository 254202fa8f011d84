// copy_pages on the GPU: sources to the workspace, then the workspace to the destinations.
#ifndef TURBOATTN_KERNELS_COPY_PAGES_KERNEL_CUH_
#define TURBOATTN_KERNELS_COPY_PAGES_KERNEL_CUH_

#include <cstdint>

#include "core/params.h"
#include "kernels/common/page_walk.h"
#include "kernels/copy_pages/traits.h"

namespace turboattn::copy_pages {

// The arrays of a cache as pages of words.
struct PageArrays {
  struct Array {
    void* pool;         // page `layer * N + page` begins at word page * page_words
    void* staged;       // copy i begins at word i * page_words
    int64_t page_words;
  };
  Array arrays[kMaxArrays];
  int count;
};

// Both ends of copy i, as PageOf gives them; both kUnmapped when the copy is dropped.
struct Ends {
  int64_t source;
  int64_t destination;
};

__device__ inline Ends CopyEnds(const CopyPagesParams& params, int64_t i) {
  const Ends ends = {PageOf(params.cache, params.layer[i], params.source[i]),
                     PageOf(params.cache, params.layer[i], params.destination[i])};
  const bool valid = ends.source != kUnmapped && ends.destination != kUnmapped;
  return valid ? ends : Ends{kUnmapped, kUnmapped};
}

// Slice blockIdx.y of the page's words. `to` and `from` do not overlap.
template <class Word>
__device__ inline void CopyWords(void* to, const void* from, int64_t words) {
  Word* __restrict__ out = static_cast<Word*>(to);
  const Word* __restrict__ in = static_cast<const Word*>(from);
#pragma unroll kThreadWords
  for (int64_t w = int64_t{blockIdx.y} * kThreads + threadIdx.x; w < words; w += int64_t{gridDim.y} * kThreads)
    out[w] = in[w];
}

template <class Word>
__global__ void __launch_bounds__(kThreads)
    StageKernel(const __grid_constant__ CopyPagesParams params, const __grid_constant__ PageArrays pages) {
  for (int64_t i = blockIdx.x; i < params.count; i += gridDim.x) {
    const Ends ends = CopyEnds(params, i);
    if (ends.source == kUnmapped) continue;
    for (int a = 0; a < pages.count; ++a) {
      const PageArrays::Array& array = pages.arrays[a];
      CopyWords<Word>(static_cast<Word*>(array.staged) + i * array.page_words,
                      static_cast<const Word*>(array.pool) + ends.source * array.page_words, array.page_words);
    }
  }
}

template <class Word>
__global__ void __launch_bounds__(kThreads)
    WriteKernel(const __grid_constant__ CopyPagesParams params, const __grid_constant__ PageArrays pages) {
  for (int64_t i = blockIdx.x; i < params.count; i += gridDim.x) {
    const Ends ends = CopyEnds(params, i);
    if (ends.destination == kUnmapped) continue;  // the same for the whole block, as is `overwritten`
    bool later = false;
    for (int64_t j = i + 1 + threadIdx.x; j < params.count; j += kThreads)
      later = later || CopyEnds(params, j).destination == ends.destination;
    const bool overwritten = __syncthreads_or(later);
    if (overwritten) continue;
    for (int a = 0; a < pages.count; ++a) {
      const PageArrays::Array& array = pages.arrays[a];
      CopyWords<Word>(static_cast<Word*>(array.pool) + ends.destination * array.page_words,
                      static_cast<const Word*>(array.staged) + i * array.page_words, array.page_words);
    }
  }
}

}  // namespace turboattn::copy_pages

#endif  // TURBOATTN_KERNELS_COPY_PAGES_KERNEL_CUH_

// Sizes of the copy_pages kernels.
#ifndef TURBOATTN_KERNELS_COPY_PAGES_TRAITS_H_
#define TURBOATTN_KERNELS_COPY_PAGES_TRAITS_H_

namespace turboattn::copy_pages {

constexpr int kThreads = 256;    // a block
constexpr int kThreadWords = 4;  // words that a thread moves at least, where a page has as many: loads in flight
constexpr int kMaxSlices = 64;   // blocks that share a page
constexpr int kMaxArrays = 4;    // key, value and the parameters of both

}  // namespace turboattn::copy_pages

#endif  // TURBOATTN_KERNELS_COPY_PAGES_TRAITS_H_

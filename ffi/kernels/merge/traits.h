// Compile-time choices of a merge kernel: the row of kernel_matrix.cmake, and what the launch knows only at run time.
#ifndef TURBOATTN_KERNELS_MERGE_TRAITS_H_
#define TURBOATTN_KERNELS_MERGE_TRAITS_H_

#include "core/params.h"
#include "kernels/common/chunk.cuh"

namespace turboattn::merge {

constexpr int kThreads = 256;  // a block
constexpr int kMinBlocks = 4;  // an SM, so 64 registers: left alone, the compiler aims at more blocks and spills

// Consecutive elements of a row as one aligned access of at most 16 bytes, or several of 16.
template <class E, int kElements>
struct alignas(kElements * sizeof(E) < 16 ? kElements * sizeof(E) : 16) Piece {
  E e[kElements];
};

template <DType kIn, DType kOut, int kPieceElements>
struct Traits {
  using In = Element<kIn>;
  using Out = Element<kOut>;
  static constexpr int kElements = kPieceElements;  // of a row, a thread
};

}  // namespace turboattn::merge

#endif  // TURBOATTN_KERNELS_MERGE_TRAITS_H_

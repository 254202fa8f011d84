// Compile-time choices of a gather kernel: one row of kernel_matrix.cmake, and the output's type.
#ifndef TURBOATTN_KERNELS_GATHER_TRAITS_H_
#define TURBOATTN_KERNELS_GATHER_TRAITS_H_

#include "core/params.h"
#include "kernels/common/chunk.cuh"

namespace turboattn::gather {

constexpr int kMaxThreads = 256;  // a block
constexpr int kMinBlocks = 4;     // an SM, so 64 registers: left alone, the compiler aims at more blocks and spills

template <DType kE, DType kKv, DType kOut>
struct Traits {
  using E = Element<kE>;
  using Out = Element<kOut>;
  static constexpr DType kKvDType = kKv;
  static_assert(IsQuantised(kKv) || kKv == kE, "an unquantised cache has dtype E");
};

}  // namespace turboattn::gather

#endif  // TURBOATTN_KERNELS_GATHER_TRAITS_H_

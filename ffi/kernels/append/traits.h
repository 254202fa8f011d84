// Compile-time choices of an append kernel: one row of kernel_matrix.cmake, and the row length.
#ifndef TURBOATTN_KERNELS_APPEND_TRAITS_H_
#define TURBOATTN_KERNELS_APPEND_TRAITS_H_

#include "core/params.h"
#include "kernels/common/chunk.cuh"

namespace turboattn::append {

constexpr int kMaxWarps = 8;       // a block
constexpr int kMinBlocks = 4;      // an SM: 64 registers a thread, and loads enough in flight
constexpr int kMaxTokens = 32;     // a block; 16 are 4 % faster with int8, not with int4 or fp8 (32,768 tokens, H200)
constexpr int kMaxAnyTokens = 16;  // of AppendAnyKernel

template <DType kE, DType kKv>
struct Traits {
  using E = Element<kE>;
  static constexpr DType kKvDType = kKv;
  static constexpr bool kIsQuantised = IsQuantised(kKv);
  static constexpr int kBits = kKv == DType::kInt4 ? 4 : 8;  // of a code; int8 and int4 only
  static_assert(IsQuantised(kKv) || kKv == kE, "an unquantised cache has dtype E");
};

}  // namespace turboattn::append

#endif  // TURBOATTN_KERNELS_APPEND_TRAITS_H_

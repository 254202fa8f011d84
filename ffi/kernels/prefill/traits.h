// Compile-time choices of a prefill kernel: one row of kernel_matrix.cmake.
#ifndef TURBOATTN_KERNELS_PREFILL_TRAITS_H_
#define TURBOATTN_KERNELS_PREFILL_TRAITS_H_

#include "core/params.h"
#include "kernels/common/chunk.cuh"
#include "kernels/prefill/tiles.h"

namespace turboattn::prefill {

// kKv: what the key and value arrays hold: E, or a cache's codes.
template <DType kEType, DType kKv, int kHeadDim>
struct TraitsSm80 {
  using E = Element<kEType>;
  using Tiles = TilesSm80<kHeadDim>;
  static constexpr DType kKvDType = kKv;
  static constexpr bool kQuantised = IsQuantised(kKv);
  static constexpr int kDim = kHeadDim, kValueDim = kHeadDim;
  static constexpr int kRows = Tiles::kRows;
  static constexpr int kKeys = Tiles::kKeys;
  static constexpr int kWarps = 4;
  static constexpr int kThreads = kWarps * kWarp;
  static constexpr int kWarpRows = kRows / kWarps;
  static constexpr int kFragments = kWarpRows / 16;                           // m16 tiles of a warp
  static constexpr int kLateKeys = 64;                                        // the last keys of a block
  static constexpr int kChunks = kDim / kChunk;                               // 16-byte chunks of a row of E
  static constexpr int kStoredBytes = static_cast<int>(RowBytes(kKv, kDim));  // of a stored row
  static constexpr int kStoredChunks = kStoredBytes / 16;
  static_assert(kKv == kEType || IsQuantised(kKv));
  static_assert(kRows == PrefillRows(kDim), "the plan counts tiles");
  static_assert(kFragments <= 2 && kLateKeys <= kKeys);
  static_assert(kKeys / 8 <= 16, "a block's mapped groups are 16 bits of a word");
};

template <DType kEType, DType kKv, int kHeadDim, int kValueHeadDim>
struct TraitsSm90 {
  using E = Element<kEType>;
  using Tiles = TilesSm90<kHeadDim, kValueHeadDim>;
  static constexpr DType kDType = kEType;
  static constexpr DType kKvDType = kKv;
  static constexpr bool kQuantised = IsQuantised(kKv);
  static constexpr int kDim = kHeadDim;  // of queries and keys
  static constexpr int kValueDim = kValueHeadDim;
  static constexpr int kConsumers = kQuantised ? 2 : Tiles::kConsumers;  // registers of a third are the converters'
  static constexpr int kRows = 64 * kConsumers;
  static constexpr int kKeys = Tiles::kKeys;
  static constexpr int kStages = Tiles::kStages;
  static constexpr int kQuerySteps = Tiles::kQuerySteps;
  static constexpr int kThreads = 128 * (kConsumers + 1 + kQuantised);
  static constexpr int kChunks = kDim / kChunk;  // 16-byte chunks of a row
  static constexpr int kPanels = kDim / 64;      // a tensor copy with the 128-byte swizzle takes 64 columns
  static constexpr int kStoredBytes = static_cast<int>(RowBytes(kKv, kDim));  // of a stored row; of quantised ones
  static constexpr int kCodeStages = kStoredBytes == 128 ? 3 : 4;             // tiles of codes, of K and V in turn
  // 65,536 registers an SM.
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 32;
  static constexpr int kConverterRegisters = 72;
  static constexpr int kConsumerRegisters = kQuantised ? 200 : kConsumers == 2 ? 232 : 160;
  static_assert(kKv == kEType || (IsQuantised(kKv) && kDim == kValueDim));
  static_assert(kConsumers >= 2 && kConsumers <= 3 && kDim % 64 == 0 && kValueDim % 64 == 0);
  static_assert(kKeys % 16 == 0 && kKeys <= 256);
};

}  // namespace turboattn::prefill

#endif  // TURBOATTN_KERNELS_PREFILL_TRAITS_H_

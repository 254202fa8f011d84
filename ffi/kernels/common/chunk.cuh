// Eight consecutive elements of a row: the unit in which one CUDA thread moves keys and values. Rows are a multiple of
// 8 elements and XLA's buffers start at multiples of 128 bytes, so every chunk is one aligned access (float32: two).
#ifndef TURBOATTN_KERNELS_COMMON_CHUNK_CUH_
#define TURBOATTN_KERNELS_COMMON_CHUNK_CUH_

#include <cstdint>

#include "core/params.h"
#include "kernels/common/dtypes.h"

namespace turboattn {

constexpr int kChunk = 8;  // elements
constexpr int kWarp = 32;  // threads

template <DType kDType>
struct ElementOf;
template <>
struct ElementOf<DType::kFloat32> {
  using type = float;
};
template <>
struct ElementOf<DType::kBfloat16> {
  using type = bf16;
};
template <>
struct ElementOf<DType::kFloat16> {
  using type = fp16;
};
template <>
struct ElementOf<DType::kInt8> {
  using type = uint8_t;
};
template <>
struct ElementOf<DType::kFloat8E4M3> {
  using type = fp8_e4m3;
};
template <DType kDType>
using Element = typename ElementOf<kDType>::type;

// int8 and int4 caches have (scale, zero) for each token and head. HasRowParams of params.h, for device code.
template <DType kKv>
constexpr bool kHasRowParams = kKv == DType::kInt8 || kKv == DType::kInt4;

template <class E>
struct alignas(kChunk * sizeof(E) < 16 ? kChunk * sizeof(E) : 16) Chunk {
  E e[kChunk];
};

template <class E>
__device__ __forceinline__ Chunk<E> LoadChunk(const void* base, int64_t element) {
  return *reinterpret_cast<const Chunk<E>*>(static_cast<const E*>(base) + element);
}

template <class E>
__device__ __forceinline__ void StoreChunk(void* base, int64_t element, const Chunk<E>& chunk) {
  *reinterpret_cast<Chunk<E>*>(static_cast<E*>(base) + element) = chunk;
}

// A row of kWidth 16-bit elements in the registers of a warp: some neighbouring pairs of either half in each lane, so
// that rotated pairs are in one lane, whichever the pairing. Lanes past kLanes have what others have.
template <int kWidth>
struct WarpRow {
  static constexpr int kPairs = kWidth > 128 ? kWidth / 128 : 1, kLanes = kWidth / (4 * kPairs);
  static_assert(kLanes == 16 || kLanes == kWarp);
  struct alignas(4 * kPairs) Half {
    uint32_t pairs[kPairs];
  };
  Half half[2] = {};

  __device__ static int Lane() { return threadIdx.x % kLanes; }
  // row: the index of the row in `source`.
  __device__ static WarpRow Load(const void* source, int64_t row) {
    const Half* halves = static_cast<const Half*>(source) + row * (2 * kLanes) + Lane();
    return {{halves[0], halves[kLanes]}};
  }
};

}  // namespace turboattn

#endif  // TURBOATTN_KERNELS_COMMON_CHUNK_CUH_

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

}  // namespace turboattn

#endif  // TURBOATTN_KERNELS_COMMON_CHUNK_CUH_

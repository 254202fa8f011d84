// Tensor maps, grid and shared memory of the sm90 prefill kernels.
#ifndef TURBOATTN_KERNELS_PREFILL_LAUNCH_SM90_CUH_
#define TURBOATTN_KERNELS_PREFILL_LAUNCH_SM90_CUH_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <climits>
#include <type_traits>

#include "core/cuda_launch.h"
#include "kernels/prefill/kernel_sm90.cuh"

namespace turboattn::prefill {

// The driver's encoder, found at run time: the module must import where there is no driver.
inline cudaError_t EncodeTensorMap(CUtensorMap* map, DType dtype, const void* data, const int64_t (&sizes)[4],
                                   const int64_t (&strides)[3], const int (&box)[4]) {
  using Encode = CUresult(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                          const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                          CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static void* const encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? found : nullptr;
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  cuuint64_t size[4], stride[3];
  cuuint32_t box_size[4], step[4];
  for (int i = 0; i < 4; ++i) {
    size[i] = static_cast<cuuint64_t>(std::max<int64_t>(sizes[i], 1));  // an empty tensor is never read
    box_size[i] = static_cast<cuuint32_t>(box[i]);
    step[i] = 1;
    if (i < 3) stride[i] = static_cast<cuuint64_t>(std::max<int64_t>(strides[i], 16));
  }
  const CUresult result = reinterpret_cast<Encode*>(encode)(
      map, dtype == DType::kBfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4,
      const_cast<void*>(data), size, stride, box_size, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
      CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Query rows of one kv head: [tokens, K, G, D], a box is a tile's rows.
template <class Traits, class Params>
cudaError_t EncodeQuery(const Params& params, CUtensorMap* map) {
  const int64_t heads = params.num_heads, kv_heads = KvHeadsOf(params), group = heads / kv_heads, dim = Traits::kDim;
  return EncodeTensorMap(map, Traits::kDType, params.query, {dim, group, kv_heads, QueryRows(params)},
                         {dim * 2, group * dim * 2, heads * dim * 2},
                         {64, static_cast<int>(group), 1, static_cast<int>(Traits::kRows / group)});
}

template <class Traits>
cudaError_t EncodeKeys(const LinearAttentionParams& params, const void* array, CUtensorMap* map, int* box_keys) {
  const int64_t kv_heads = params.num_kv_heads, dim = Traits::kDim, batch = params.ragged ? 1 : params.batch;
  *box_keys = Traits::kKeys;
  return EncodeTensorMap(map, Traits::kDType, array, {dim, kv_heads, params.num_keys, batch},
                         {dim * 2, kv_heads * dim * 2, params.num_keys * kv_heads * dim * 2}, {64, 1, *box_keys, 1});
}

template <class Traits>
cudaError_t EncodeKeys(const PagedAttentionParams& params, const void* array, CUtensorMap* map, int* box_keys) {
  const KvCache& cache = params.cache;
  const int64_t dim = Traits::kDim;
  int box = 8;  // the largest power of two that divides both
  while (box < cache.page_size && Traits::kKeys % (2 * box) == 0) box *= 2;
  *box_keys = box;
  return EncodeTensorMap(map, Traits::kDType, array,
                         {dim, cache.page_size, cache.num_kv_heads, cache.num_layers * cache.num_pages},
                         {dim * 2, cache.page_size * dim * 2, cache.num_kv_heads * cache.page_size * dim * 2},
                         {64, box, 1, 1});
}

// Heads whose K and V fill a good part of L2.
constexpr int64_t kSectionBytes = int64_t{32} << 20;

inline int64_t MaxKeysOf(const LinearAttentionParams& params) { return params.num_keys; }
inline int64_t MaxKeysOf(const PagedAttentionParams& params) { return params.seqs.max_pages * params.cache.page_size; }

// `order` and `blocks` (0: as many as SMs) are for prototypes.
template <class Traits, class Params>
cudaError_t LaunchSm90(const Params& params, cudaStream_t stream, OrderSm90 order, int* counter, int64_t blocks) {
  if (QueryRows(params) == 0 || params.num_heads == 0) return cudaSuccess;
  if constexpr (std::is_same_v<Params, PagedAttentionParams>) {
    if (!HasGroups(params.cache) || SplitsOf(params) > 1) return cudaErrorInvalidValue;
  }
  ArgumentsSm90<Params> args;
  args.params = params;
  args.params.max_tiles = MaxTiles<Traits::kRows>(params);
  args.schedule.items = args.params.max_tiles * KvHeadsOf(params);
  const int64_t head_bytes = std::max<int64_t>(MaxKeysOf(params), 1) * Traits::kDim * 4;
  args.schedule.section = std::max<int64_t>(kSectionBytes / head_bytes, 1);
  args.schedule.order = order;
  args.schedule.counter = counter;
  const int64_t group = params.num_heads / KvHeadsOf(params);
  args.query_by_copy = Traits::kRows % group == 0;
  cudaError_t error = cudaSuccess;
  if (args.query_by_copy) error = EncodeQuery<Traits>(params, &args.query);
  if (error != cudaSuccess) return error;
  if constexpr (std::is_same_v<Params, PagedAttentionParams>) {
    error = EncodeKeys<Traits>(params, params.cache.key, &args.key, &args.box_keys);
    if (error == cudaSuccess) error = EncodeKeys<Traits>(params, params.cache.value, &args.value, &args.box_keys);
  } else {
    error = EncodeKeys<Traits>(params, params.key, &args.key, &args.box_keys);
    if (error == cudaSuccess) error = EncodeKeys<Traits>(params, params.value, &args.value, &args.box_keys);
  }
  if (error != cudaSuccess) return error;
  if (blocks == 0) {
    int device = 0, sms = 0;
    error = cudaGetDevice(&device);
    if (error == cudaSuccess) error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
    if (error != cudaSuccess) return error;
    blocks = sms;
  }
  blocks = std::min(blocks, args.schedule.items);
  if (blocks > INT_MAX) return cudaErrorInvalidConfiguration;
  constexpr int kBytes = sizeof(SharedSm90<Traits>);
  static_assert(kBytes <= 227 * 1024);
  const auto kernel = &PrefillSm90<Traits, Params>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  kernel<<<static_cast<int>(blocks), Traits::kThreads, kBytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace turboattn::prefill

#endif  // TURBOATTN_KERNELS_PREFILL_LAUNCH_SM90_CUH_

// Tensor maps: what a kernel's tensor copies (TMA) know of an array. Only the CUDA module includes it.
#ifndef TURBOATTN_CORE_TENSOR_MAP_H_
#define TURBOATTN_CORE_TENSOR_MAP_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>

#include "core/params.h"

namespace turboattn {

// The driver's encoder, found at run time: the module must import where there is no driver.
template <int kDims>
cudaError_t EncodeTensorMap(CUtensorMap* map, DType dtype, const void* data, const int64_t (&sizes)[kDims],
                            const int64_t (&strides)[kDims - 1], const int (&box)[kDims]) {
  // A box's rows, of 128 bytes or, of codes, less, are swizzled over their own length.
  const bool codes = IsQuantised(dtype);
  const CUtensorMapSwizzle swizzle = !codes || box[0] == 128 ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : box[0] == 64          ? CU_TENSOR_MAP_SWIZZLE_64B
                                                             : CU_TENSOR_MAP_SWIZZLE_32B;
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
  cuuint64_t size[kDims], stride[kDims - 1];
  cuuint32_t box_size[kDims], step[kDims];
  for (int i = 0; i < kDims; ++i) {
    size[i] = static_cast<cuuint64_t>(std::max<int64_t>(sizes[i], 1));  // nothing of an empty tensor is copied
    box_size[i] = static_cast<cuuint32_t>(box[i]);
    step[i] = 1;
    if (i < kDims - 1) stride[i] = static_cast<cuuint64_t>(strides[i]);
  }
  const CUresult result = reinterpret_cast<Encode*>(encode)(
      map,
      codes                       ? CU_TENSOR_MAP_DATA_TYPE_UINT8
      : dtype == DType::kBfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                  : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      kDims, const_cast<void*>(data), size, stride, box_size, step, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace turboattn

#endif  // TURBOATTN_CORE_TENSOR_MAP_H_

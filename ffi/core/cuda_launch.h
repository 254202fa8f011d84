// What a CUDA kernel entry looks like to a handler. Only the CUDA module includes it.
#ifndef TURBOATTN_CORE_CUDA_LAUNCH_H_
#define TURBOATTN_CORE_CUDA_LAUNCH_H_

#include <cuda_runtime_api.h>

namespace turboattn {

// Enqueues on the stream and returns; allocates nothing, waits for nothing. Params holds device pointers.
template <class Params>
using CudaLaunch = cudaError_t(const Params&, cudaStream_t);

// Whether the current device is the card that code for sm_90a is for.
inline bool DeviceIsSm90() {
  int device = 0, major = 0, minor = 0;
  return cudaGetDevice(&device) == cudaSuccess &&
         cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess &&
         cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) == cudaSuccess && major == 9 &&
         minor == 0;
}

// A launch attribute: the grid may begin before the one in front of it has ended, see LaunchDependents (ptx.cuh).
inline cudaLaunchAttribute DependentLaunch() {
  cudaLaunchAttribute attribute;
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

}  // namespace turboattn

#endif  // TURBOATTN_CORE_CUDA_LAUNCH_H_

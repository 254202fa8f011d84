// Python module _cuda: the FFI handlers over the CUDA kernels. Imports on hosts without a driver; device_error() says
// whether it can run.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "module_common.h"

namespace nb = nanobind;

namespace turboattn {
namespace {

// Why no GPU can be used here; none when one can.
std::optional<std::string> DeviceError() {
  int count = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status != cudaSuccess) return std::string(cudaGetErrorName(status)) + ": " + cudaGetErrorString(status);
  if (count == 0) return "the driver shows no GPU";
  return std::nullopt;
}

}  // namespace
}  // namespace turboattn

NB_MODULE(_cuda, module) {
  turboattn::DefineCommon(module);
  module.def("device_error", &turboattn::DeviceError);
}

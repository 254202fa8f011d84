// Python module _cuda: the FFI handlers over the CUDA kernels. Imports on hosts without a driver; device_error() says
// whether it can run.
#include <cuda_runtime_api.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>

#include "core/heuristics.h"
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
  module.def(
      "paged_workspace_bytes",
      [](int64_t batch, int64_t num_tokens, int64_t uniform_q_len, int64_t num_heads, int64_t num_kv_heads,
         int64_t value_dim, int64_t max_keys, bool batch_invariant) {
        return turboattn::PlanPaged({batch, num_tokens, uniform_q_len, num_heads, num_kv_heads, value_dim, max_keys,
                                     batch_invariant})
            .workspace_bytes;
      },
      nb::kw_only(), nb::arg("batch"), nb::arg("num_tokens"), nb::arg("uniform_q_len"), nb::arg("num_heads"),
      nb::arg("num_kv_heads"), nb::arg("value_dim"), nb::arg("max_keys"), nb::arg("batch_invariant"));
}

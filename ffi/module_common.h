// What both Python modules show of the registry.
#ifndef TURBOATTN_MODULE_COMMON_H_
#define TURBOATTN_MODULE_COMMON_H_

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <optional>

#include "core/registry.h"
#include "handlers/handlers.h"
#include "xla/ffi/api/c_api.h"

namespace turboattn {

namespace nb = nanobind;

// handler_calls() -> handlers run so far, for tests of capture; registrations() -> {FFI target name: capsule}; ffi_api_version() -> (major, minor) of the FFI headers of this build;
// kernels() -> [{name, phase, family, head_dim, value_dim, dtype, kv_dtype}], what is None is taken at run time.
inline void DefineCommon(nb::module_& module) {
  module.def("registrations", [] {
    nb::dict registrations;
    for (const auto& [target, handler] : Handlers()) registrations[target] = nb::capsule(handler);
    return registrations;
  });
  module.def("handler_calls", &HandlerCalls);
  module.def("ffi_api_version", [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); });
  module.def("kernels", [] {
    const auto size = [](int64_t dim) { return dim == 0 ? nb::object(nb::none()) : nb::object(nb::int_(dim)); };
    const auto type = [](std::optional<DType> dtype) {
      return dtype ? nb::object(nb::str(to_string(*dtype))) : nb::object(nb::none());
    };
    nb::list kernels;
    for (const Kernel& kernel : Kernels()) {
      const KernelDesc& desc = kernel.desc();
      nb::dict entry;
      entry["name"] = to_string(desc);
      entry["phase"] = to_string(desc.phase);
      entry["family"] = desc.family;
      entry["head_dim"] = size(desc.head_dim);
      entry["value_dim"] = size(desc.value_dim);
      entry["dtype"] = type(desc.dtype);
      entry["kv_dtype"] = type(desc.kv_dtype);
      kernels.append(entry);
    }
    return kernels;
  });
}

}  // namespace turboattn

#endif  // TURBOATTN_MODULE_COMMON_H_

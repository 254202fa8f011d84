// What both Python modules show of the registry.
#ifndef TURBOATTN_MODULE_COMMON_H_
#define TURBOATTN_MODULE_COMMON_H_

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <optional>

#include "core/heuristics.h"
#include "core/registry.h"
#include "handlers/handlers.h"
#include "xla/ffi/api/c_api.h"

namespace turboattn {

namespace nb = nanobind;

// handler_calls() -> handlers run so far, for tests of capture; registrations() -> {FFI target name: capsule};
// ffi_api_version() -> (major, minor) of the FFI headers of this build; paged_plan(sizes) -> how the CUDA kernels cut a
// paged call up (core/heuristics.h; the same in both modules); kernels() -> [{name, phase, family, head_dim, value_dim,
// dtype, kv_dtype}], what is None is taken at run time.
inline void DefineCommon(nb::module_& module) {
  module.def("registrations", [] {
    nb::dict registrations;
    for (const auto& [target, handler] : Handlers()) registrations[target] = nb::capsule(handler);
    return registrations;
  });
  module.def(
      "paged_plan",
      [](int64_t batch, int64_t num_tokens, int64_t uniform_q_len, int64_t num_heads, int64_t num_kv_heads,
         int64_t value_dim, int64_t max_keys, bool batch_invariant, bool has_decode) {
        const PagedPlan plan = PlanPaged({batch, num_tokens, uniform_q_len, num_heads, num_kv_heads, value_dim,
                                          max_keys, batch_invariant, has_decode});
        nb::dict entry;
        entry["runs_decode"] = plan.runs_decode;
        entry["runs_prefill"] = plan.runs_prefill;
        entry["decode_q_len"] = plan.decode_q_len;
        entry["decode_appends"] = plan.decode_appends;
        entry["row_tile"] = plan.row_tile;
        entry["slots"] = plan.slots;
        entry["decode_units"] = plan.decode_units;
        entry["decode_cluster"] = plan.decode_cluster;
        entry["prefill_tiles"] = plan.prefill_tiles;
        entry["prefill_splits"] = plan.prefill_splits;
        entry["prefill_parts"] = plan.prefill_parts;
        entry["workspace_bytes"] = plan.workspace_bytes;
        return entry;
      },
      nb::kw_only(), nb::arg("batch"), nb::arg("num_tokens"), nb::arg("uniform_q_len"), nb::arg("num_heads"),
      nb::arg("num_kv_heads"), nb::arg("value_dim"), nb::arg("max_keys"), nb::arg("batch_invariant"),
      nb::arg("has_decode") = true);
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

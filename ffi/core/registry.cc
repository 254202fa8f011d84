#include "core/registry.h"

#include <algorithm>

namespace turboattn {

bool Offers(const KernelDesc& offered, const KernelDesc& asked) {
  return offered.phase == asked.phase && (asked.family.empty() || offered.family == asked.family) &&
         (offered.head_dim == 0 || offered.head_dim == asked.head_dim) &&
         (offered.value_dim == 0 || offered.value_dim == asked.value_dim) &&
         (!offered.dtype || offered.dtype == asked.dtype) && (!offered.kv_dtype || offered.kv_dtype == asked.kv_dtype);
}

bool HasKernel(const KernelDesc& asked) {
  return std::any_of(Kernels().begin(), Kernels().end(),
                     [&](const Kernel& kernel) { return Offers(kernel.desc(), asked); });
}

}  // namespace turboattn

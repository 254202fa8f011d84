// The kernels that a module holds. A handler asks with a KernelDesc and gets a function pointer: neither includes the
// other's headers.
#ifndef TURBOATTN_CORE_REGISTRY_H_
#define TURBOATTN_CORE_REGISTRY_H_

#include <utility>
#include <vector>

#include "core/desc.h"

namespace turboattn {

class Kernel {
 public:
  template <class Launch>
  Kernel(KernelDesc desc, Launch* launch) : desc_(std::move(desc)), launch_(reinterpret_cast<AnyFunction>(launch)) {}

  const KernelDesc& desc() const { return desc_; }

  // Launch must be the function type that the kernel was made with: the phase decides it (launch.h of the phase).
  template <class Launch>
  Launch* launch() const {
    return reinterpret_cast<Launch*>(launch_);
  }

 private:
  using AnyFunction = void (*)();
  KernelDesc desc_;
  AnyFunction launch_;
};

// All kernels of this module, in order of preference. The table is generated from kernel_matrix.cmake (_cuda) or
// written by hand (_cpu).
const std::vector<Kernel>& Kernels();

// The first kernel that offers what is asked (an empty family in `asked` takes any); null when there is none.
const Kernel* FindKernel(const KernelDesc& asked);

}  // namespace turboattn

#endif  // TURBOATTN_CORE_REGISTRY_H_

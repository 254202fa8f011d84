// The kernels that a module holds. A handler asks with a KernelDesc and gets a function pointer: neither includes the
// other's headers.
#ifndef TURBOATTN_CORE_REGISTRY_H_
#define TURBOATTN_CORE_REGISTRY_H_

#include <utility>
#include <vector>

#include "core/desc.h"

namespace turboattn {

// Whether a kernel takes a call that its desc offers: decided on the host, from static sizes and the current device.
template <class Params>
using Suits = bool(const Params&);

class Kernel {
 public:
  template <class Launch>
  Kernel(KernelDesc desc, Launch* launch) : desc_(std::move(desc)), launch_(reinterpret_cast<AnyFunction>(launch)) {}

  // `suits`: of the Params that `launch` takes.
  template <class Launch, class Params>
  Kernel(KernelDesc desc, Launch* launch, Suits<Params>* suits)
      : desc_(std::move(desc)),
        launch_(reinterpret_cast<AnyFunction>(launch)),
        suits_(reinterpret_cast<AnyFunction>(suits)) {}

  const KernelDesc& desc() const { return desc_; }

  // Launch must be the function type that the kernel was made with: the phase decides it (launch.h of the phase).
  template <class Launch>
  Launch* launch() const {
    return reinterpret_cast<Launch*>(launch_);
  }

  template <class Params>
  bool suits(const Params& params) const {
    return suits_ == nullptr || reinterpret_cast<Suits<Params>*>(suits_)(params);
  }

 private:
  using AnyFunction = void (*)();
  KernelDesc desc_;
  AnyFunction launch_;
  AnyFunction suits_ = nullptr;  // null: every call
};

// All kernels of this module, in order of preference. The table is generated from kernel_matrix.cmake (_cuda) or
// written by hand (_cpu).
const std::vector<Kernel>& Kernels();

// Whether a kernel of desc `offered` can do what is asked; an empty family in `asked` takes any.
bool Offers(const KernelDesc& offered, const KernelDesc& asked);

// Whether there is a kernel, of any family, that offers what is asked.
bool HasKernel(const KernelDesc& asked);

// The kernel for a call: the first that offers what is asked and suits the call, of the family asked for if it has one.
// Null when there is none.
template <class Params>
const Kernel* FindKernel(KernelDesc asked, const Params& params) {
  for (const Kernel& kernel : Kernels()) {
    if (Offers(kernel.desc(), asked) && kernel.suits(params)) return &kernel;
  }
  if (asked.family.empty()) return nullptr;
  asked.family.clear();
  return FindKernel(asked, params);
}

}  // namespace turboattn

#endif  // TURBOATTN_CORE_REGISTRY_H_

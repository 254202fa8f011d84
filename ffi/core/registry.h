// The kernels that a module holds. A handler asks with a KernelDesc and gets a function pointer: neither includes the other's headers.
#ifndef TURBOATTN_CORE_REGISTRY_H_
#define TURBOATTN_CORE_REGISTRY_H_

#include <string>
#include <string_view>
#include <vector>

#include "core/params.h"

namespace turboattn {

// What is asked of a kernel, and what a kernel offers: the columns of kernel_matrix.cmake.
struct KernelDesc {
  std::string_view phase;   // "append", "gather", ...
  std::string_view family;  // "cpu", "simt", "sm75", ...; asked: empty takes any family
  int head_dim;             // offered: 0 takes any D
  int value_dim;            // offered: 0 takes any Dv
  DType q_dtype;            // E
  DType kv_dtype;           // what the cache stores
};

// The kernel's name everywhere: listings, errors, profiles. "append_simt_dany_dvany_bf16_kvint8".
std::string ToString(const KernelDesc& desc);

std::string_view ToString(DType dtype);  // "bf16"

class Kernel {
 public:
  template <class Launch>
  Kernel(const KernelDesc& desc, Launch* launch) : desc_(desc), launch_(reinterpret_cast<AnyFunction>(launch)) {}

  const KernelDesc& desc() const { return desc_; }

  // Launch must be the function type the kernel was made with; the phase decides it (see the launch header of the phase).
  template <class Launch>
  Launch* launch() const {
    return reinterpret_cast<Launch*>(launch_);
  }

 private:
  using AnyFunction = void (*)();
  KernelDesc desc_;
  AnyFunction launch_;
};

// All kernels of this module; defined by a table generated from kernel_matrix.cmake (_cuda) or written by hand (_cpu).
const std::vector<Kernel>& Kernels();

// The first kernel that offers what is asked; null when there is none.
const Kernel* FindKernel(const KernelDesc& asked);

}  // namespace turboattn

#endif  // TURBOATTN_CORE_REGISTRY_H_

// What is asked of a kernel, in values that are known when a call is compiled. to_string(desc) is the kernel's name
// everywhere: registry, errors, benchmarks, profiles.
#ifndef TURBOATTN_CORE_DESC_H_
#define TURBOATTN_CORE_DESC_H_

#include <cstdint>
#include <string>

#include "core/params.h"

namespace turboattn {

enum class Phase : int32_t { kAttention, kPrefill, kDecode, kAppend, kGather, kCopyPages, kMerge };

struct KernelDesc {
  Phase phase = Phase::kAttention;
  std::string family;                // "cpu", "sm75", "sm80", "sm90"
  DType dtype = DType::kFloat32;     // E
  DType kv_dtype = DType::kFloat32;  // the cache's; equal to dtype where there is no cache
  int64_t head_dim = 0;              // D; 0: any
  int64_t value_dim = 0;             // Dv; 0: any
};

const char* to_string(Phase phase);
const char* to_string(DType dtype);  // JAX's names: "bfloat16", "int8", ...

// "append_cpu_d128_bfloat16_kvint8"; a value_dim that differs adds "v64" after "d128"; sizes of 0 are left out.
std::string to_string(const KernelDesc& desc);

// The inverse of to_string(DType): true and *dtype set when `name` is one of them.
bool ParseDType(const std::string& name, DType* dtype);

}  // namespace turboattn

#endif  // TURBOATTN_CORE_DESC_H_

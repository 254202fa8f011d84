// What is asked of a kernel, in values that are known when a call is compiled. to_string(desc) is the kernel's name
// everywhere: registry, errors, benchmarks, profiles.
#ifndef TURBOATTN_CORE_DESC_H_
#define TURBOATTN_CORE_DESC_H_

#include <cstdint>
#include <optional>
#include <string>

#include "core/params.h"

namespace turboattn {

enum class Phase : int32_t { kAttention, kPrefill, kDecode, kAppend, kGather, kCopyPages, kMerge };

struct KernelDesc {
  Phase phase = Phase::kAttention;
  std::string family;             // "cpu", "simt", "sm75", "sm80", "sm90"
  std::optional<DType> dtype;     // E; none: any
  std::optional<DType> kv_dtype;  // the cache's; equal to dtype where there is no cache; none: any
  int64_t head_dim = 0;           // D; 0: any
  int64_t value_dim = 0;          // Dv; 0: any
};

const char* to_string(Phase phase);
const char* to_string(DType dtype);  // JAX's names: "bfloat16", "int8", ...

// "append_cpu_d128_bfloat16_kvint8"; a value_dim that differs adds "v64" after "d128"; what is any is left out.
std::string to_string(const KernelDesc& desc);

// The inverse of to_string(DType): true and *dtype set when `name` is one of them.
bool ParseDType(const std::string& name, DType* dtype);

}  // namespace turboattn

#endif  // TURBOATTN_CORE_DESC_H_

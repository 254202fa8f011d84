#include "core/desc.h"

namespace turboattn {

const char* to_string(Phase phase) {
  switch (phase) {
    case Phase::kAttention:
      return "attention";
    case Phase::kPrefill:
      return "prefill";
    case Phase::kDecode:
      return "decode";
    case Phase::kAppend:
      return "append";
    case Phase::kGather:
      return "gather";
    case Phase::kCopyPages:
      return "copy_pages";
    case Phase::kMerge:
      return "merge";
  }
  return "unknown";
}

const char* to_string(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBfloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kInt8:
      return "int8";
    case DType::kInt4:
      return "int4";
    case DType::kFloat8E4M3:
      return "float8_e4m3fn";
  }
  return "unknown";
}

std::string to_string(const KernelDesc& desc) {
  std::string name = std::string(to_string(desc.phase)) + "_" + desc.family;
  if (desc.head_dim != 0) name += "_d" + std::to_string(desc.head_dim);
  if (desc.value_dim != 0 && desc.value_dim != desc.head_dim) name += "v" + std::to_string(desc.value_dim);
  if (desc.dtype) name += std::string("_") + to_string(*desc.dtype);
  if (desc.kv_dtype && desc.kv_dtype != desc.dtype) name += std::string("_kv") + to_string(*desc.kv_dtype);
  return name;
}

bool ParseDType(const std::string& name, DType* dtype) {
  for (DType candidate :
       {DType::kFloat32, DType::kBfloat16, DType::kFloat16, DType::kInt8, DType::kInt4, DType::kFloat8E4M3}) {
    if (name == to_string(candidate)) {
      *dtype = candidate;
      return true;
    }
  }
  return false;
}

}  // namespace turboattn

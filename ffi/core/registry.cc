#include "core/registry.h"

namespace turboattn {
namespace {

std::string Dim(int dim) { return dim == 0 ? "any" : std::to_string(dim); }

bool Offers(const KernelDesc& offered, const KernelDesc& asked) {
  return offered.phase == asked.phase && (asked.family.empty() || offered.family == asked.family) &&
         (offered.head_dim == 0 || offered.head_dim == asked.head_dim) &&
         (offered.value_dim == 0 || offered.value_dim == asked.value_dim) && offered.q_dtype == asked.q_dtype &&
         offered.kv_dtype == asked.kv_dtype;
}

}  // namespace

std::string_view ToString(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return "fp32";
    case DType::kBfloat16: return "bf16";
    case DType::kFloat16: return "fp16";
    case DType::kInt8: return "int8";
    case DType::kInt4: return "int4";
    case DType::kFloat8E4M3: return "fp8";
  }
  return "?";
}

std::string ToString(const KernelDesc& desc) {
  return std::string(desc.phase) + "_" + std::string(desc.family) + "_d" + Dim(desc.head_dim) + "_dv" + Dim(desc.value_dim) + "_" +
         std::string(ToString(desc.q_dtype)) + "_kv" + std::string(ToString(desc.kv_dtype));
}

const Kernel* FindKernel(const KernelDesc& asked) {
  for (const Kernel& kernel : Kernels()) {
    if (Offers(kernel.desc(), asked)) return &kernel;
  }
  return nullptr;
}

}  // namespace turboattn

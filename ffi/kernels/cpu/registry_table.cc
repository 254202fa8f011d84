// The kernels of the CPU module. Each takes every D, Dv and dtype at run time; the table spells out the dtype pairs,
// since that is what is asked. copy_pages moves bytes and is asked for none.
#include "core/registry.h"
#include "kernels/cpu/kernels.h"

namespace turboattn {
namespace {

constexpr DType kQueryDTypes[] = {DType::kFloat32, DType::kBfloat16, DType::kFloat16};
constexpr DType kQuantised[] = {DType::kInt8, DType::kInt4, DType::kFloat8E4M3};

template <class Launch>
void Add(std::vector<Kernel>& kernels, Phase phase, Launch* launch, bool quantised) {
  for (DType dtype : kQueryDTypes) {
    kernels.push_back({KernelDesc{phase, "cpu", dtype, dtype}, launch});
    if (!quantised) continue;
    for (DType kv_dtype : kQuantised) kernels.push_back({KernelDesc{phase, "cpu", dtype, kv_dtype}, launch});
  }
}

std::vector<Kernel> Table() {
  std::vector<Kernel> kernels;
  Add(kernels, Phase::kAttention, &cpu::LinearAttention, false);
  Add(kernels, Phase::kPrefill, &cpu::PagedAttention, true);
  Add(kernels, Phase::kAppend, &cpu::Append, true);
  Add(kernels, Phase::kGather, &cpu::Gather, true);
  kernels.push_back({KernelDesc{Phase::kCopyPages, "cpu", std::nullopt, std::nullopt}, &cpu::CopyPages});
  Add(kernels, Phase::kMerge, &cpu::Merge, false);
  return kernels;
}

}  // namespace

const std::vector<Kernel>& Kernels() {
  static const std::vector<Kernel> kernels = Table();
  return kernels;
}

}  // namespace turboattn

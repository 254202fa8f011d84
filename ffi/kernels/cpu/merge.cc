// merge_partials on the CPU: one pass over the parts in index order, the sink added once at the end.
#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "kernels/common/softmax.h"
#include "kernels/cpu/kernels.h"

namespace turboattn::cpu {
namespace {

template <class In, class Out>
void MergeRow(const MergeParams& params, int64_t row, float* acc) {
  const int64_t dim = params.value_dim, rows = params.num_tokens * params.num_heads;
  std::fill(acc, acc + dim, 0.f);
  SoftmaxState state = EmptySoftmax();
  for (int64_t r = 0; r < params.num_parts; ++r) {
    const float lse = params.lses[r * rows + row];
    if (lse == -Infinity()) continue;  // an empty part: its out may hold anything
    const In* part = static_cast<const In*>(params.outs) + (r * rows + row) * dim;
    const MergeWeights weights = MergeSoftmax(&state, {lse, 1.f});
    for (int64_t d = 0; d < dim; ++d) acc[d] = acc[d] * weights.first + ToFloat(part[d]) * weights.second;
  }
  const float weight = params.sinks != nullptr ? AddSink(&state, params.sinks[row % params.num_heads]) : 1.f;
  const float factor = weight * InverseSum(state);
  Out* out = static_cast<Out*>(params.out) + row * dim;
  for (int64_t d = 0; d < dim; ++d) out[d] = FromFloat<Out>(acc[d] * factor);
  params.lse[row] = LogSumExp(state);
}

template <class In>
void MergeAs(const MergeParams& params, int64_t row, float* acc) {
  switch (params.out_dtype) {
    case DType::kBfloat16:
      return MergeRow<In, bf16>(params, row, acc);
    case DType::kFloat16:
      return MergeRow<In, fp16>(params, row, acc);
    default:
      return MergeRow<In, float>(params, row, acc);
  }
}

}  // namespace

Status Merge(const MergeParams& params, Parallel& parallel) {
  const KeepSubnormals keep;
  constexpr int64_t kRowsPerItem = 64;
  const int64_t rows = params.num_tokens * params.num_heads, items = (rows + kRowsPerItem - 1) / kRowsPerItem;
  std::vector<std::unique_ptr<float[]>> acc(std::min<int64_t>(parallel.num_workers(), items));
  for (auto& a : acc) {
    a.reset(new (std::nothrow) float[params.value_dim]);
    if (a == nullptr) return Status::Error("no memory for a row");
  }
  parallel.For(items, [&](int64_t item, int worker) {
    for (int64_t row = item * kRowsPerItem; row < std::min(rows, (item + 1) * kRowsPerItem); ++row) {
      switch (params.dtype) {
        case DType::kBfloat16:
          MergeAs<bf16>(params, row, acc[worker].get());
          break;
        case DType::kFloat16:
          MergeAs<fp16>(params, row, acc[worker].get());
          break;
        default:
          MergeAs<float>(params, row, acc[worker].get());
          break;
      }
    }
  });
  return Status();
}

}  // namespace turboattn::cpu

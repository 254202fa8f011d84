#include <string>

#include "handlers/handlers.h"
#include "handlers/paged_operands.h"

namespace turboattn {
namespace {

// Decode's launch knows the grid of the calls that the schedule is for. Where nothing reads one, it is zeros.
ffi::Error MakePlan(Context context, ffi::RemainingArgs args, ffi::RemainingRets results,
                    const PlanAttributes& attributes) {
  Operands operands("make_plan", context, attributes.operands, args, results);
  PagedAttentionParams params;
  KvCache& cache = params.cache;
  for (const auto& [name, dtype] :
       {std::pair(attributes.dtype, &cache.dtype), {attributes.kv_dtype, &cache.kv_dtype}}) {
    if (!ParseDType(std::string(name), dtype)) operands.Fail("dtype must be a known one, got " + std::string(name));
  }
  cache.num_layers = cache.num_pages = 1;  // a schedule does not depend on them
  cache.num_kv_heads = attributes.num_kv_heads;
  cache.page_size = attributes.page_size;
  cache.head_dim = attributes.head_dim;
  cache.value_dim = attributes.value_dim;
  params.num_heads = attributes.num_q_heads;
  CheckHeads(operands, params.num_heads, cache.num_kv_heads);
  Sequences& seqs = params.seqs;
  seqs.kv_lens = operands.Ints("kv_lens", "B");
  seqs.q_ranges = operands.OptionalInts("q_ranges", "B 2");
  seqs.batch = operands.size('B');
  seqs.max_pages = attributes.max_pages;
  seqs.num_tokens = attributes.num_tokens;
  if (!operands.has("q_ranges") && seqs.batch > 0) seqs.uniform_q_len = seqs.num_tokens / seqs.batch;
  params.new_schedule = static_cast<int32_t*>(operands.Result("plan", "g 8", {ffi::S32}));
  CheckSchedule(operands);
  if (!operands.ok()) return operands.error();
#if defined(TURBOATTN_CUDA)
  params.plan = PlanCall(params);
  if (attributes.plain && params.plan.runs_decode) {
    return Launch(context, DecodeDesc(params, attributes.family), params);
  }
#endif
  const Status status = ZeroBytes(context, params.new_schedule, kMaxDecodeBlocks * kScheduleInts * sizeof(int32_t));
  return status.ok() ? ffi::Error::Success() : ffi::Error::Internal("make_plan: " + status.message());
}

}  // namespace
}  // namespace turboattn

TURBOATTN_DEFINE_HANDLER(TurboattnMakePlan, turboattn::MakePlan, turboattn::PlanAttributes);

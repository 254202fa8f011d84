#include "handlers/handlers.h"
#include "handlers/paged_operands.h"

namespace turboattn {
namespace {

ffi::Error PagedAttention(Context context, ffi::RemainingArgs args, ffi::RemainingRets results,
                          const PagedAttributes& attributes) {
  Operands operands("paged_attention", context, attributes.operands, args, results);
  const bool packed = operands.has("q_ranges");
  const KvCache cache = ReadCache(operands, attributes.kv_dtype, operands.FloatType("query"), attributes.value_dim);
  const Sequences seqs = ReadSequences(operands, attributes.cp_size, packed);
  const std::string rows = packed ? "T H" : "B Q H";
  operands.Required("query", (rows + " D").c_str(), {XlaType(cache.dtype)});  // sets H for the sinks
  const ScoreParams score = ReadScore(operands, attributes.is_causal, attributes.scale, attributes.logits_soft_cap);
  PagedAttentionParams params = ReadPagedAttention(operands, cache, seqs, score, rows);
  params.batch_invariant = attributes.batch_invariant;
  PlanWorkspace(operands, &params);
  if (!operands.ok()) return operands.error();
  return LaunchPaged(context, params, attributes.family);
}

}  // namespace
}  // namespace turboattn

TURBOATTN_DEFINE_HANDLER(TurboattnPagedAttention, turboattn::PagedAttention, turboattn::PagedAttributes);

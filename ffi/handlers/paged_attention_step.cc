#include "handlers/handlers.h"
#include "handlers/paged_operands.h"

namespace turboattn {
namespace {

// Append first, then attention over the cache as written. The query's prologue is part of the attention kernel's loads;
// where decode runs alone, on few tokens, so is the append.
ffi::Error PagedAttentionStep(Context context, ffi::RemainingArgs args, ffi::RemainingRets results,
                              const StepAttributes& attributes) {
  Operands operands("paged_attention_step", context, attributes.operands, args, results);
  AppendParams append = ReadAppend(operands, attributes.kv_dtype, operands.FloatType("query"), attributes.value_dim,
                                   attributes.cp_size, RopePart(attributes));
  WriteCache(operands, &append.cache);
  const ScoreParams score = ReadScore(operands, attributes.is_causal, attributes.scale, attributes.logits_soft_cap);
  PagedAttentionParams attention = ReadPagedAttention(operands, append.cache, append.seqs, score, "T H");
  attention.batch_invariant = attributes.batch_invariant;
  attention.prologue.rope = append.rope;
  attention.prologue.bias_dtype = append.bias_dtype;
  attention.prologue.bias = operands.Optional("query_bias", "H D", {XlaType(append.bias_dtype)});
  attention.prologue.logn = attributes.logn;
  attention.prologue.logn_zero_based = attributes.logn_zero_based;
  PlanWorkspace(operands, &attention);
  if (!operands.ok()) return operands.error();
  if (AttentionAppends(attention)) {
    attention.append = append;
  } else {
    const ffi::Error appended = Launch(context, AppendDesc(append), append);
    if (appended.failure()) return appended;
  }
  return LaunchPaged(context, attention, attributes.family);
}

}  // namespace
}  // namespace turboattn

TURBOATTN_DEFINE_HANDLER(TurboattnPagedAttentionStep, turboattn::PagedAttentionStep, turboattn::StepAttributes);

#include "handlers/handlers.h"
#include "handlers/linear_operands.h"

namespace turboattn {
namespace {

ffi::Error RaggedAttention(Context context, ffi::RemainingArgs args, ffi::RemainingRets results,
                           const LinearAttributes& attributes) {
  Operands operands("ragged_attention", context, attributes.operands, args, results);
  LinearAttentionParams params = ReadLinear(operands, attributes, "T H", "S K");
  params.ragged = true;
  params.q_ranges = operands.Ints("q_ranges", "B 2");
  params.kv_ranges = operands.Ints("kv_ranges", "B 2");
  params.batch = operands.size('B');
  if (!operands.ok()) return operands.error();
  return Launch(context, LinearDesc(params, attributes.family), params);
}

}  // namespace
}  // namespace turboattn

TURBOATTN_DEFINE_HANDLER(TurboattnRaggedAttention, turboattn::RaggedAttention, turboattn::LinearAttributes);

#include "handlers/handlers.h"
#include "handlers/linear_operands.h"

namespace turboattn {
namespace {

ffi::Error Attention(Context context, ffi::RemainingArgs args, ffi::RemainingRets results,
                     const LinearAttributes& attributes) {
  Operands operands("attention", context, attributes.operands, args, results);
  RefuseOperands(operands, {"bias", "mask"});
  LinearAttentionParams params = ReadLinear(operands, attributes, "B T H", "B S K");
  params.query_lens = operands.OptionalInts("query_lens", "B");
  params.kv_lens = operands.OptionalInts("kv_lens", "B");
  params.query_offset = operands.OptionalInts("query_offset", "B");
  params.segment_ids_q = operands.OptionalInts("segment_ids_q", "B T");
  params.segment_ids_kv = operands.OptionalInts("segment_ids_kv", "B S");
  if ((params.segment_ids_q == nullptr) != (params.segment_ids_kv == nullptr))
    operands.Fail("segment_ids must be given for queries and keys");
  if (!operands.ok()) return operands.error();
  return Launch(context, LinearDesc(params, attributes.family), params);
}

}  // namespace
}  // namespace turboattn

TURBOATTN_DEFINE_HANDLER(TurboattnAttention, turboattn::Attention, turboattn::LinearAttributes);

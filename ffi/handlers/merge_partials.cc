#include "core/desc.h"
#include "handlers/handlers.h"
#include "handlers/operands.h"

namespace turboattn {
namespace {

ffi::Error MergePartials(Context context, ffi::RemainingArgs args, ffi::RemainingRets results,
                         const OperandsOnly& attributes) {
  Operands operands("merge_partials", context, attributes.operands, args, results);
  MergeParams params;
  params.dtype = operands.FloatType("outs");
  params.outs = operands.Required("outs", "R T H E", {XlaType(params.dtype)});
  params.lses = static_cast<float*>(operands.Required("lses", "R T H", {ffi::F32}));
  params.sinks = operands.OptionalFloats("sinks", "H");
  params.out_dtype = operands.ResultFloatType("out");
  params.out = operands.Result("out", "T H E", {XlaType(params.out_dtype)});
  params.lse = static_cast<float*>(operands.Result("lse", "T H", {ffi::F32}));
  params.num_parts = operands.size('R');
  params.num_tokens = operands.size('T');
  params.num_heads = operands.size('H');
  params.value_dim = operands.size('E');
  if (!operands.ok()) return operands.error();
  return Launch(context, {Phase::kMerge, "", params.dtype, params.dtype, 0, params.value_dim}, params);
}

}  // namespace
}  // namespace turboattn

TURBOATTN_DEFINE_HANDLER(TurboattnMergePartials, turboattn::MergePartials, turboattn::OperandsOnly);

#include "handlers/handlers.h"
#include "handlers/paged_operands.h"

namespace turboattn {
namespace {

ffi::Error AppendKv(Context context, ffi::RemainingArgs args, ffi::RemainingRets results,
                    const AppendAttributes& attributes) {
  Operands operands("append_kv", context, attributes.operands, args, results);
  constexpr int64_t kNoValue = 1;  // any legal value_dim: without a value cache no value is written
  AppendParams params = ReadAppend(operands, attributes.kv_dtype, operands.FloatType("key"), kNoValue,
                                   attributes.cp_size, RopePart(attributes));
  WriteCache(operands, &params.cache);
  if (!operands.ok()) return operands.error();
  return Launch(context, AppendDesc(params), params);
}

}  // namespace
}  // namespace turboattn

TURBOATTN_DEFINE_HANDLER(TurboattnAppendKv, turboattn::AppendKv, turboattn::AppendAttributes);

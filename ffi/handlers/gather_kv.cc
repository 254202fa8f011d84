#include "handlers/handlers.h"
#include "handlers/paged_operands.h"

namespace turboattn {
namespace {

ffi::Error GatherKv(Context context, ffi::RemainingArgs args, ffi::RemainingRets results,
                    const GatherAttributes& attributes) {
  Operands operands("gather_kv", context, attributes.operands, args, results);
  GatherParams params;
  // E: of the parameters of int8 and int4, of an unquantised cache itself. fp8 has no E and decodes to the output type.
  params.out_dtype = operands.ResultFloatType("key");
  DType dtype = params.out_dtype;
  DType kv_dtype = DType::kFloat32;
  ParseDType(std::string(attributes.kv_dtype), &kv_dtype);
  if (HasRowParams(kv_dtype)) dtype = operands.FloatType("key_params");
  if (!IsQuantised(kv_dtype)) dtype = operands.FloatType("key_cache");
  const ffi::DataType out = XlaType(params.out_dtype);
  params.key = operands.Result("key", "B S K D", {out});
  params.value = operands.Result("value", "B S K E", {out});
  params.cache = ReadCache(operands, attributes.kv_dtype, dtype, operands.size('E'));
  params.seqs = ReadSequences(operands, 1, false);
  if (!operands.ok()) return operands.error();
  if (operands.size('S') != params.seqs.max_pages * params.cache.page_size ||
      operands.size('D') != params.cache.head_dim || operands.size('E') != params.cache.value_dim) {
    operands.Fail("the results must have M * P tokens and the cache's row lengths, got " +
                  std::to_string(operands.size('S')) + " tokens of " + std::to_string(operands.size('D')) + " and " +
                  std::to_string(operands.size('E')));
    return operands.error();
  }
  const KernelDesc desc = {Phase::kGather,        "", dtype, params.cache.kv_dtype, params.cache.head_dim,
                           params.cache.value_dim};
  return Launch(context, desc, params);
}

}  // namespace
}  // namespace turboattn

TURBOATTN_DEFINE_HANDLER(TurboattnGatherKv, turboattn::GatherKv, turboattn::GatherAttributes);

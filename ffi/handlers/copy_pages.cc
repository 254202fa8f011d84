#include "handlers/handlers.h"
#include "handlers/operands.h"

namespace turboattn {
namespace {

// The kernel copies bytes, so this primitive has no dtype attributes: a cache row is as long as its array says.
ffi::Error CopyPages(Context context, ffi::RemainingArgs args, ffi::RemainingRets results,
                     const OperandsOnly& attributes) {
  Operands operands("copy_pages", context, attributes.operands, args, results);
  const std::initializer_list<ffi::DataType> stored = {ffi::F32, ffi::BF16, ffi::F16, ffi::U8, ffi::F8E4M3FN};
  const std::initializer_list<ffi::DataType> floats = {ffi::F32, ffi::BF16, ffi::F16};
  CopyPagesParams params;
  KvCache& cache = params.cache;
  operands.Required("key_cache", "L? N K P d", stored);
  operands.Optional("value_cache", "L? N K P e", stored);
  operands.Optional("key_params", "L? N K P 2", floats);
  operands.Optional("value_params", "L? N K P 2", floats);
  params.layer = operands.Ints("layer", "n");
  params.source = operands.Ints("source", "n");
  params.destination = operands.Ints("destination", "n");
  params.count = operands.size('n');
  cache.kv_dtype = operands.StoredType("key_cache");  // int4 counts as int8 of half the length
  cache.dtype = operands.has("key_params") ? operands.FloatType("key_params") : cache.kv_dtype;
  cache.num_layers = operands.size('L');
  cache.num_pages = operands.size('N');
  cache.num_kv_heads = operands.size('K');
  cache.page_size = operands.size('P');
  cache.head_dim = operands.size('d');
  cache.value_dim = operands.has("value_cache") ? operands.size('e') : 0;
  cache.key = operands.Written("key_cache");
  if (operands.has("value_cache")) cache.value = operands.Written("value_cache");
  if (operands.has("key_params")) cache.key_params = operands.Written("key_params");
  if (operands.has("value_params")) cache.value_params = operands.Written("value_params");
  int64_t page_bytes = RowBytes(cache.kv_dtype, cache.head_dim + cache.value_dim);  // of one token of a head so far
  if (operands.has("key_params")) page_bytes += 2 * RowBytes(cache.dtype, 1);
  if (operands.has("value_params")) page_bytes += 2 * RowBytes(cache.dtype, 1);
  page_bytes *= cache.num_kv_heads * cache.page_size;
  params.workspace = operands.ScratchResult(params.count * page_bytes);
  if (!operands.ok()) return operands.error();
  return Launch(context, {Phase::kCopyPages, "", std::nullopt, std::nullopt}, params);
}

}  // namespace
}  // namespace turboattn

TURBOATTN_DEFINE_HANDLER(TurboattnCopyPages, turboattn::CopyPages, turboattn::OperandsOnly);

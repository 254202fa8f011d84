// Reads what attention and ragged_attention share.
#ifndef TURBOATTN_HANDLERS_LINEAR_OPERANDS_H_
#define TURBOATTN_HANDLERS_LINEAR_OPERANDS_H_

#include <string>
#include <string_view>

#include "core/desc.h"
#include "handlers/attributes.h"
#include "handlers/paged_operands.h"

namespace turboattn {

// query_rows, key_rows: axes before D, "B T H" and "B S K" or "T H" and "S K".
inline LinearAttentionParams ReadLinear(Operands& operands, const LinearAttributes& attributes,
                                        const std::string& query_rows, const std::string& key_rows) {
  LinearAttentionParams params;
  params.dtype = operands.FloatType("query");
  const ffi::DataType type = XlaType(params.dtype);
  params.query = operands.Required("query", (query_rows + " D").c_str(), {type});
  params.key = operands.Required("key", (key_rows + " D").c_str(), {type});
  params.value = operands.Required("value", (key_rows + " E").c_str(), {type});
  params.score = ReadScore(operands, attributes.is_causal, attributes.scale, attributes.logits_soft_cap);
  params.out_dtype = operands.ResultFloatType("out");
  params.out = operands.Result("out", (query_rows + " E").c_str(), {XlaType(params.out_dtype)});
  params.lse = static_cast<float*>(operands.Result("lse", query_rows.c_str(), {ffi::F32}));
  params.batch = operands.size('B');
  params.num_tokens = operands.size('T');
  params.num_keys = operands.size('S');
  params.num_heads = operands.size('H');
  params.num_kv_heads = operands.size('K');
  params.head_dim = operands.size('D');
  params.value_dim = operands.size('E');
  CheckHeads(operands, params.num_heads, params.num_kv_heads);
  return params;
}

// family: see LinearAttributes.
inline KernelDesc LinearDesc(const LinearAttentionParams& params, std::string_view family) {
  return {Phase::kAttention, std::string(family), params.dtype, params.dtype, params.head_dim, params.value_dim};
}

}  // namespace turboattn

#endif  // TURBOATTN_HANDLERS_LINEAR_OPERANDS_H_

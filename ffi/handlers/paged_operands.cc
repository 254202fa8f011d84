#include "handlers/paged_operands.h"

#include <string>

#include "core/registry.h"

namespace turboattn {

KvCache ReadCache(Operands& operands, std::string_view kv_dtype, DType dtype, int64_t value_dim) {
  KvCache cache;
  if (!ParseDType(std::string(kv_dtype), &cache.kv_dtype))
    operands.Fail("kv_dtype must be a cache dtype, got " + std::string(kv_dtype));
  if (!IsQuantised(cache.kv_dtype) && cache.kv_dtype != dtype) {
    operands.Fail(std::string("kv_dtype must be the query's dtype ") + to_string(dtype) + " or a quantised one, got " +
                  std::string(kv_dtype));
  }
  cache.dtype = dtype;
  const ffi::DataType stored = XlaType(cache.kv_dtype);
  const bool shared_value = !operands.has("value_cache");
  cache.key = operands.Required("key_cache", "L? N K P d", {stored});
  cache.value = operands.Optional("value_cache", "L? N K P e", {stored});
  if (HasRowParams(cache.kv_dtype)) {
    cache.key_params = operands.Required("key_params", "L? N K P 2", {XlaType(dtype)});
    if (!shared_value) cache.value_params = operands.Required("value_params", "L? N K P 2", {XlaType(dtype)});
  } else if (IsQuantised(cache.kv_dtype)) {
    cache.key_params = operands.Required("key_params", "L? K", {ffi::F32});
    if (!shared_value) cache.value_params = operands.Required("value_params", "L? K", {ffi::F32});
  }
  const int64_t packing = cache.kv_dtype == DType::kInt4 ? 2 : 1;
  cache.num_layers = operands.size('L');
  cache.num_pages = operands.size('N');
  cache.num_kv_heads = operands.size('K');
  cache.page_size = operands.size('P');
  cache.head_dim = operands.size('d') * packing;
  cache.value_dim = shared_value ? value_dim : operands.size('e') * packing;
  if (!operands.ok()) return cache;
  if (cache.page_size == 0) operands.Fail("key_cache must have pages of at least one token");
  if (packing == 2 && (cache.head_dim % 8 != 0 || (!shared_value && cache.value_dim % 8 != 0))) {
    operands.Fail("key_cache and value_cache must hold a multiple of 8 elements a row for int4, got " +
                  std::to_string(cache.head_dim) + " and " + std::to_string(cache.value_dim));
  }
  if (shared_value && (cache.value_dim <= 0 || cache.value_dim > cache.head_dim)) {
    operands.Fail("value_dim must be in 1 .. " + std::to_string(cache.head_dim) + ", got " +
                  std::to_string(cache.value_dim));
  }
  return cache;
}

void WriteCache(Operands& operands, KvCache* cache) {
  const bool shared_value = !operands.has("value_cache");
  cache->key = operands.Written("key_cache");
  if (!shared_value) cache->value = operands.Written("value_cache");
  if (!HasRowParams(cache->kv_dtype)) return;
  cache->key_params = operands.Written("key_params");
  if (!shared_value) cache->value_params = operands.Written("value_params");
}

Sequences ReadSequences(Operands& operands, int32_t cp_size, bool packed) {
  Sequences seqs;
  seqs.layer = operands.Ints("layer", "B");
  seqs.page_table = operands.Ints("page_table", "B M");
  seqs.kv_lens = operands.Ints("kv_lens", "B");
  if (packed) seqs.q_ranges = operands.Ints("q_ranges", "B 2");
  seqs.cp_rank = operands.OptionalInts("cp_rank", "B");
  seqs.batch = operands.size('B');
  seqs.max_pages = operands.size('M');
  seqs.cp_size = cp_size;
  if (operands.has("prefix_pages") || operands.has("prefix_len")) {
    seqs.prefix_pages = operands.Ints("prefix_pages", "n");
    seqs.prefix_len = operands.Ints("prefix_len", "1");
    seqs.num_prefix_pages = operands.size('n');
  }
  if (cp_size < 1) operands.Fail("cp_size must be at least 1, got " + std::to_string(cp_size));
  return seqs;
}

RopeParams ReadRope(Operands& operands, const RopeAttributes& attributes) {
  RopeParams rope;
  rope.dim = attributes.dim;
  rope.offset = attributes.offset;
  rope.interleaved = attributes.interleaved;
  rope.attention_factor = attributes.attention_factor;
  rope.section_t = attributes.section_t;
  rope.section_h = attributes.section_h;
  rope.section_w = attributes.section_w;
  rope.sections_interleaved = attributes.sections_interleaved;
  const bool three_axes = operands.rank("positions") == 2;
  rope.positions = operands.OptionalInts("positions", three_axes ? "T 3" : "T");
  rope.position_axes = three_axes ? 3 : 1;
  if (attributes.dim == 0) return rope;
  rope.turns = static_cast<uint32_t*>(operands.Optional("rope_turns", "R 2", {ffi::U32}));
  rope.base = operands.OptionalFloats("rope_base", "B");
  if ((rope.turns == nullptr) == (rope.base == nullptr)) operands.Fail("rope must have either rope_turns or rope_base");
  if (rope.turns != nullptr && operands.size('R') != attributes.dim / 2) {
    operands.Fail("rope_turns must have " + std::to_string(attributes.dim / 2) + " pairs, got " +
                  std::to_string(operands.size('R')));
  }
  if (attributes.dim < 0 || attributes.dim % 2 != 0 || attributes.offset < 0) {
    operands.Fail("rope_dim must be even and not negative, rope_offset not negative, got " +
                  std::to_string(attributes.dim) + " and " + std::to_string(attributes.offset));
  }
  return rope;
}

ScoreParams ReadScore(Operands& operands, bool is_causal, float scale, float logits_soft_cap) {
  ScoreParams score;
  score.is_causal = is_causal;
  score.scale = scale;
  score.soft_cap = logits_soft_cap;
  score.window = operands.OptionalInts("window", "B 2");
  score.sinks = operands.OptionalFloats("sinks", "H");
  score.alibi_slopes = operands.OptionalFloats("alibi_slopes", "H");
  return score;
}

AppendParams ReadAppend(Operands& operands, std::string_view kv_dtype, DType dtype, int64_t value_dim, int32_t cp_size,
                        const RopeAttributes& rope) {
  AppendParams params;
  params.cache = ReadCache(operands, kv_dtype, dtype, value_dim);
  const ffi::DataType type = XlaType(dtype);
  params.key = operands.Required("key", "T K D", {type});
  if (params.cache.value != nullptr) params.value = operands.Required("value", "T K E", {type});
  params.seqs = ReadSequences(operands, cp_size, true);
  params.seqs.num_tokens = operands.size('T');
  params.rope = ReadRope(operands, rope);
  params.read_only_pages = operands.OptionalInts("read_only_pages", "B");
  params.bias_dtype = operands.BiasType({"key_bias", "value_bias", "query_bias"}, dtype);
  const ffi::DataType bias_type = XlaType(params.bias_dtype);
  params.key_bias = operands.Optional("key_bias", "K D", {bias_type});
  params.value_bias = operands.Optional("value_bias", "K E", {bias_type});
  if (!operands.ok()) return params;
  if (operands.size('D') != params.cache.head_dim ||
      (params.value != nullptr && operands.size('E') != params.cache.value_dim)) {
    operands.Fail("key and value must have the cache's row lengths, got " + std::to_string(operands.size('D')) +
                  " and " + std::to_string(operands.size('E')));
  }
  if (int64_t{rope.offset} + rope.dim > params.cache.head_dim) {
    operands.Fail("rope must turn columns of the head, got " + std::to_string(rope.dim) + " from " +
                  std::to_string(rope.offset));
  }
  return params;
}

KernelDesc AppendDesc(const AppendParams& params) {
  return {Phase::kAppend, "", params.cache.dtype, params.cache.kv_dtype, params.cache.head_dim, params.cache.value_dim};
}

void CheckHeads(Operands& operands, int64_t num_heads, int64_t num_kv_heads) {
  if (!operands.ok() || (num_kv_heads > 0 && num_heads % num_kv_heads == 0) || num_heads == 0) return;
  operands.Fail("query must have a multiple of the " + std::to_string(num_kv_heads) + " key/value heads, got " +
                std::to_string(num_heads));
}

void CheckSchedule(Operands& operands) {
  if (!operands.ok() || operands.size('g') == kMaxDecodeBlocks) return;
  operands.Fail("plan must have " + std::to_string(kMaxDecodeBlocks) + " rows, got " +
                std::to_string(operands.size('g')));
}

PagedAttentionParams ReadPagedAttention(Operands& operands, const KvCache& cache, const Sequences& seqs,
                                        const ScoreParams& score, const std::string& query_rows) {
  PagedAttentionParams params;
  params.cache = cache;
  params.seqs = seqs;
  params.score = score;
  params.query = operands.Required("query", (query_rows + " D").c_str(), {XlaType(cache.dtype)});
  params.out_dtype = operands.ResultFloatType("out");
  params.out = operands.Result("out", (query_rows + " V").c_str(), {XlaType(params.out_dtype)});
  params.lse = static_cast<float*>(operands.Result("lse", query_rows.c_str(), {ffi::F32}));
  params.num_heads = operands.size('H');
  CheckHeads(operands, params.num_heads, cache.num_kv_heads);
  if (!operands.ok()) return params;
  if (operands.size('D') != cache.head_dim || operands.size('V') != cache.value_dim) {
    operands.Fail("query and out must have the cache's row lengths " + std::to_string(cache.head_dim) + " and " +
                  std::to_string(cache.value_dim) + ", got " + std::to_string(operands.size('D')) + " and " +
                  std::to_string(operands.size('V')));
  }
  const bool packed = query_rows == "T H";
  params.seqs.uniform_q_len = packed ? 0 : operands.size('Q');
  params.seqs.num_tokens = packed ? operands.size('T') : operands.size('B') * operands.size('Q');
  params.score.tree_mask = static_cast<const uint8_t*>(operands.Optional("tree_mask", "t U", {ffi::PRED}));
  params.score.tree_columns = operands.size('U');
  params.schedule = operands.OptionalInts("plan", "g 8");
  if (params.schedule != nullptr) CheckSchedule(operands);
  if (params.score.tree_mask != nullptr && operands.size('t') != params.seqs.num_tokens) {
    operands.Fail("tree_mask must have a row for each of the " + std::to_string(params.seqs.num_tokens) +
                  " query tokens, got " + std::to_string(operands.size('t')));
  }
  return params;
}

PagedPlan PlanCall(const PagedAttentionParams& params) {
  const Sequences& seqs = params.seqs;
  const KvCache& cache = params.cache;
  return PlanPaged({seqs.batch, seqs.num_tokens, seqs.uniform_q_len, params.num_heads, cache.num_kv_heads,
                    cache.value_dim, (seqs.max_pages + seqs.num_prefix_pages) * cache.page_size, params.batch_invariant,
                    HasKernel(DecodeDesc(params, ""))});
}

void PlanWorkspace(Operands& operands, PagedAttentionParams* params) {
  if (!operands.ok()) return;
  params->plan = PlanCall(*params);
  params->workspace = operands.ScratchResult(params->plan.workspace_bytes);
}

bool AttentionAppends(const PagedAttentionParams& params) { return params.plan.decode_appends; }

KernelDesc DecodeDesc(const PagedAttentionParams& params, std::string_view family) {
  const KvCache& cache = params.cache;
  return {Phase::kDecode, std::string(family), cache.dtype, cache.kv_dtype, cache.head_dim, cache.value_dim};
}

ffi::Error LaunchPaged(Context context, const PagedAttentionParams& params, std::string_view family) {
  KernelDesc desc = DecodeDesc(params, family);
  if (params.plan.runs_prefill || !params.plan.runs_decode) {
    desc.phase = Phase::kPrefill;
    const ffi::Error prefilled = Launch(context, desc, params);
    if (prefilled.failure() || !params.plan.runs_decode) return prefilled;
    desc.phase = Phase::kDecode;  // it may begin where prefill's blocks leave room
  }
  return Launch(context, desc, params);
}

void RefuseOperands(Operands& operands, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    if (operands.has(name)) operands.Fail(std::string(name) + " has no kernel in this module");
  }
}

}  // namespace turboattn

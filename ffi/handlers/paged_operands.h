// Reads the operands that several paged primitives share into Params. Axes: see core/params.h; d and e are the stored
// lengths of a key and a value row (D and Dv, halved for int4).
#ifndef TURBOATTN_HANDLERS_PAGED_OPERANDS_H_
#define TURBOATTN_HANDLERS_PAGED_OPERANDS_H_

#include <string>
#include <string_view>

#include "core/desc.h"
#include "core/params.h"
#include "handlers/operands.h"

namespace turboattn {

// kv_dtype: the attribute; dtype: E. value_dim: the attribute where the primitive has it, used when there is no value
// cache (its values are the first value_dim columns of the keys).
KvCache ReadCache(Operands& operands, std::string_view kv_dtype, DType dtype, int64_t value_dim);

// Points the cache's written arrays at their results, in the order in which the primitives return them.
void WriteCache(Operands& operands, KvCache* cache);

// packed: the call has q_ranges.
Sequences ReadSequences(Operands& operands, int32_t cp_size, bool packed);

struct RopeAttributes {
  int32_t dim;
  int32_t offset;
  bool interleaved;
  float attention_factor;
  int32_t section_t, section_h, section_w;
  bool sections_interleaved;
};

RopeParams ReadRope(Operands& operands, const RopeAttributes& attributes);

// window, sinks, alibi_slopes and the attributes.
ScoreParams ReadScore(Operands& operands, bool is_causal, float scale, float logits_soft_cap);

// Everything of append_kv but the cache's results, which WriteCache adds. dtype: E.
AppendParams ReadAppend(Operands& operands, std::string_view kv_dtype, DType dtype, int64_t value_dim, int32_t cp_size,
                        const RopeAttributes& rope);

KernelDesc AppendDesc(const AppendParams& params);

// Query heads must be a multiple of key/value heads.
void CheckHeads(Operands& operands, int64_t num_heads, int64_t num_kv_heads);

// A schedule, operand or result, has been read as [g,8].
void CheckSchedule(Operands& operands);

// The query, results and score of paged attention over `cache` and `seqs`, which have been read. query_rows: axes
// before D.
PagedAttentionParams ReadPagedAttention(Operands& operands, const KvCache& cache, const Sequences& seqs,
                                        const ScoreParams& score, const std::string& query_rows);

// Which kernels run. On the CPU, which has none for decode alone: prefill's.
PagedPlan PlanCall(const PagedAttentionParams& params);

// That, and their workspace, the call's last result.
void PlanWorkspace(Operands& operands, PagedAttentionParams* params);

// Whether the planned kernels of a fused step store its new keys and values too.
bool AttentionAppends(const PagedAttentionParams& params);

// What a call asks of the decode phase. family: see LinearAttributes.
KernelDesc DecodeDesc(const PagedAttentionParams& params, std::string_view family);

// The kernels of params.plan. family: see LinearAttributes.
ffi::Error LaunchPaged(Context context, const PagedAttentionParams& params, std::string_view family);

// Refuses operands that no kernel of this module takes.
void RefuseOperands(Operands& operands, std::initializer_list<const char*> names);

}  // namespace turboattn

#endif  // TURBOATTN_HANDLERS_PAGED_OPERANDS_H_

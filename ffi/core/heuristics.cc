#include "core/heuristics.h"

#include <algorithm>

namespace turboattn {
namespace {

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows that a decode unit can hold; more tokens than fit one unit would read the keys again for each.
constexpr int64_t kMaxRowTile = 16;

void PlanDecode(const PagedShape& shape, int64_t group, PagedPlan* plan) {
  if (shape.batch_invariant) {
    const int64_t row_tiles = CeilDiv(plan->decode_q_len * group, plan->row_tile);
    // A run of keys starts and ends with a block that may be partly empty, and there can be two runs.
    const int64_t splits = std::min(kMaxInvariantSplits, CeilDiv(shape.max_keys + 4 * kDecodeKeys, kInvariantSplit));
    plan->slots = shape.batch * shape.num_kv_heads * row_tiles * splits;
  } else {
    plan->slots = 2 * kMaxDecodeBlocks;
  }
  const int64_t slot_floats = plan->row_tile * (shape.value_dim + 2);
  plan->workspace_bytes = kWorkspaceHeader + plan->slots * (kSlotInts + slot_floats) * 4;
}

// Two blocks on each SM of a large card; a part of fewer keys than kMinSplitKeys costs more in merging than it gains.
constexpr int64_t kFillBlocks = 264;
constexpr int64_t kMinSplitKeys = 512;
constexpr int64_t kMaxPrefillSplits = 64;

void PlanPrefill(const PagedShape& shape, int64_t group, PagedPlan* plan) {
  const int64_t rows = PrefillRows(shape.value_dim);
  const int64_t tiles = PrefillTiles(shape.batch, shape.num_tokens, shape.uniform_q_len, group, rows,
                                     plan->runs_decode ? plan->decode_q_len : 0);
  plan->prefill_tiles = tiles * shape.num_kv_heads;
  if (shape.batch_invariant || plan->prefill_tiles == 0) return;  // the number of tiles depends on the batch
  const int64_t splits =
      std::min({kFillBlocks / plan->prefill_tiles, shape.max_keys / kMinSplitKeys, kMaxPrefillSplits});
  if (splits <= 1) return;
  plan->prefill_splits = static_cast<int>(splits);
  plan->prefill_offset = CeilDiv(plan->workspace_bytes, kWorkspaceHeader) * kWorkspaceHeader;
  const int64_t part_floats = rows * (shape.value_dim + 2);
  plan->workspace_bytes = plan->prefill_offset + plan->prefill_tiles * (kTileInts + splits * part_floats) * 4;
}

}  // namespace

PagedPlan PlanPaged(const PagedShape& shape) {
  PagedPlan plan;
  if (shape.num_tokens == 0 || shape.num_heads == 0) return plan;  // without sequences, a kernel writes the empty rows
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  plan.decode_q_len = std::max<int64_t>(1, kMaxRowTile / group);
  if (!shape.has_decode) {
    plan.runs_prefill = true;
  } else if (shape.uniform_q_len > 0) {
    plan.runs_decode = shape.uniform_q_len <= plan.decode_q_len;
    plan.runs_prefill = !plan.runs_decode;
  } else {
    plan.runs_decode = true;
    // No more tokens than sequences: nearly all have one, and a launch costs more than reading some keys twice. The
    // choice must not depend on the batch when bits must not.
    plan.runs_prefill = shape.num_tokens > shape.batch || shape.batch_invariant;
    if (!plan.runs_prefill) plan.decode_q_len = shape.num_tokens;
  }
  const int64_t q_len = shape.uniform_q_len > 0 ? shape.uniform_q_len : 1;
  plan.row_tile = q_len * group <= 8 ? 8 : 16;
  plan.decode_appends = plan.runs_decode && !plan.runs_prefill && shape.num_tokens <= kMaxDecodeAppends;
  if (plan.runs_decode) PlanDecode(shape, group, &plan);
  if (plan.runs_prefill) PlanPrefill(shape, group, &plan);
  return plan;
}

}  // namespace turboattn

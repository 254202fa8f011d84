#include "core/heuristics.h"

#include <algorithm>

namespace turboattn {
namespace {

constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows that a decode unit can hold; more tokens than fit one unit would read the keys again for each.
constexpr int64_t kMaxRowTile = 16;

}  // namespace

PagedPlan PlanPaged(const PagedShape& shape) {
  PagedPlan plan;
  if (shape.num_tokens == 0 || shape.num_heads == 0) return plan;  // without sequences, decode writes the empty rows
  const int64_t group = shape.num_heads / shape.num_kv_heads;
  plan.decode_q_len = std::max<int64_t>(1, kMaxRowTile / group);
  if (shape.uniform_q_len > 0) {
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
  if (!plan.runs_decode) return plan;
  if (shape.batch_invariant) {
    const int64_t row_tiles = CeilDiv(plan.decode_q_len * group, plan.row_tile);
    // A run of keys starts and ends with a block that may be partly empty, and there can be two runs.
    const int64_t splits = std::min(kMaxInvariantSplits, CeilDiv(shape.max_keys + 4 * kDecodeKeys, kInvariantSplit));
    plan.slots = shape.batch * shape.num_kv_heads * row_tiles * splits;
  } else {
    plan.slots = 2 * kMaxDecodeBlocks;
  }
  const int64_t slot_floats = plan.row_tile * (shape.value_dim + 2);
  plan.workspace_bytes = kWorkspaceHeader + plan.slots * (kSlotInts + slot_floats) * 4;
  return plan;
}

}  // namespace turboattn

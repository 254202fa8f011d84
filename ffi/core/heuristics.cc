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

void PlanClusters(const PagedShape& shape, int64_t group, PagedPlan* plan) {
  if (shape.batch != 1 || shape.max_keys > kMaxClusterKeys || shape.batch_invariant || plan->runs_prefill) return;
  const int64_t rows = (shape.uniform_q_len > 0 ? shape.uniform_q_len : plan->decode_q_len) * group;
  const int64_t units = shape.num_kv_heads * CeilDiv(rows, plan->row_tile);
  for (const int blocks : {16, 8}) {  // kernels know no smaller ones
    if (units * blocks > kMaxClusterBlocks || units * blocks < kMinClusterBlocks) continue;
    plan->decode_units = units;
    plan->decode_cluster = blocks;
    return;
  }
}

// sm80: two blocks on each SM of a large card; a part of fewer keys than kMinSplitKeys costs more in merging than it
// gains.
constexpr int64_t kFillBlocks = 264;
constexpr int64_t kMinSplitKeys = 512;
constexpr int64_t kMaxPrefillSplits = 64;

// sm90: blocks of this many keys. To look for long tiles and to launch a merge takes a call some 5 us: it is done where
// a tile can be of so many blocks that it is worth a cut, and kLongTile times as many as there are tiles for an SM.
constexpr int64_t kPlannedKeysSm90 = 128, kMinCutBlocks = 8, kLongTile = 16;

int64_t SplitBytes(int64_t parts, int64_t rows, int64_t value_dim) {
  return (kSplitInts + kMaxCutTiles * kTileInts + parts * rows * (value_dim + 2)) * 4;
}

void PlanPrefill(const PagedShape& shape, int64_t group, PagedPlan* plan) {
  const int64_t skipped = plan->runs_decode ? plan->decode_q_len : 0, heads = shape.num_kv_heads;
  const auto tiles = [&](int64_t rows) {
    return PrefillTiles(shape.batch, shape.num_tokens, shape.uniform_q_len, group, rows, skipped) * heads;
  };
  const int64_t rows = PrefillRows(shape.value_dim), rows_sm90 = PrefillRowsSm90(shape.value_dim);
  plan->prefill_tiles = tiles(rows);
  if (shape.batch_invariant || plan->prefill_tiles == 0) return;  // the number of tiles depends on the batch
  int64_t bytes = 0;
  const int64_t splits =
      std::min({kFillBlocks / plan->prefill_tiles, shape.max_keys / kMinSplitKeys, kMaxPrefillSplits});
  if (splits > 1) {
    plan->prefill_splits = static_cast<int>(splits);
    bytes = SplitBytes(plan->prefill_tiles * splits, rows, shape.value_dim);
  }
  // Judged by the full tiles: of sequences' ends, which tiles() counts too, there may be few.
  const int64_t full = std::max(shape.num_tokens * group / rows_sm90, int64_t{1}) * heads;
  const int64_t likely = shape.uniform_q_len > 0 ? tiles(rows_sm90) : full;
  const int64_t blocks = shape.max_keys / kPlannedKeysSm90;
  if (blocks >= kMinCutBlocks && blocks > kLongTile * likely / kPrefillSms) {
    plan->prefill_parts = kMaxPrefillParts;
    bytes = std::max(bytes, SplitBytes(plan->prefill_parts, rows_sm90, shape.value_dim));
  }
  if (bytes == 0) return;
  plan->prefill_offset = CeilDiv(plan->workspace_bytes, kWorkspaceHeader) * kWorkspaceHeader;
  plan->workspace_bytes = plan->prefill_offset + bytes;
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
  if (plan.runs_decode) {
    PlanDecode(shape, group, &plan);
    PlanClusters(shape, group, &plan);
  }
  if (plan.runs_prefill) PlanPrefill(shape, group, &plan);
  return plan;
}

}  // namespace turboattn

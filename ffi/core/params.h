// What a kernel is given: plain structs of pointers and numbers, filled by handlers/, read by kernels/ (CPU and CUDA
// alike).
//
// Alphabet: B sequences, T packed query tokens, S key/value tokens, H query heads, K key/value heads, D query/key head
// dim, Dv value head dim, N pages in the pool, P tokens a page, M page-table columns, L layers, E the query's element
// type. All arrays are dense and row-major. Every integer array may hold any value: see kernels/common/page_walk.h and
// mask.h for the rules that keep such values inside the buffers.
#ifndef TURBOATTN_CORE_PARAMS_H_
#define TURBOATTN_CORE_PARAMS_H_

#include <cstdint>

#include "core/heuristics.h"

namespace turboattn {

// Element types of arrays. kInt4 is two codes a byte, in the nibble order of kernels/common/kv_codec.h.
enum class DType : int32_t { kFloat32, kBfloat16, kFloat16, kInt8, kInt4, kFloat8E4M3 };

constexpr bool IsQuantised(DType kv_dtype) {
  return kv_dtype == DType::kInt8 || kv_dtype == DType::kInt4 || kv_dtype == DType::kFloat8E4M3;
}

// int8 and int4 caches carry (scale, zero) for each token and head; fp8 caches carry one scale a head.
constexpr bool HasRowParams(DType kv_dtype) { return kv_dtype == DType::kInt8 || kv_dtype == DType::kInt4; }

// Bytes of one row of `elements` elements. int4 rows are a whole number of bytes (D is a multiple of 8).
constexpr int64_t RowBytes(DType dtype, int64_t elements) {
  switch (dtype) {
    case DType::kFloat32:
      return elements * 4;
    case DType::kBfloat16:
    case DType::kFloat16:
      return elements * 2;
    case DType::kInt8:
    case DType::kFloat8E4M3:
      return elements;
    case DType::kInt4:
      return elements / 2;
  }
  return 0;
}

// Scratch memory of a CUDA call: a result that XLA allocates. The handler has checked its size; what it holds is
// garbage until the kernel writes it. Null on the CPU.
struct Workspace {
  void* data = nullptr;
  int64_t bytes = 0;
};

// A paged pool. Readers leave it alone; append and copy_pages write through the same pointers (the caches are aliased
// results).
struct KvCache {
  void* key = nullptr;           // [L,N,K,P,D] kv_dtype (int4: uint8 [...,D/2])
  void* value = nullptr;         // [L,N,K,P,Dv] kv_dtype; null: values are the first Dv columns of the keys (MLA)
  void* key_params = nullptr;    // int8/int4: [L,N,K,P,2] E (scale, zero); fp8: [L,K] float32 scale; else null
  void* value_params = nullptr;  // as key_params; null when value is
  DType kv_dtype = DType::kFloat32;
  DType dtype = DType::kFloat32;  // E: the type of new keys and values, and of int8/int4 parameters
  int64_t num_layers = 0;         // L
  int64_t num_pages = 0;          // N
  int64_t num_kv_heads = 0;       // K
  int64_t page_size = 0;          // P, tokens
  int64_t head_dim = 0;           // D, elements
  int64_t value_dim = 0;          // Dv, elements
};

// Which sequences the call is about, and where their tokens are.
struct Sequences {
  const int32_t* layer = nullptr;       // [B]; outside [0, L): the sequence is unmapped
  const int32_t* page_table = nullptr;  // [B,M] page ids; outside [0, N): unmapped
  const int32_t* kv_lens = nullptr;     // [B] tokens after the append, global over context-parallel ranks
  const int32_t* q_ranges = nullptr;    // [B,2] rows (lo, hi) of the packed arrays; null: sequence b owns rows [b*Q,
                                        // (b+1)*Q), see uniform_q_len
  const int32_t* cp_rank = nullptr;     // [B]; null: 0. Outside [0, cp_size): the rank holds no token
  int64_t batch = 0;                    // B
  int64_t max_pages = 0;                // M
  int64_t num_tokens = 0;               // T, rows of the packed arrays
  int64_t uniform_q_len = 0;            // Q, used when q_ranges is null
  int32_t cp_size = 1;                  // local key j has the global position j * cp_size + cp_rank
  // A prefix that all sequences share: keys at positions 0 .. min(prefix_len, n * P) - 1, never written. Everything
  // above then describes a sequence's own tokens only, whose positions start at prefix_len. Null together.
  const int32_t* prefix_pages = nullptr;  // [n] page ids, as in page_table
  const int32_t* prefix_len = nullptr;    // [1] tokens
  int64_t num_prefix_pages = 0;           // n
};

// Rotary embedding of the columns [offset, offset + dim) of each head. dim == 0: none.
struct RopeParams {
  const uint32_t* turns = nullptr;     // [dim/2,2] (high, low) words of round(f_j / 2 pi * 2^64); null: `base` is given
  const float* base = nullptr;         // [B] per-sequence base of dynamic NTK; null: `turns` is given
  const int32_t* positions = nullptr;  // [T] or [T,3]; null: the token's position in its sequence
  int32_t position_axes = 1;           // 1 or 3, the width of `positions`
  int32_t dim = 0;                     // R, a multiple of 8
  int32_t offset = 0;                  // first rotated column
  bool interleaved = false;            // pair j is (2j, 2j+1); else (j, j + R/2)
  float attention_factor = 1.f;        // multiplies sin and cos
  int32_t section_t = 0;               // pairs that turn with axis 0, 1, 2 of a multimodal position; all 0: one axis
  int32_t section_h = 0;
  int32_t section_w = 0;
  bool sections_interleaved = false;
};

// append_kv: bias, RoPE, one rounding to E, encode, store.
struct AppendParams {
  KvCache cache;
  Sequences seqs;
  const void* key = nullptr;           // [T,K,D] E
  const void* value = nullptr;         // [T,K,Dv] E; null when the cache has no value pool
  const void* key_bias = nullptr;      // [K,D] bias_dtype; may be null
  const void* value_bias = nullptr;    // [K,Dv] bias_dtype; may be null
  DType bias_dtype = DType::kFloat32;  // float32 or E
  RopeParams rope;
  const int32_t* read_only_pages =
      nullptr;  // [B] leading pages (of P * cp_size global tokens) that are never written; may be null
};

// gather_kv: decoded, contiguous K and V; zeros past kv_len and where no page is mapped.
struct GatherParams {
  KvCache cache;
  Sequences seqs;         // q_ranges and cp_rank are null
  void* key = nullptr;    // [B,M*P,K,D] out_dtype
  void* value = nullptr;  // [B,M*P,K,Dv] out_dtype
  DType out_dtype =
      DType::kFloat32;  // a float type; float8 values decode straight to it, other caches decode to E first
};

// copy_pages: page destination[i] becomes what page source[i] was before the call, in layer[i]. A copy with an id out
// of range is dropped.
struct CopyPagesParams {
  KvCache cache;
  const int32_t* layer = nullptr;        // [n]
  const int32_t* source = nullptr;       // [n]
  const int32_t* destination = nullptr;  // [n]
  int64_t count = 0;                     // n
  Workspace workspace;                   // one page of each array for each copy
};

// How scores are made from dot products, common to the attention kernels.
struct ScoreParams {
  bool is_causal = false;
  float scale = 1.f;
  float soft_cap = 0.f;                 // 0: off
  const int32_t* window = nullptr;      // [B,2] (left, right), -1: unbounded; may be null
  const float* sinks = nullptr;         // [H] natural-log units; may be null
  const float* alibi_slopes = nullptr;  // [H]; may be null
  const uint8_t* tree_mask =
      nullptr;  // [T,U] 0 or 1: which of its sequence's new tokens a row sees, in place of causality; may be null
  int64_t tree_columns = 0;  // U; new tokens past it are hidden
};

// What the fused step does to the query before attention: bias, RoPE, logn, one rounding to E.
struct QueryPrologue {
  const void* bias = nullptr;          // [H,D] bias_dtype; may be null
  DType bias_dtype = DType::kFloat32;  // float32 or E
  RopeParams rope;
  int32_t logn = 0;              // trained length m: q *= log(p+1)/log(m) when p+1 > m; 0: off
  bool logn_zero_based = false;  // p in place of p+1
};

// paged_attention, and the attention half of paged_attention_step.
struct PagedAttentionParams {
  KvCache cache;
  Sequences seqs;
  ScoreParams score;
  QueryPrologue prologue;             // all off in paged_attention
  AppendParams append;                // CUDA, where decode stores the step's new keys and values itself; else no key
  const void* query = nullptr;        // [T,H,D] E
  void* out = nullptr;                // [T,H,Dv] out_dtype
  float* lse = nullptr;               // [T,H] natural log
  DType out_dtype = DType::kFloat32;  // E or float32
  int64_t num_heads = 0;              // H
  bool batch_invariant = false;
  PagedPlan plan;         // CUDA: which kernel takes which sequence
  int64_t max_tiles = 0;  // CUDA: set by sm80's prefill launch, see PrefillTiles
  Workspace workspace;    // plan.workspace_bytes
  // CUDA: [kMaxDecodeBlocks, kScheduleInts]. What a make_plan left, or anything; may be null. Its result: decode fills
  // it for a call like this one, and does nothing else.
  const int32_t* schedule = nullptr;
  int32_t* new_schedule = nullptr;
};

// attention (dense) and ragged_attention: keys and values are plain arrays.
struct LinearAttentionParams {
  const void* query = nullptr;  // dense [B,T,H,D], ragged [T,H,D]; E
  const void* key = nullptr;    // dense [B,S,K,D], ragged [S,K,D]; E
  const void* value = nullptr;  // dense [B,S,K,Dv], ragged [S,K,Dv]; E
  void* out = nullptr;          // as query with Dv; out_dtype
  float* lse = nullptr;         // dense [B,T,H], ragged [T,H]; natural log
  bool ragged = false;
  const int32_t* query_lens = nullptr;      // dense [B]; null: T
  const int32_t* kv_lens = nullptr;         // dense [B]; null: S
  const int32_t* query_offset = nullptr;    // dense [B]: query i stands at i + query_offset; null: 0
  const int32_t* segment_ids_q = nullptr;   // dense [B,T]; null together with segment_ids_kv
  const int32_t* segment_ids_kv = nullptr;  // dense [B,S]
  const int32_t* q_ranges = nullptr;        // ragged [B,2] (lo, hi) rows of query
  const int32_t* kv_ranges = nullptr;       // ragged [B,2] (lo, hi) rows of key and value
  ScoreParams score;
  DType dtype = DType::kFloat32;      // E
  DType out_dtype = DType::kFloat32;  // E or float32
  int64_t batch = 0;                  // B
  int64_t num_tokens = 0;             // T
  int64_t num_keys = 0;               // S
  int64_t num_heads = 0;              // H
  int64_t num_kv_heads = 0;           // K
  int64_t head_dim = 0;               // D
  int64_t value_dim = 0;              // Dv
  int64_t max_tiles = 0;              // CUDA: set by sm80's launch: PrefillTiles
};

// merge_partials: softmax-weighted sum of partial results over disjoint keys.
struct MergeParams {
  const void* outs = nullptr;    // [R,T,H,Dv] dtype
  const float* lses = nullptr;   // [R,T,H]
  const float* sinks = nullptr;  // [H]; may be null
  void* out = nullptr;           // [T,H,Dv] out_dtype
  float* lse = nullptr;          // [T,H]
  DType dtype = DType::kFloat32;
  DType out_dtype = DType::kFloat32;
  int64_t num_parts = 0;   // R
  int64_t num_tokens = 0;  // T
  int64_t num_heads = 0;   // H
  int64_t value_dim = 0;   // Dv
};

}  // namespace turboattn

#endif  // TURBOATTN_CORE_PARAMS_H_

// From (sequence, token) to a row of the pool, with every index checked: any int32 in layer, page_table, kv_lens,
// q_ranges or cp_rank gives either an address inside the buffers or kUnmapped.
#ifndef TURBOATTN_KERNELS_COMMON_PAGE_WALK_H_
#define TURBOATTN_KERNELS_COMMON_PAGE_WALK_H_

#include <cstdint>

#include "core/params.h"
#include "kernels/common/dtypes.h"

namespace turboattn {

constexpr int64_t kUnmapped = -1;

struct TokenRange {
  int64_t lo;
  int64_t hi;  // lo <= hi
};

// a / b for a >= 0, b > 0. A 64-bit division takes a GPU some 100 instructions, a 32-bit one 20, and the operands
// nearly always fit.
TA_HD int64_t Divide(int64_t a, int64_t b) {
  if (((a | b) >> 32) == 0) return static_cast<uint32_t>(a) / static_cast<uint32_t>(b);
  return a / b;
}

TA_HD int64_t Clamp(int64_t x, int64_t lo, int64_t hi) { return x < lo ? lo : x > hi ? hi : x; }

// Rows [lo, hi) of a packed array of `rows` rows that range b of ranges[B,2] claims.
TA_HD TokenRange ClampRange(const int32_t* ranges, int64_t b, int64_t rows) {
  const int64_t lo = Clamp(ranges[2 * b], 0, rows);
  return {lo, Clamp(ranges[2 * b + 1], lo, rows)};
}

// Rows of the packed arrays that sequence b owns.
TA_HD TokenRange QueryRange(const Sequences& seqs, int64_t b) {
  if (seqs.q_ranges == nullptr) return {b * seqs.uniform_q_len, (b + 1) * seqs.uniform_q_len};
  return ClampRange(seqs.q_ranges, b, seqs.num_tokens);
}

// Global positions at or past this one hold no key: min(max(kv_len, 0), M * P * cp_size).
TA_HD int64_t KeyLimit(const Sequences& seqs, int64_t b, int64_t page_size) {
  return Clamp(seqs.kv_lens[b], 0, seqs.max_pages * page_size * seqs.cp_size);
}

// The sequence's rank, or kUnmapped when it is not one of the cp_size ranks.
TA_HD int64_t CpRank(const Sequences& seqs, int64_t b) {
  if (seqs.cp_rank == nullptr) return 0;
  const int32_t rank = seqs.cp_rank[b];
  return rank >= 0 && rank < seqs.cp_size ? rank : kUnmapped;
}

// Number of this rank's keys whose global position is below `limit` (limit >= 0): keys 0 .. count - 1 of the rank.
TA_HD int64_t LocalKeyCount(int64_t limit, int64_t cp_rank, int64_t cp_size) {
  if (cp_size == 1) return limit;  // the usual case, without a division
  return limit > cp_rank ? (limit - cp_rank + cp_size - 1) / cp_size : 0;
}

// Number of the rank's key at global position `position` >= 0, if it is the rank's at all.
TA_HD int64_t LocalKey(int64_t position, int64_t cp_size) {
  return cp_size == 1 ? position : Divide(position, cp_size);
}

// Position of the sequences' own first tokens.
TA_HD int64_t FirstPosition(const Sequences& seqs) { return seqs.prefix_len != nullptr ? *seqs.prefix_len : 0; }

// Number of keys of the shared prefix.
TA_HD int64_t PrefixKeyCount(const Sequences& seqs, int64_t page_size) {
  return seqs.prefix_len != nullptr ? Clamp(*seqs.prefix_len, 0, seqs.num_prefix_pages * page_size) : 0;
}

// Page `page` of layer `layer` as layer * N + page, or kUnmapped.
TA_HD int64_t PageOf(const KvCache& cache, int32_t layer, int32_t page) {
  if (layer < 0 || layer >= cache.num_layers || page < 0 || page >= cache.num_pages) return kUnmapped;
  return static_cast<int64_t>(layer) * cache.num_pages + page;
}

// The page in column `column` of sequence b's table, or kUnmapped. column must be in [0, M).
TA_HD int64_t PageAt(const KvCache& cache, const Sequences& seqs, int64_t b, int64_t column) {
  return PageOf(cache, seqs.layer[b], seqs.page_table[b * seqs.max_pages + column]);
}

// Row of [L,N,K,P] for kv head `head` and slot `slot` of a page that PageAt returned. Times the row's length it is the
// offset in the pool.
TA_HD int64_t CacheRow(const KvCache& cache, int64_t page, int64_t head, int64_t slot) {
  return (page * cache.num_kv_heads + head) * cache.page_size + slot;
}

// Where sequence b's token at global position `position` belongs: (column of its page table, slot). column == kUnmapped
// when it must not be written: a position outside [0, M * P * cp_size), another rank's token, a read-only page.
struct WriteColumn {
  int64_t column;
  int64_t slot;
};

TA_HD WriteColumn FindWriteColumn(const KvCache& cache, const Sequences& seqs, const int32_t* read_only_pages,
                                  int64_t b, int64_t position) {
  const WriteColumn dropped = {kUnmapped, 0};
  const int64_t rank = CpRank(seqs, b);
  if (rank == kUnmapped || position < 0) return dropped;
  const int64_t local = LocalKey(position, seqs.cp_size);
  if (position - local * seqs.cp_size != rank) return dropped;
  const int64_t column = Divide(local, cache.page_size);
  if (column >= seqs.max_pages) return dropped;
  if (read_only_pages != nullptr && column < read_only_pages[b]) return dropped;
  return {column, local - column * cache.page_size};
}

// The same with the page from PageAt in place of its column; page == kUnmapped where that is unmapped, too.
struct WriteSlot {
  int64_t page;
  int64_t slot;
};

TA_HD WriteSlot FindWriteSlot(const KvCache& cache, const Sequences& seqs, const int32_t* read_only_pages, int64_t b,
                              int64_t position) {
  const WriteColumn to = FindWriteColumn(cache, seqs, read_only_pages, b, position);
  return {to.column == kUnmapped ? kUnmapped : PageAt(cache, seqs, b, to.column), to.slot};
}

}  // namespace turboattn

#endif  // TURBOATTN_KERNELS_COMMON_PAGE_WALK_H_

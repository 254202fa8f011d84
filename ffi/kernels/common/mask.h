// Which keys a query row sees, as ranges of positions and of loop trips. All sums are 64-bit: kv_len may be any int32.
#ifndef TURBOATTN_KERNELS_COMMON_MASK_H_
#define TURBOATTN_KERNELS_COMMON_MASK_H_

#include <cstdint>

#include "kernels/common/page_walk.h"

namespace turboattn {

// Positions [lo, hi); lo <= hi.
struct KeyRange {
  int64_t lo;
  int64_t hi;
};

struct MaskRule {
  int64_t limit;  // 0 <= limit < 2^31; keys at or past it do not exist
  bool is_causal;
  int64_t left;   // keys before the row that it sees; -1: all. Another negative number n hides the last -n keys and the row's own
  int64_t right;  // keys after the row that it sees; -1: all
};

TA_HD MaskRule MakeMaskRule(int64_t limit, bool is_causal, const int32_t* window, int64_t b) {
  return {limit, is_causal, window != nullptr ? window[2 * b] : -1, window != nullptr ? window[2 * b + 1] : -1};
}

// Keys that a row at position p sees: s <= p if causal, -right <= p - s <= left, 0 <= s < limit. Both ends grow with p, so rows p0 .. p1 together
// see no key outside [VisibleKeys(p0).lo, VisibleKeys(p1).hi), and all of them see [VisibleKeys(p1).lo, VisibleKeys(p0).hi).
TA_HD KeyRange VisibleKeys(const MaskRule& rule, int64_t p) {
  int64_t lo = 0, hi = rule.limit;
  if (rule.left != -1) lo = p - rule.left;
  if (rule.is_causal && hi > p + 1) hi = p + 1;
  if (rule.right != -1 && hi > p + rule.right + 1) hi = p + rule.right + 1;
  lo = Clamp(lo, 0, rule.limit);
  return {lo, Clamp(hi, lo, rule.limit)};
}

// The rank's local keys with global positions in `range`: local key j is at j * cp_size + cp_rank.
TA_HD KeyRange LocalKeys(KeyRange range, int64_t cp_rank, int64_t cp_size) {
  return {LocalKeyCount(range.lo, cp_rank, cp_size), LocalKeyCount(range.hi, cp_rank, cp_size)};
}

}  // namespace turboattn

#endif  // TURBOATTN_KERNELS_COMMON_MASK_H_

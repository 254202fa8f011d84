// Which keys a query row sees, as ranges of positions and of loop trips. All sums are 64-bit: kv_len and prefix_len may
// be any int32.
#ifndef TURBOATTN_KERNELS_COMMON_MASK_H_
#define TURBOATTN_KERNELS_COMMON_MASK_H_

#include <cstdint>

#include "kernels/common/page_walk.h"

namespace turboattn {

// Positions or indices [lo, hi); lo <= hi.
struct KeyRange {
  int64_t lo;
  int64_t hi;
};

struct MaskRule {
  bool is_causal;
  int64_t left;   // keys before the row that it sees; -1: all. Another negative number n hides the last -n keys and the
                  // row's own
  int64_t right;  // keys after the row that it sees; -1: all
};

TA_HD MaskRule MakeMaskRule(bool is_causal, const int32_t* window, int64_t b) {
  return {is_causal, window != nullptr ? window[2 * b] : -1, window != nullptr ? window[2 * b + 1] : -1};
}

constexpr int64_t kAllPositions = int64_t{1} << 60;  // beyond any sum of a few int32

// Positions s that a row at position p sees, whether or not there are keys: s <= p if causal, -right <= p - s <= left.
// Both ends grow with p, so rows p0 .. p1 together see nothing outside [VisibleKeys(p0).lo, VisibleKeys(p1).hi), and
// all of them see [VisibleKeys(p1).lo, VisibleKeys(p0).hi).
TA_HD KeyRange VisibleKeys(const MaskRule& rule, int64_t p) {
  const int64_t lo = rule.left != -1 ? p - rule.left : -kAllPositions;
  int64_t hi = kAllPositions;
  if (rule.is_causal) hi = p + 1;
  if (rule.right != -1 && hi > p + rule.right + 1) hi = p + rule.right + 1;
  return {lo, hi < lo ? lo : hi};
}

// The part of `range` inside [0, limit), limit >= 0.
TA_HD KeyRange ClampKeys(KeyRange range, int64_t limit) {
  const int64_t lo = Clamp(range.lo, 0, limit);
  return {lo, Clamp(range.hi, lo, limit)};
}

// The rank's local keys with global positions in `range` (range.lo >= 0): local key j is at j * cp_size + cp_rank.
TA_HD KeyRange LocalKeys(KeyRange range, int64_t cp_rank, int64_t cp_size) {
  return {LocalKeyCount(range.lo, cp_rank, cp_size), LocalKeyCount(range.hi, cp_rank, cp_size)};
}

}  // namespace turboattn

#endif  // TURBOATTN_KERNELS_COMMON_MASK_H_

// Quotients by a number that the host knows: three instructions of a GPU, where a 32-bit division takes 20.
#ifndef TURBOATTN_KERNELS_COMMON_FAST_DIVISOR_H_
#define TURBOATTN_KERNELS_COMMON_FAST_DIVISOR_H_

#include <cstdint>

#include "kernels/common/dtypes.h"

namespace turboattn {

// With 2^(shift - 1) < divisor <= 2^shift the multiplier is 2^(31 + shift) / divisor, rounded up by less than 1: too
// much by less than 2^shift / divisor / 2^31 of a quotient of dividends below 2^31, which is less than 1 / divisor.
struct FastDivisor {
  uint32_t divisor = 1, multiplier = 1u << 31, shift = 0;

  FastDivisor() = default;
  // divisor: 1 to INT32_MAX.
  explicit FastDivisor(int64_t divisor) : divisor(static_cast<uint32_t>(divisor)) {
    while (int64_t{1} << shift < divisor) ++shift;
    multiplier = static_cast<uint32_t>(((uint64_t{1} << (31 + shift)) + divisor - 1) / divisor);
  }
  // a / divisor for 0 <= a <= INT32_MAX.
  TA_HD int Quotient(int a) const {
    const uint32_t twice = 2 * static_cast<uint32_t>(a);
#if defined(__CUDA_ARCH__)
    const uint32_t high = __umulhi(twice, multiplier);
#else
    const uint32_t high = static_cast<uint32_t>(static_cast<uint64_t>(twice) * multiplier >> 32);
#endif
    return static_cast<int>(high >> shift);
  }
};

}  // namespace turboattn

#endif  // TURBOATTN_KERNELS_COMMON_FAST_DIVISOR_H_

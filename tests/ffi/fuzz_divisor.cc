// Quotients without a division (kernels/common/fast_divisor.h) against divisions. usage: fuzz_divisor COUNT [SEED].
// Exit status 1 and a line on stderr at the first failure.
#include <climits>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "kernels/common/fast_divisor.h"

namespace turboattn {
namespace {

void Check(int a, int divisor) {
  const int found = FastDivisor(divisor).Quotient(a);
  if (found == a / divisor) return;
  std::fprintf(stderr, "fuzz_divisor: %d / %d is %d, not %d\n", a, divisor, a / divisor, found);
  std::exit(1);
}

// Around the multiples of a divisor, where quotients change.
void CheckAround(int64_t quotient, int divisor) {
  for (int64_t a = quotient * divisor - 2; a <= quotient * divisor + 2; ++a) {
    if (a >= 0 && a <= INT_MAX) Check(static_cast<int>(a), divisor);
  }
}

void CheckDivisor(int divisor, std::mt19937_64& random) {
  for (const int64_t quotient : {0, 1, 2, INT_MAX / divisor - 1, INT_MAX / divisor}) CheckAround(quotient, divisor);
  CheckAround(static_cast<int64_t>(random() % (static_cast<uint64_t>(INT_MAX / divisor) + 1)), divisor);
  Check(static_cast<int>(random() >> 33), divisor);
  Check(INT_MAX, divisor);
}

}  // namespace
}  // namespace turboattn

int main(int argc, char** argv) {
  const int64_t count = argc > 1 ? std::atoll(argv[1]) : 500;
  std::mt19937_64 random(argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0);
  for (int divisor = 1; divisor <= 4096; ++divisor) turboattn::CheckDivisor(divisor, random);
  for (int bits = 1; bits < 31; ++bits) {
    for (int off = -1; off <= 1; ++off) turboattn::CheckDivisor((1 << bits) + off, random);
  }
  turboattn::CheckDivisor(INT_MAX, random);
  for (int64_t i = 0; i < count; ++i) {
    turboattn::CheckDivisor(static_cast<int>(random() >> 33 >> random() % 31) | 1, random);
    turboattn::CheckDivisor((static_cast<int>(random() >> 34) >> random() % 30) + 1, random);
  }
  std::printf("fuzz_divisor: %lld divisors\n", static_cast<long long>(2 * count));
  return 0;
}

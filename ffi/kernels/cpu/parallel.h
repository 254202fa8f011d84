// How CPU kernels run on several threads: an interface that handlers implement over XLA's thread pool and tests over
// std::thread.
#ifndef TURBOATTN_KERNELS_CPU_PARALLEL_H_
#define TURBOATTN_KERNELS_CPU_PARALLEL_H_

#include <atomic>
#include <cstdint>
#include <functional>

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace turboattn::cpu {

class Parallel {
 public:
  virtual ~Parallel() = default;

  // Upper bound of the worker numbers that For passes, at least 1.
  virtual int num_workers() const = 0;

  // Calls body(item, worker) for every item in [0, items), each once, in any order, and returns when all are done.
  // Calls with equal `worker` do not overlap, so a worker number can select scratch memory; it is below num_workers()
  // and below `items`.
  virtual void For(int64_t items, const std::function<void(int64_t item, int worker)>& body) = 0;
};

// Runs everything on the calling thread.
class Inline final : public Parallel {
 public:
  int num_workers() const override { return 1; }
  void For(int64_t items, const std::function<void(int64_t, int)>& body) override {
    for (int64_t item = 0; item < items; ++item) body(item, 0);
  }
};

// While it lives, the thread computes with subnormal numbers. XLA's threads flush them to zero, which would change the
// bytes of quantised rows (a subnormal x, or a zero point that is one).
class KeepSubnormals {
 public:
#if defined(__SSE2__)
  KeepSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ & ~0x8040u); }  // FTZ is bit 15, DAZ bit 6
  ~KeepSubnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  KeepSubnormals() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    const uint64_t keep = saved_ & ~(uint64_t{1} << 24);  // FZ
    __asm__ volatile("msr fpcr, %0" : : "r"(keep));
  }
  ~KeepSubnormals() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
  KeepSubnormals() {}
  ~KeepSubnormals() {}

 public:
#endif
  KeepSubnormals(const KeepSubnormals&) = delete;
  KeepSubnormals& operator=(const KeepSubnormals&) = delete;
};

}  // namespace turboattn::cpu

#endif  // TURBOATTN_KERNELS_CPU_PARALLEL_H_

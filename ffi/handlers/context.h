// Where a handler's kernels run: XLA's thread pool in the CPU module, XLA's stream in the CUDA module. The handlers
// themselves are the same source for both; TURBOATTN_CUDA or TURBOATTN_CPU says which module is being built.
#ifndef TURBOATTN_HANDLERS_CONTEXT_H_
#define TURBOATTN_HANDLERS_CONTEXT_H_

#include <atomic>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "core/registry.h"
#include "core/status.h"
#include "xla/ffi/api/ffi.h"

#if defined(TURBOATTN_CUDA)
#include <cuda_runtime_api.h>

#include "core/cuda_launch.h"
#else
#include "kernels/cpu/parallel.h"
#endif

namespace turboattn {

namespace ffi = xla::ffi;

#if defined(TURBOATTN_CUDA)

using ContextTag = ffi::PlatformStream<cudaStream_t>;
using Context = cudaStream_t;
// The same launches every time, no allocation, no wait: XLA may record them in a CUDA graph.
constexpr auto kTraits = {ffi::Traits::kCmdBufferCompatible};

template <class Params>
Status RunKernel(Context stream, const Kernel& kernel, const Params& params) {
  const cudaError_t error = kernel.launch<CudaLaunch<Params>>()(params, stream);
  if (error == cudaSuccess) return Status();
  return Status::Error(std::string("launch failed with ") + cudaGetErrorName(error) + " (" + cudaGetErrorString(error) +
                       "); the fault may be that of an earlier kernel");
}

inline Status CopyBytes(Context stream, void* to, const void* from, size_t bytes) {
  const cudaError_t error = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
  return error == cudaSuccess
             ? Status()
             : Status::Error(std::string("copy of a cache that is not donated: ") + cudaGetErrorString(error));
}

inline Status ZeroBytes(Context stream, void* to, size_t bytes) {
  const cudaError_t error = cudaMemsetAsync(to, 0, bytes, stream);
  return error == cudaSuccess ? Status() : Status::Error(std::string("memset failed: ") + cudaGetErrorString(error));
}

#else

using ContextTag = ffi::ThreadPool;
using Context = ffi::ThreadPool;
constexpr std::initializer_list<ffi::Traits> kTraits = {};

// Items over XLA's pool. The calling thread works too and waits for items, never for tasks: a task that the pool starts
// late finds nothing to do, so a busy pool, or a pool of one thread that is itself running this handler, cannot
// deadlock.
class PoolParallel final : public cpu::Parallel {
 public:
  explicit PoolParallel(ffi::ThreadPool pool)
      : pool_(std::move(pool)), helpers_(static_cast<int>(pool_.num_threads()) - 1) {}

  int num_workers() const override { return helpers_ > 0 ? helpers_ + 1 : 1; }

  void For(int64_t items, const std::function<void(int64_t, int)>& body) override {
    if (items <= 0) return;
    if (helpers_ <= 0 || items == 1) {
      for (int64_t item = 0; item < items; ++item) body(item, 0);
      return;
    }
    auto shared = std::make_shared<Shared>(items, &body);
    const int64_t helpers = helpers_ < items - 1 ? helpers_ : items - 1;
    for (int worker = 1; worker <= helpers; ++worker) {
      pool_.Schedule([shared, worker] { shared->Work(worker); });
    }
    shared->Work(0);
    std::unique_lock<std::mutex> lock(shared->mutex);
    shared->all_done.wait(lock, [&] { return shared->done == shared->items; });
  }

 private:
  struct Shared {
    Shared(int64_t items, const std::function<void(int64_t, int)>* body) : items(items), body(body) {}

    void Work(int worker) {
      const cpu::KeepSubnormals keep;
      int64_t finished = 0;
      // `body` lives on the caller's stack; it is only touched with an unfinished item in hand, while the caller still
      // waits.
      for (int64_t item = next++; item < items; item = next++, ++finished) (*body)(item, worker);
      if (finished == 0) return;
      const std::lock_guard<std::mutex> lock(mutex);
      done += finished;
      if (done == items) all_done.notify_all();
    }

    const int64_t items;
    const std::function<void(int64_t, int)>* const body;
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::condition_variable all_done;
    int64_t done = 0;
  };

  ffi::ThreadPool pool_;
  int helpers_;
};

template <class Params>
Status RunKernel(Context pool, const Kernel& kernel, const Params& params) {
  PoolParallel parallel(pool);
  return kernel.launch<Status(const Params&, cpu::Parallel&)>()(params, parallel);
}

inline Status CopyBytes(Context, void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
  return Status();
}

inline Status ZeroBytes(Context, void* to, size_t bytes) {
  std::memset(to, 0, bytes);
  return Status();
}

#endif

// Finds the kernel for `asked` and runs it.
template <class Params>
ffi::Error Launch(Context context, const KernelDesc& asked, const Params& params) {
  const Kernel* kernel = FindKernel(asked, params);
  if (kernel == nullptr) return ffi::Error::Internal(to_string(asked) + ": this build has no such kernel");
  const Status status = RunKernel(context, *kernel, params);
  return status.ok() ? ffi::Error::Success()
                     : ffi::Error::Internal(to_string(kernel->desc()) + ": " + status.message());
}

}  // namespace turboattn

#endif  // TURBOATTN_HANDLERS_CONTEXT_H_

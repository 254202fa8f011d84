// copy_pages on the CPU. All sources are read before any page is written: valid copies go through a staging buffer, one
// array of the cache at a time.
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "kernels/cpu/kernels.h"

namespace turboattn::cpu {
namespace {

struct PageCopy {
  int64_t source;  // layer * N + page
  int64_t destination;
};

Status CopyArray(void* pool, int64_t page_bytes, const std::vector<PageCopy>& copies, Parallel& parallel) {
  if (pool == nullptr || page_bytes == 0 || copies.empty()) return Status();
  const int64_t count = static_cast<int64_t>(copies.size());
  std::unique_ptr<char[]> staged(new (std::nothrow) char[count * page_bytes]);
  if (staged == nullptr) return Status::Error("no memory to stage " + std::to_string(count) + " pages");
  char* pages = static_cast<char*>(pool);
  parallel.For(count, [&](int64_t i, int) {
    std::memcpy(staged.get() + i * page_bytes, pages + copies[i].source * page_bytes, page_bytes);
  });
  // In order and on one thread: of two copies to one page the last wins, always.
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(pages + copies[i].destination * page_bytes, staged.get() + i * page_bytes, page_bytes);
  return Status();
}

}  // namespace

Status CopyPages(const CopyPagesParams& params, Parallel& parallel) {
  const KvCache& cache = params.cache;
  std::vector<PageCopy> copies;
  for (int64_t i = 0; i < params.count; ++i) {
    const int32_t layer = params.layer[i], source = params.source[i], destination = params.destination[i];
    const bool valid = layer >= 0 && layer < cache.num_layers && source >= 0 && source < cache.num_pages &&
                       destination >= 0 && destination < cache.num_pages;
    if (valid) copies.push_back({layer * cache.num_pages + source, layer * cache.num_pages + destination});
  }
  const int64_t rows = cache.num_kv_heads * cache.page_size;
  Status status = CopyArray(cache.key, rows * RowBytes(cache.kv_dtype, cache.head_dim), copies, parallel);
  if (status.ok()) status = CopyArray(cache.value, rows * RowBytes(cache.kv_dtype, cache.value_dim), copies, parallel);
  if (HasRowParams(cache.kv_dtype)) {
    const int64_t params_bytes = rows * 2 * RowBytes(cache.dtype, 1);
    if (status.ok()) status = CopyArray(cache.key_params, params_bytes, copies, parallel);
    if (status.ok()) status = CopyArray(cache.value_params, params_bytes, copies, parallel);
  }
  return status;
}

}  // namespace turboattn::cpu

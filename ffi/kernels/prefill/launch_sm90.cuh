// Tensor maps, grid and shared memory of the sm90 prefill kernels.
#ifndef TURBOATTN_KERNELS_PREFILL_LAUNCH_SM90_CUH_
#define TURBOATTN_KERNELS_PREFILL_LAUNCH_SM90_CUH_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <climits>
#include <type_traits>
#include <utility>

#include "core/cuda_launch.h"
#include "core/registry.h"
#include "kernels/prefill/kernel_sm90.cuh"

namespace turboattn::prefill {

// The driver's encoder, found at run time: the module must import where there is no driver.
inline cudaError_t EncodeTensorMap(CUtensorMap* map, DType dtype, const void* data, const int64_t (&sizes)[4],
                                   const int64_t (&strides)[3], const int (&box)[4]) {
  // A box's rows, of 128 bytes or, of codes, less, are swizzled over their own length.
  const bool codes = IsQuantised(dtype);
  const CUtensorMapSwizzle swizzle = !codes || box[0] == 128 ? CU_TENSOR_MAP_SWIZZLE_128B
                                     : box[0] == 64          ? CU_TENSOR_MAP_SWIZZLE_64B
                                                             : CU_TENSOR_MAP_SWIZZLE_32B;
  using Encode = CUresult(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                          const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                          CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static void* const encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? found : nullptr;
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  cuuint64_t size[4], stride[3];
  cuuint32_t box_size[4], step[4];
  for (int i = 0; i < 4; ++i) {
    size[i] = static_cast<cuuint64_t>(std::max<int64_t>(sizes[i], 1));  // nothing of an empty tensor is copied
    box_size[i] = static_cast<cuuint32_t>(box[i]);
    step[i] = 1;
    if (i < 3) stride[i] = static_cast<cuuint64_t>(strides[i]);
  }
  const CUresult result = reinterpret_cast<Encode*>(encode)(
      map,
      codes                       ? CU_TENSOR_MAP_DATA_TYPE_UINT8
      : dtype == DType::kBfloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                  : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      4, const_cast<void*>(data), size, stride, box_size, step, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// Query rows of one kv head: [tokens, K, G, D], a box is a tile's rows.
template <class Traits, class Params>
cudaError_t EncodeQuery(const Params& params, CUtensorMap* map) {
  const int64_t heads = params.num_heads, kv_heads = KvHeadsOf(params), group = heads / kv_heads, dim = Traits::kDim;
  return EncodeTensorMap(map, Traits::kDType, params.query, {dim, group, kv_heads, QueryRows(params)},
                         {dim * 2, group * dim * 2, heads * dim * 2},
                         {64, static_cast<int>(group), 1, static_cast<int>(Traits::kRows / group)});
}

// An array of rows of `dim` elements. An empty one may have no address; any will do.
template <class Traits>
cudaError_t EncodeKeys(const LinearAttentionParams& params, const void* array, int64_t dim, CUtensorMap* map,
                       int* box_keys) {
  const int64_t kv_heads = params.num_kv_heads, batch = params.ragged ? 1 : params.batch;
  const int64_t keys = std::max<int64_t>(params.num_keys, 1);
  *box_keys = Traits::kKeys;
  return EncodeTensorMap(map, Traits::kDType, array != nullptr ? array : params.query, {dim, kv_heads, keys, batch},
                         {dim * 2, kv_heads * dim * 2, keys * kv_heads * dim * 2}, {64, 1, *box_keys, 1});
}

template <class Traits>
cudaError_t EncodeKeys(const PagedAttentionParams& params, const void* array, int64_t dim, CUtensorMap* map,
                       int* box_keys) {
  const KvCache& cache = params.cache;
  const int64_t bytes = RowBytes(Traits::kKvDType, dim);  // of a row
  int box = 8;                                            // the largest power of two that divides both
  while (box < cache.page_size && Traits::kKeys % (2 * box) == 0) box *= 2;
  *box_keys = box;
  const void* const address = array != nullptr ? array : params.query;
  if constexpr (Traits::kQuantised) {
    return EncodeTensorMap(map, Traits::kKvDType, address,
                           {bytes, cache.page_size, cache.num_kv_heads, cache.num_layers * cache.num_pages},
                           {bytes, cache.page_size * bytes, cache.num_kv_heads * cache.page_size * bytes},
                           {Traits::kStoredBytes, box, 1, 1});
  } else {  // KeyTileSm90::kByGroups; strides need not grow from one dimension to the next
    const int64_t rows = cache.num_layers * cache.num_pages * cache.num_kv_heads * cache.page_size;
    const int panels = static_cast<int>(dim / 64);
    return EncodeTensorMap(map, Traits::kKvDType, address, {64, 8, panels, rows / 8}, {bytes, 128, 8 * bytes},
                           {64, 8, panels, box / 8});
  }
}

// Heads whose keys and values are taken together: few, since what L2 loses is read from memory again. 32 MB instead
// took 16 % of 16 x 1024 on an H200.
constexpr int64_t kSectionBytes = int64_t{2} << 20;

inline bool MayCutTiles(const LinearAttentionParams&) { return false; }
inline bool MayCutTiles(const PagedAttentionParams& params) { return params.plan.prefill_parts > 0; }

template <class Traits, class Params>
ScheduleSm90 MakeSchedule(const Params& params, bool in_pairs, int64_t workers) {
  ScheduleSm90 schedule;
  const int64_t batch = BatchOf(params), kv_heads = KvHeadsOf(params), heads = batch * kv_heads;
  const int64_t tiles = MaxTiles<Traits::kRows>(params);
  int64_t items = tiles * kv_heads;  // packed calls have no more; the device knows how many
  schedule.group = FastDivisor(params.num_heads / kv_heads);
  schedule.kv_heads = FastDivisor(kv_heads);
  schedule.query_rows = static_cast<int>(QueryRows(params));
  schedule.skipped = static_cast<int>(std::min<int64_t>(SkippedLength(params), INT_MAX));
  schedule.in_pairs = in_pairs;
  if (UniformQueryLength(params) > 0) {
    const int64_t each = tiles / batch, levels = in_pairs ? (each + 1) / 2 : each;
    int64_t paired_heads = heads;
    if (in_pairs) {
      paired_heads = levels * heads / workers * workers / levels;
      schedule.single_from = static_cast<int>(paired_heads * levels / workers);
      items = paired_heads * levels + (heads - paired_heads) * each;
    }
    const int64_t head_bytes = std::max<int64_t>(MaxKeysOf(params), 1) * (Traits::kDim + Traits::kValueDim) * 2;
    const int64_t section = std::clamp<int64_t>(kSectionBytes / head_bytes, 1, heads);
    const auto divisor = [](int64_t width) { return FastDivisor(std::max<int64_t>(width, 1)); };
    schedule.uniform = static_cast<int>(UniformQueryLength(params));
    schedule.items = static_cast<int>(items);
    schedule.tiles = static_cast<int>(each);
    schedule.levels = static_cast<int>(levels);
    schedule.section = static_cast<int>(section);
    schedule.paired_heads = static_cast<int>(paired_heads);
    schedule.section_items = FastDivisor(section * levels);
    schedule.widths[kWholeSection] = divisor(section);
    schedule.widths[kPartSection] = divisor(paired_heads % section);
    schedule.widths[kSingles] = divisor(heads - paired_heads);
  }
  schedule.workers = static_cast<int>(std::min(workers, items));
  return schedule;
}

// Blocks that stay, so that what a block does before and after its products is done beside those of the tile before or
// after: 2 to 5 % of chunked calls, a third of causal ones of two tiles a block. Causal calls take a long and a short
// tile of a sequence in turn, so that its items are the same work. Uniform ones do so for as many heads as fill whole
// rounds; the tiles of the last heads follow one by one, longest first, there and back: what is left of the last pairs
// would leave 3 % of the blocks' time idle where they have 8 pairs each. Of few tiles, that may differ, no pairs; if
// none can be cut, a block a tile, whose lengths the hardware evens out.
template <class Traits, class Params>
ScheduleSm90 ChooseSchedule(const Params& params, int sms) {
  const bool cuts = MayCutTiles(params);
  // Of ranges there may be far fewer tiles than MaxTiles, which counts one for the end of each sequence.
  const int64_t full = QueryRows(params) * params.num_heads / Traits::kRows;
  const bool uniform = UniformQueryLength(params) > 0 && BatchOf(params) > 0;
  const bool many = cuts ? full >= 2 * int64_t{sms} : uniform || full >= sms;
  // Blocks for the full tiles, which look for the others too.
  const int64_t workers = many || cuts ? sms : full + sms;
  ScheduleSm90 schedule = MakeSchedule<Traits>(params, params.score.is_causal && many, workers);
  if (cuts) {
    schedule.sms = std::min(sms, kPrefillSms);
    schedule.workers = sms;
  }
  return schedule;
}

template <class Traits, class Params>
cudaError_t LaunchScheduled(const Params& params, const ScheduleSm90& schedule, cudaStream_t stream) {
  ArgumentsSm90<Params> args;
  args.params = params;
  args.schedule = schedule;
  args.query_by_copy = Traits::kRows % (params.num_heads / KvHeadsOf(params)) == 0;
  cudaError_t error = args.query_by_copy ? EncodeQuery<Traits>(params, &args.query) : cudaSuccess;
  if (error == cudaSuccess)
    error = EncodeKeys<Traits>(params, KeyArray(params), Traits::kDim, &args.key, &args.box_keys);
  if (error == cudaSuccess)
    error = EncodeKeys<Traits>(params, ValueArray(params), Traits::kValueDim, &args.value, &args.box_keys);
  while (PageSizeOf(params) > int64_t{1} << args.page_shift) ++args.page_shift;
  if (error != cudaSuccess) return error;
  constexpr int kBytes = sizeof(SharedSm90<Traits>);
  static_assert(kBytes <= 227 * 1024);
  static_assert(Traits::kRows <= PrefillRowsSm90(Traits::kValueDim), "the plan sizes the workspace");
  const auto kernel = &PrefillSm90<Traits, Params>;
  error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(schedule.workers));
  config.blockDim = dim3(Traits::kThreads);
  config.dynamicSmemBytes = kBytes;
  config.stream = stream;
  error = cudaLaunchKernelEx(&config, kernel, args);
  if constexpr (std::is_same_v<Params, PagedAttentionParams>) {
    if (error == cudaSuccess && schedule.sms > 0) error = LaunchMerge<Traits>(params, kMaxCutTiles, true, stream);
  }
  return error;
}

template <class Traits, class Params>
cudaError_t LaunchSm90(const Params& params, cudaStream_t stream) {
  if (QueryRows(params) == 0 || params.num_heads == 0) return cudaSuccess;
  if constexpr (std::is_same_v<Params, PagedAttentionParams>) {
    if (params.workspace.bytes < params.plan.workspace_bytes || !HasGroups(params.cache)) return cudaErrorInvalidValue;
  }
  int device = 0, sms = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return error;
  return LaunchScheduled<Traits>(params, ChooseSchedule<Traits>(params, sms), stream);
}

// Groups of 8 rows of a cache, or rows of plain arrays: coordinates of tensor copies have 32 bits, and so have numbers
// of tiles on the device, of which there are no more than (token, query head) rows, and of sequences.
inline int64_t RowsToCopy(const LinearAttentionParams& params) { return params.num_keys; }
inline int64_t RowsToCopy(const PagedAttentionParams& params) {
  const KvCache& cache = params.cache;
  return cache.num_layers * cache.num_pages * cache.num_kv_heads * (cache.page_size / 8);
}

// Everything on the card that the family is compiled for.
template <class Params>
bool SuitsSm90(const Params& params) {
  const int64_t most = std::max({RowsToCopy(params), QueryRows(params) * params.num_heads, BatchOf(params)});
  return DeviceIsSm90() && most <= INT_MAX;
}

namespace sm90 {

template <DType kEType, DType kKv, int kHeadDim, int kValueDim, class Params>
Kernel MakeKernel(KernelDesc desc) {
  return {std::move(desc), &LaunchSm90<TraitsSm90<kEType, kKv, kHeadDim, kValueDim>, Params>, &SuitsSm90<Params>};
}

}  // namespace sm90
}  // namespace turboattn::prefill

#endif  // TURBOATTN_KERNELS_PREFILL_LAUNCH_SM90_CUH_

// append_kv on the GPU: bias, RoPE, one rounding to E, encode, store. A block takes a few consecutive tokens, with all
// their (token, head) rows of K and V. There are two ways to move a row: in the registers of a few lanes, for the usual
// row lengths, and through shared memory, one warp a row, for all others.
#ifndef TURBOATTN_KERNELS_APPEND_KERNEL_CUH_
#define TURBOATTN_KERNELS_APPEND_KERNEL_CUH_

#include "core/params.h"
#include "kernels/append/tokens.cuh"
#include "kernels/append/traits.h"
#include "kernels/common/append_pairs.cuh"
#include "kernels/common/append_row.cuh"
#include "kernels/common/chunk.cuh"
#include "kernels/common/ptx.cuh"
#include "kernels/common/rope.h"

namespace turboattn::append {

// --- rows of kWidth elements, in registers ---------------------------------------------------------------------------
//
// A row takes kWidth / 16 lanes. Lane l holds elements 8l .. 8l + 7 of either half of the row, so that both columns of
// a rotated pair are in one lane, whichever the pairing, and accesses have 16 bytes.

template <int kWidth>
constexpr int kRowLanes = kWidth / (2 * kChunk);

// Where turn j lies among those of its token: of each lane the first two, then of each lane the next two. Two of them
// are one conflict-free 16-byte access.
template <int kWidth>
struct LaneTurns {
  static constexpr int kLanes = kRowLanes<kWidth>;
  bool interleaved;

  __device__ int operator()(int j) const {
    const int lane = interleaved ? j / 4 % kLanes : j / 8;
    const int turn = interleaved ? j / (4 * kLanes) * 4 + j % 4 : j % 8;
    return (turn / 2 * kLanes + lane) * 2 + turn % 2;
  }
};

template <int kWidth, bool kInterleaved>
__device__ inline void RotateLane(const SinCos* s_turns, int lane, float (&x)[2][kChunk]) {
  constexpr int kLanes = kRowLanes<kWidth>;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 two = *reinterpret_cast<const float4*>(s_turns + (i * kLanes + lane) * 2);
    const SinCos turns[2] = {{two.x, two.y}, {two.z, two.w}};
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int turn = 2 * i + k;
      if constexpr (kInterleaved) {
        RopeRotate(turns[k], &x[turn / 4][turn % 4 * 2], &x[turn / 4][turn % 4 * 2 + 1]);
      } else {
        RopeRotate(turns[k], &x[0][turn], &x[1][turn]);
      }
    }
  }
}

// A lane's part of a row: four pairs of either half.
struct LaneRow {
  uint4 half[2];
};

// A row of K and one of V on their way to a thread, which alone reads what it has asked for: through shared memory, so
// that they take no registers. Those of all threads lie beside each other, half by half.
class ComingRows {
 public:
  static constexpr int64_t kThreadBytes = 2 * static_cast<int64_t>(sizeof(LaneRow));

  __device__ explicit ComingRows(uint4* s_rows) : s_rows_(s_rows + threadIdx.x) {}

  // In turn: of K, then of V. In the place of the one before, which has been taken. chunk: the index of its first
  // chunk.
  template <int kWidth>
  __device__ void Ask(bool is_key, const void* source, int64_t chunk, bool exists) {
    if (exists) {
      const uint4* from = static_cast<const uint4*>(source) + chunk;
      uint4* to = Slot(is_key);
      Copy(to, from);
      Copy(to + blockDim.x, from + kRowLanes<kWidth>);
    }
#if __CUDA_ARCH__ >= 800
    CommitCopies();
#endif
  }
  // The one that has been asked for first.
  __device__ LaneRow Take(bool is_key) const {
#if __CUDA_ARCH__ >= 800
    WaitCopies<1>();
#endif
    const uint4* from = Slot(is_key);
    return {from[0], from[blockDim.x]};
  }

 private:
  static __device__ void Copy(uint4* to, const uint4* from) {
#if __CUDA_ARCH__ >= 800
    CopyAsync16(SharedAddress(to), from, true);
#else
    *to = *from;
#endif
  }
  __device__ uint4* Slot(bool is_key) const { return s_rows_ + (is_key ? 0 : 2 * blockDim.x); }

  uint4* s_rows_;
};

template <class E>
__device__ inline void UnpackChunk(const uint32_t* pairs, float (&x)[kChunk]) {
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    x[2 * i] = Low<E>(pairs[i]);
    x[2 * i + 1] = High<E>(pairs[i]);
  }
}

// Row `row` of the pool, kv head `head`. Run by whole warps; rows that are not `written` only take part in the exchange
// of values. turns: of the row's token.
template <class Traits, int kWidth, bool kIsKey>
__device__ inline void StoreLaneRow(const AppendParams& params, const LaneRow& loaded, uint32_t row, int head,
                                    int layer, bool written, const SinCos* turns) {
  using E = typename Traits::E;
  constexpr DType kKv = Traits::kKvDType;
  constexpr int kLanes = kRowLanes<kWidth>;
  Side side = SideOf(params, kIsKey);
  side.width = kWidth;  // it is; so the compiler knows
  const int lane = threadIdx.x % kLanes;
  [[maybe_unused]] float fp8_scale = 0.f;
  if constexpr (kKv == DType::kFloat8E4M3) {
    if (written) fp8_scale = static_cast<const float*>(side.params)[layer * params.cache.num_kv_heads + head];
  }

  uint32_t pairs[kChunk] = {loaded.half[0].x, loaded.half[0].y, loaded.half[0].z, loaded.half[0].w,
                            loaded.half[1].x, loaded.half[1].y, loaded.half[1].z, loaded.half[1].w};
  const bool rotated = kIsKey && params.rope.dim != 0;
  if (rotated || side.bias != nullptr) {
    float x[2][kChunk];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      UnpackChunk<E>(pairs + h * (kChunk / 2), x[h]);
      AddBias<E>(side, params.bias_dtype, int64_t{head} * kWidth + h * (kWidth / 2) + lane * kChunk, x[h]);
    }
    if (rotated) {
      params.rope.interleaved ? RotateLane<kWidth, true>(turns, lane, x) : RotateLane<kWidth, false>(turns, lane, x);
    }
#pragma unroll
    for (int i = 0; i < kChunk; ++i) pairs[i] = RoundPair<E>(x[i / 4][i % 4 * 2], x[i / 4][i % 4 * 2 + 1]);
  }

  // encode(): of the four pairs of a half.
  const auto store = [&](auto encode) {
    using Codes = decltype(encode(pairs));
    Codes* to =
        reinterpret_cast<Codes*>(static_cast<char*>(side.pool) + uint64_t{row} * (kWidth / kChunk * sizeof(Codes))) +
        lane;
    to[0] = encode(pairs);
    to[kLanes] = encode(pairs + kChunk / 2);
  };
  if constexpr (!Traits::kIsQuantised) {
    NormaliseNans<E>(pairs);
    if (!written) return;
    store([](const uint32_t* half) { return uint4{half[0], half[1], half[2], half[3]}; });
  } else if constexpr (kKv == DType::kFloat8E4M3) {
    if (!written) return;
    const Fp8Encoder encoder(fp8_scale);
    const auto unpacked = [&](auto encode) {
      return [encode](const uint32_t* half) {
        float x[kChunk];
        UnpackChunk<E>(half, x);
        return encode(x);
      };
    };
    if (encoder.IsUsual(LargestMagnitude<E>(pairs))) {
      store(unpacked([&](const float (&x)[kChunk]) { return encoder.Chunk(x); }));
    } else {
      store(unpacked([&](const float (&x)[kChunk]) { return encoder.AnyChunk(x); }));
    }
  } else {
    const RowScale scale = PairsRowScale<E, Traits::kBits, kLanes>(pairs);
    if (!written) return;
    if (lane == 0) StoreRowScale<E>(side, row, scale);
    const RowEncoder<Traits::kBits> encoder(scale);
    store([&](const uint32_t* half) {
      float x[kChunk];
      UnpackChunk<E>(half, x);
      return encoder.Chunk(x);
    });
  }
}

// Block i takes tokens i * block_tokens and on. D and, where there are values, Dv are kWidth; RoPE turns whole rows or
// none. A lane moves its part of a (token, head) row of K, then of V, then of the next row; it asks for the next row of
// either as soon as it has taken the one before. Dynamic shared memory: the turns, then the rows.
template <class Traits, int kWidth>
__global__ void __launch_bounds__(kMaxWarps* kWarp, kMinBlocks)
    AppendKernel(const __grid_constant__ AppendParams params, int block_tokens) {
  extern __shared__ float4 s_dynamic[];
  __shared__ unsigned long long s_owner[kMaxTokens];
  __shared__ Place s_place[kMaxTokens];
  SinCos* s_turns = reinterpret_cast<SinCos*>(s_dynamic);
  constexpr int kPairs = kWidth / 2, kLanes = kRowLanes<kWidth>;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * block_tokens;
  const int64_t left = params.seqs.num_tokens - first;
  const int count = left < block_tokens ? static_cast<int>(left) : block_tokens;
  const unsigned heads = static_cast<unsigned>(params.cache.num_kv_heads);
  const unsigned rows = count * heads, step = blockDim.x / kLanes;
  const unsigned page_size = static_cast<unsigned>(params.cache.page_size);
  const bool has_value = params.value != nullptr;

  // The first rows are on their way while the block finds out where they go.
  const int pairs = params.rope.dim != 0 ? kPairs : 0;
  const FirstLoads loads(params, pairs);
  ComingRows coming(reinterpret_cast<uint4*>(s_turns + block_tokens * (params.rope.dim / 2)));
  unsigned r = threadIdx.x / kLanes;
  int64_t chunk = (first * heads + r) * (kWidth / kChunk) + threadIdx.x % kLanes;
  const unsigned chunk_step = step * (kWidth / kChunk);
  coming.Ask<kWidth>(true, params.key, chunk, r < rows);
  coming.Ask<kWidth>(false, params.value, chunk, has_value && r < rows);
  PlaceTokens(params, pairs, first, count, loads, s_owner, s_place, s_turns,
              LaneTurns<kWidth>{params.rope.interleaved});

  const unsigned step_tokens = step / heads, step_heads = step % heads;
  unsigned t = r / heads, head = r % heads;
  // All lanes of a warp stay until its first row is past the end: they exchange values.
  const unsigned row_in_warp = threadIdx.x % kWarp / kLanes;
  while (r - row_in_warp < rows) {
    const unsigned token = r < rows ? t : 0;
    const int64_t page = s_place[token].page;
    const int layer = s_place[token].layer;
    const bool written = r < rows && page != kUnmapped;
    // CacheRow in 32 bits: see Launch.
    const uint32_t row =
        (static_cast<uint32_t>(page) * heads + head) * page_size + static_cast<uint32_t>(s_place[token].slot);
    const SinCos* turns = s_turns + token * kPairs;
    r += step;
    chunk += chunk_step;
    const LaneRow key = coming.Take(true);
    coming.Ask<kWidth>(true, params.key, chunk, r < rows);
    StoreLaneRow<Traits, kWidth, true>(params, key, row, head, layer, written, turns);
    const LaneRow value = coming.Take(false);
    coming.Ask<kWidth>(false, params.value, chunk, has_value && r < rows);
    if (has_value) StoreLaneRow<Traits, kWidth, false>(params, value, row, head, layer, written, turns);
    t += step_tokens;
    head += step_heads;
    if (head >= heads) {
      head -= heads;
      ++t;
    }
  }
}

// --- rows of any length, in shared memory ----------------------------------------------------------------------------

// Elements of the longest row that a warp holds.
inline __host__ __device__ int64_t RowWidth(const AppendParams& params) {
  const int64_t value_width = params.value != nullptr ? params.cache.value_dim : 0;
  return params.cache.head_dim > value_width ? params.cache.head_dim : value_width;
}

// As AppendKernel, for any D, Dv and RoPE. Dynamic shared memory: the turns, then one float row a warp.
template <class Traits>
__global__ void __launch_bounds__(kMaxWarps* kWarp, kMinBlocks)
    AppendAnyKernel(const __grid_constant__ AppendParams params, int block_tokens) {
  extern __shared__ float4 s_dynamic[];
  __shared__ unsigned long long s_owner[kMaxAnyTokens];
  __shared__ Place s_place[kMaxAnyTokens];
  SinCos* s_turns = reinterpret_cast<SinCos*>(s_dynamic);
  const int pairs = params.rope.dim / 2;
  float* s_row = reinterpret_cast<float*>(s_turns + block_tokens * pairs) + threadIdx.x / kWarp * RowWidth(params);
  const int64_t first = static_cast<int64_t>(blockIdx.x) * block_tokens;
  const int64_t left = params.seqs.num_tokens - first;
  const int count = left < block_tokens ? static_cast<int>(left) : block_tokens;
  PlaceTokens(params, pairs, first, count, FirstLoads(params, pairs), s_owner, s_place, s_turns,
              [](int j) { return j; });

  const int heads = static_cast<int>(params.cache.num_kv_heads), side_rows = count * heads;
  const int rows = params.value != nullptr ? 2 * side_rows : side_rows;
  for (int r = threadIdx.x / kWarp; r < rows; r += blockDim.x / kWarp) {
    const bool is_key = r < side_rows;
    const int side_row = is_key ? r : r - side_rows;
    const int t = side_row / heads;
    if (s_place[t].page == kUnmapped) continue;
    MoveRow<Traits>(params, is_key, first * heads + side_row, side_row % heads, s_place[t], s_turns + t * pairs, s_row);
  }
}

}  // namespace turboattn::append

#endif  // TURBOATTN_KERNELS_APPEND_KERNEL_CUH_

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
#include "kernels/common/rope.h"

namespace turboattn::append {

// --- rows of kWidth elements, in registers ---------------------------------------------------------------------------
//
// A row takes a few lanes, of which each holds kLaneChunks chunks of 8 elements of either half of the row, so that both
// columns of a rotated pair are in one lane, whichever the pairing, and accesses have 16 bytes. Chunk i of lane l is
// chunk i * lanes + l of the half.

// Two where elements are encoded: what is done once a lane, the row's scale above all, costs as much as its elements.
template <class Traits, int kWidth>
constexpr int kLaneChunks = Traits::kIsQuantised || AP_ASYNC ? AP_M : 1;
template <int kWidth>
constexpr int kHalfChunks = kWidth / (2 * kChunk);
template <class Traits, int kWidth>
constexpr int kRowLanes = kHalfChunks<kWidth> / kLaneChunks<Traits, kWidth>;

// Where turn j lies among those of its token: of each chunk the first two, then of each chunk the next two. Two of them
// are one conflict-free 16-byte access.
template <int kWidth>
struct ChunkTurns {
  static constexpr int kChunks = kHalfChunks<kWidth>;
  bool interleaved;

  __device__ int operator()(int j) const {
    const int chunk = interleaved ? j / 4 % kChunks : j / 8;
    const int turn = interleaved ? j / (4 * kChunks) * 4 + j % 4 : j % 8;
    return (turn / 2 * kChunks + chunk) * 2 + turn % 2;
  }
};

// Chunk `chunk` of either half.
template <int kWidth, bool kInterleaved>
__device__ inline void RotateChunks(const SinCos* s_turns, int chunk, float (&x)[2][kChunk]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 two = *reinterpret_cast<const float4*>(s_turns + (i * kHalfChunks<kWidth> + chunk) * 2);
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

// A lane's part of a row. half[h][i]: chunk i of half h.
template <class Traits, int kWidth>
struct LaneRow {
  uint4 half[2][kLaneChunks<Traits, kWidth>];
};

__device__ inline uint4 LoadOnce(const uint4* from) {
#if AP_HINT
  uint4 x;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
      : "l"(from));
  return x;
#else
  return *from;
#endif
}

#if AP_ASYNC
// Where a lane's part of a row waits: its chunks in shared memory, those of all threads of a chunk beside each other.
template <class Traits, int kWidth>
struct RowSlot {
  static constexpr int kChunks = 2 * kLaneChunks<Traits, kWidth>;
  uint4* chunks;  // + blockDim.x each

  __device__ void Fetch(const void* source, int64_t chunk, bool valid) const {
    if (valid) {
      const uint4* from = static_cast<const uint4*>(source) + chunk;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const uint4* at = from + c / (kChunks / 2) * kHalfChunks<kWidth> + c % (kChunks / 2) * kRowLanes<Traits, kWidth>;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                         static_cast<uint32_t>(__cvta_generic_to_shared(chunks + c * blockDim.x))),
                     "l"(at)
                     : "memory");
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  template <int kPending>
  __device__ LaneRow<Traits, kWidth> Take() const {
    asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
    LaneRow<Traits, kWidth> row;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) row.half[c / (kChunks / 2)][c % (kChunks / 2)] = chunks[c * blockDim.x];
    return row;
  }
};
#endif

// chunk: the index of the lane's first chunk.
template <class Traits, int kWidth>
__device__ inline LaneRow<Traits, kWidth> LoadLaneRow(const void* source, int64_t chunk) {
  const uint4* chunks = static_cast<const uint4*>(source) + chunk;
  LaneRow<Traits, kWidth> row;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int i = 0; i < kLaneChunks<Traits, kWidth>; ++i) {
      row.half[h][i] = LoadOnce(&chunks[h * kHalfChunks<kWidth> + i * kRowLanes<Traits, kWidth>]);
    }
  }
  return row;
}

template <class E>
__device__ inline void UnpackChunk(const uint32_t* pairs, float (&x)[kChunk]) {
#pragma unroll
  for (int i = 0; i < kChunk / 2; ++i) {
    x[2 * i] = Low<E>(pairs[i]);
    x[2 * i + 1] = High<E>(pairs[i]);
  }
}

template <class T>
__device__ inline void StoreOnce(T* to, T x) {
#if AP_HINT
  __stcs(to, x);
#else
  *to = x;
#endif
}

// Row `row` of the pool, kv head `head`. Run by whole warps; rows that are not `written` only take part in the exchange
// of values. turns: of the row's token.
template <class Traits, int kWidth, bool kIsKey>
__device__ inline void StoreLaneRow(const AppendParams& params, const LaneRow<Traits, kWidth>& loaded, uint32_t row,
                                    int head, int layer, bool written, const SinCos* turns) {
  using E = typename Traits::E;
  constexpr DType kKv = Traits::kKvDType;
  constexpr int kLanes = kRowLanes<Traits, kWidth>, kChunks = kLaneChunks<Traits, kWidth>, kPairs = kChunk / 2;
  Side side = SideOf(params, kIsKey);
  side.width = kWidth;  // it is; so the compiler knows
  const int lane = threadIdx.x % kLanes;
  [[maybe_unused]] float fp8_scale = 0.f;
  if constexpr (kKv == DType::kFloat8E4M3) {
    if (written) fp8_scale = static_cast<const float*>(side.params)[layer * params.cache.num_kv_heads + head];
  }

  uint32_t pairs[2 * kChunks * kPairs];  // of the chunks of the first half, then of the second
#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const uint4 chunk = loaded.half[h][i];
      uint32_t* to = &pairs[(h * kChunks + i) * kPairs];
      to[0] = chunk.x, to[1] = chunk.y, to[2] = chunk.z, to[3] = chunk.w;
    }
  }
  const bool rotated = kIsKey && params.rope.dim != 0;
  if (rotated || side.bias != nullptr) {
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      float x[2][kChunk];
      const int chunk = i * kLanes + lane;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        UnpackChunk<E>(&pairs[(h * kChunks + i) * kPairs], x[h]);
        AddBias<E>(side, params.bias_dtype, int64_t{head} * kWidth + h * (kWidth / 2) + chunk * kChunk, x[h]);
      }
      if (rotated) {
        params.rope.interleaved ? RotateChunks<kWidth, true>(turns, chunk, x)
                                : RotateChunks<kWidth, false>(turns, chunk, x);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int k = 0; k < kPairs; ++k) {
          pairs[(h * kChunks + i) * kPairs + k] = RoundPair<E>(x[h][2 * k], x[h][2 * k + 1]);
        }
      }
    }
  }

  // The lane's part of a chunk is stored at the same index as it was loaded.
  const auto store = [&](auto encode) {
    using Code = decltype(encode(pairs));
    Code* codes = reinterpret_cast<Code*>(static_cast<char*>(side.pool) +
                                          uint64_t{row} * (2 * kHalfChunks<kWidth> * sizeof(Code))) + lane;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        StoreOnce(&codes[h * kHalfChunks<kWidth> + i * kLanes], encode(&pairs[(h * kChunks + i) * kPairs]));
      }
    }
  };
  if constexpr (!Traits::kIsQuantised) {
    NormaliseNans<E>(pairs);
    if (!written) return;
    store([](const uint32_t* p) { return uint4{p[0], p[1], p[2], p[3]}; });
  } else if constexpr (kKv == DType::kFloat8E4M3) {
    if (!written) return;
    const float largest = LargestMagnitude<E>(pairs);
    const Fp8Encoder encoder(fp8_scale);
    store([&](const uint32_t* p) {
      float x[kChunk];
      UnpackChunk<E>(p, x);
      return encoder.Chunk(x, largest);
    });
  } else {
    const RowScale scale = PairsRowScale<E, Traits::kBits, kLanes>(pairs);
    if (!written) return;
    if (lane == 0) StoreRowScale<E>(side, row, scale);
    const RowEncoder<Traits::kBits> encoder(scale);
    store([&](const uint32_t* p) {
      float x[kChunk];
      UnpackChunk<E>(p, x);
      return encoder.Chunk(x);
    });
  }
}

// Block i takes tokens i * block_tokens and on. D and, where there are values, Dv are kWidth; RoPE turns whole rows or
// none. A lane moves its part of a (token, head) row of K, then of V, then of the next row; it asks for the next row of
// either as soon as the one before has been stored. Dynamic shared memory: the turns.
template <class Traits, int kWidth>
__global__ void __launch_bounds__(kMaxWarps* kWarp, kMinBlocks)
    AppendKernel(const __grid_constant__ AppendParams params, int block_tokens) {
  extern __shared__ float4 s_dynamic[];
  __shared__ unsigned long long s_owner[kMaxTokens];
  __shared__ Place s_place[kMaxTokens];
  SinCos* s_turns = reinterpret_cast<SinCos*>(s_dynamic);
  constexpr int kPairs = kWidth / 2, kLanes = kRowLanes<Traits, kWidth>;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * block_tokens;
  const int64_t left = params.seqs.num_tokens - first;
  const int count = left < block_tokens ? static_cast<int>(left) : block_tokens;
  const unsigned heads = static_cast<unsigned>(params.cache.num_kv_heads);
  const unsigned rows = count * heads, step = blockDim.x / kLanes;
  const unsigned page_size = static_cast<unsigned>(params.cache.page_size);
  const bool has_value = params.value != nullptr;

  // The first rows are on their way while the block finds out where they go.
  unsigned r = threadIdx.x / kLanes;
  int64_t chunk = (first * heads + r) * (kWidth / kChunk) + threadIdx.x % kLanes;
#if AP_ASYNC
  const int turn_chunks = block_tokens * (params.rope.dim / 2) / 2;
  const RowSlot<Traits, kWidth> key_slot{reinterpret_cast<uint4*>(s_dynamic) + turn_chunks + threadIdx.x};
  const RowSlot<Traits, kWidth> value_slot{key_slot.chunks + RowSlot<Traits, kWidth>::kChunks * blockDim.x};
  key_slot.Fetch(params.key, chunk, r < rows);
  value_slot.Fetch(params.value, chunk, has_value && r < rows);
#else
  LaneRow<Traits, kWidth> key{}, value{};
  if (r < rows) {
    key = LoadLaneRow<Traits, kWidth>(params.key, chunk);
    if (has_value) value = LoadLaneRow<Traits, kWidth>(params.value, chunk);
  }
#endif
  PlaceTokens(params, params.rope.dim != 0 ? kPairs : 0, first, count, s_owner, s_place, s_turns,
              ChunkTurns<kWidth>{params.rope.interleaved});

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
    const uint32_t row = (static_cast<uint32_t>(page) * heads + head) * page_size +
                         static_cast<uint32_t>(s_place[token].slot);
    const SinCos* turns = s_turns + token * kPairs;
    r += step;
    chunk += step * (kWidth / kChunk);
#if AP_ASYNC
    const auto key = key_slot.template Take<1>();
    key_slot.Fetch(params.key, chunk, r < rows);
    StoreLaneRow<Traits, kWidth, true>(params, key, row, head, layer, written, turns);
    const auto value = value_slot.template Take<1>();
    value_slot.Fetch(params.value, chunk, has_value && r < rows);
    if (has_value) StoreLaneRow<Traits, kWidth, false>(params, value, row, head, layer, written, turns);
#else
    StoreLaneRow<Traits, kWidth, true>(params, key, row, head, layer, written, turns);
    if (r < rows) key = LoadLaneRow<Traits, kWidth>(params.key, chunk);
    if (has_value) {
      StoreLaneRow<Traits, kWidth, false>(params, value, row, head, layer, written, turns);
      if (r < rows) value = LoadLaneRow<Traits, kWidth>(params.value, chunk);
    }
#endif
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
__global__ void __launch_bounds__(kMaxWarps* kWarp)
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
  PlaceTokens(params, pairs, first, count, s_owner, s_place, s_turns, [](int j) { return j; });

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

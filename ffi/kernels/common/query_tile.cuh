// Loads a tile of query rows into shared memory, after the fused step's prologue where there is one.
#ifndef TURBOATTN_KERNELS_COMMON_QUERY_TILE_CUH_
#define TURBOATTN_KERNELS_COMMON_QUERY_TILE_CUH_

#include <cstdint>

#include "core/params.h"
#include "kernels/common/chunk.cuh"
#include "kernels/common/ptx.cuh"
#include "kernels/common/rope.h"
#include "kernels/common/score.cuh"

namespace turboattn {

// log(p + 1) / log(m) for tokens past the trained length m, else 1.
__device__ inline float LognFactor(const QueryPrologue& prologue, int64_t token, int64_t sequence_position) {
  if (prologue.logn == 0) return 1.f;
  const RopeParams& rope = prologue.rope;
  const int64_t position = rope.positions != nullptr ? rope.positions[token * rope.position_axes] : sequence_position;
  const int64_t reached = prologue.logn_zero_based ? position : position + 1;
  if (reached <= prologue.logn) return 1.f;
  return static_cast<float>(log(static_cast<double>(reached)) / log(static_cast<double>(prologue.logn)));
}

__device__ inline const QueryPrologue* PrologueOf(const PagedAttentionParams& params) {
  const QueryPrologue& prologue = params.prologue;
  return prologue.bias != nullptr || prologue.rope.dim != 0 || prologue.logn != 0 ? &prologue : nullptr;
}
__device__ inline const QueryPrologue* PrologueOf(const LinearAttentionParams&) { return nullptr; }

// Bias, RoPE and logn on rows begin .. end - 1 of a tile in shared memory, in float32 with one rounding at the end.
// element(r, d): where column d of row r is; turn(r, j): the SinCos of pair j of row r. By kThreads threads, of which
// this is number `thread`. A thread has pairs of rotated columns, and columns that are not rotated, of consecutive
// rows: the heads of a token share its angle. What a thread reads and writes is its own.
template <class E, int kDim, int kThreads, int kRows, class Element, class Turn>
__device__ void ApplyPrologue(const QueryPrologue& prologue, const TileRows<kRows>& tile, int begin, int end,
                              int thread, Element element, Turn turn) {
  constexpr int kLanes = kDim % 128 == 0 ? 64 : 32, kParts = kThreads / kLanes;  // of the columns and of the rows
  static_assert(kThreads % kLanes == 0);
  const RopeParams& rope = prologue.rope;
  const int pairs = rope.dim / 2, columns = pairs + kDim - rope.dim;
  const auto load = [&](int r, int d) {
    const float x = ToFloat(element(r, d));
    if (prologue.bias == nullptr) return x;
    const int64_t i = static_cast<int64_t>(tile.head[r]) * kDim + d;
    return AddRn(x, prologue.bias_dtype == DType::kFloat32 ? static_cast<const float*>(prologue.bias)[i]
                                                           : ToFloat(static_cast<const E*>(prologue.bias)[i]));
  };
  const int each = (end - begin + kParts - 1) / kParts, first = begin + thread / kLanes * each;
  const int last = first + each < end ? first + each : end;
#pragma unroll 1
  for (int column = thread % kLanes; column < columns; column += kLanes) {
    int64_t turned = -1;
    SinCos angle = {1.f, 0.f};
    float logn = 1.f;
#pragma unroll 1
    for (int r = first; r < last; ++r) {
      if (tile.token[r] != turned) {
        turned = tile.token[r];
        if (column < pairs) angle = turn(r, column);
        logn = LognFactor(prologue, turned, tile.position[r]);
      }
      if (column < pairs) {
        const int d0 = static_cast<int>(RopeFirst(rope, column)), d1 = static_cast<int>(RopeSecond(rope, column));
        float x0 = load(r, d0), x1 = load(r, d1);
        RopeRotate(angle, &x0, &x1);
        element(r, d0) = FromFloat<E>(logn == 1.f ? x0 : MulRn(x0, logn));
        element(r, d1) = FromFloat<E>(logn == 1.f ? x1 : MulRn(x1, logn));
      } else {
        const int d = column - pairs < rope.offset ? column - pairs : column - pairs + rope.dim;
        const float x = load(r, d);
        element(r, d) = FromFloat<E>(logn == 1.f ? x : MulRn(x, logn));
      }
    }
  }
}

// The same for rows of sequence b.
template <class E, int kDim, int kThreads, int kRows, class Element>
__device__ void ApplyPrologue(const QueryPrologue& prologue, int64_t b, const TileRows<kRows>& tile, int begin, int end,
                              int thread, Element element) {
  ApplyPrologue<E, kDim, kThreads>(prologue, tile, begin, end, thread, element, [&](int r, int j) {
    return RopeSinCos(prologue.rope, b, j, tile.token[r], tile.position[r]);
  });
}

// Starts the copies of a tile's query rows to s_query, [kRows][kDim] E with swizzled chunks: rows [first_row, first_row
// + rows) of kv head `head` of a sequence whose tokens start at first_token; those past `rows` become zeros. Before
// anything is known in shared memory, since the copies take long. By the whole block of kThreads threads.
template <class E, int kRows, int kDim, int kThreads, class Params>
__device__ __forceinline__ void CopyQueryTile(const Params& params, int64_t first_token, int64_t head,
                                              int64_t first_row, int rows, E* s_query) {
  constexpr int kChunks = kDim / kChunk, kPassRows = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && kRows % kPassRows == 0);
  const int group = GroupOf(params), r0 = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
  const int64_t token = Divide(first_row + r0, group), heads = params.num_heads;
  int member = static_cast<int>(first_row + r0 - token * group);      // of the group
  const int tokens = kPassRows / group, members = kPassRows % group;  // of a pass
  const int64_t step = (tokens * heads + members) * kDim, next_token = (heads - group) * kDim;
  const E* from = static_cast<const E*>(params.query) + ((first_token + token) * heads + head * group + member) * kDim +
                  chunk * kChunk;
  const uint32_t to = SharedAddress(s_query);
#pragma unroll
  for (int pass = 0; pass < kRows / kPassRows; ++pass) {
    const int r = pass * kPassRows + r0;
    CopyAsync16(to + SwizzledChunk<kChunks>(r, chunk) * 16, r < rows ? from : params.query, r < rows);
    from += step;
    member += members;
    if (member >= group) {
      member -= group;
      from += next_token;
    }
  }
}

// The fused step's prologue on a tile that has been copied, and seen by all; ends with __syncthreads() where there is
// one.
template <class E, int kRows, int kDim, int kThreads, class Params>
__device__ void TurnQueryTile(const Params& params, int64_t b, const TileRows<kRows>& tile, int rows, E* s_query) {
  if (const QueryPrologue* prologue = PrologueOf(params)) {
    const auto element = [&](int r, int d) -> E& {
      return s_query[SwizzledChunk<kDim / kChunk>(r, d / kChunk) * kChunk + d % kChunk];
    };
    ApplyPrologue<E, kDim, kThreads>(*prologue, b, tile, 0, rows, threadIdx.x, element);
    __syncthreads();
  }
}

}  // namespace turboattn

#endif  // TURBOATTN_KERNELS_COMMON_QUERY_TILE_CUH_

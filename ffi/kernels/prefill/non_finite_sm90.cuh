// Values of Inf and NaN on Hopper. Times a probability of 0 they would reach rows that do not see their key. So they
// are taken out of the tiles of V before consumers have these, wherever a row may not see all of a block, and are added
// to the rows that see them in memory, after these have been stored. Rare and slow. Consumers have no code for it in
// their loop, where it cost 5 % of their cycles though it never ran.
#ifndef TURBOATTN_KERNELS_PREFILL_NON_FINITE_SM90_CUH_
#define TURBOATTN_KERNELS_PREFILL_NON_FINITE_SM90_CUH_

#include "kernels/common/codec.cuh"
#include "kernels/prefill/split.cuh"
#include "kernels/prefill/tile_sm90.cuh"

namespace turboattn::prefill {

// Two E, 0 in the place of those that are not finite.
template <class E>
__device__ __forceinline__ uint32_t FiniteOrZero(uint32_t pair) {
  constexpr uint32_t kExponents = std::is_same_v<E, bf16> ? 0x7f807f80u : 0x7c007c00u;
  constexpr uint32_t kOnes = kExponents & ~(kExponents << 1);  // the exponents' lowest bits
  const uint32_t odd = ((pair & kExponents) + kOnes) & 0x80008000u;
  return pair & ~((odd >> 15) * 0xffffu);
}
template <class E>
__device__ __forceinline__ uint4 FiniteOrZero(uint4 x) {
  return {FiniteOrZero<E>(x.x), FiniteOrZero<E>(x.y), FiniteOrZero<E>(x.z), FiniteOrZero<E>(x.w)};
}

// From a tile of V, by a warp. Whether some were of keys that some row of the tile sees.
template <class E, class Tile, int kElements>
__device__ __forceinline__ bool TakeOutNonFinite(E* tile, RunRange seen, int first_key) {
  uint4* const chunks = reinterpret_cast<uint4*>(tile);
  constexpr int kChunks = kElements / kChunk;
  const int lane = threadIdx.x % kWarp;
  uint32_t sums[4] = {0, 0, 0, 0};  // of 0 times each
#pragma unroll 8
  for (int i = lane; i < kChunks; i += kWarp) {
    const uint4 x = chunks[i];
    sums[0] = FmaPair<E>(x.x, 0, sums[0]);
    sums[1] = FmaPair<E>(x.y, 0, sums[1]);
    sums[2] = FmaPair<E>(x.z, 0, sums[2]);
    sums[3] = FmaPair<E>(x.w, 0, sums[3]);
  }
  if (__all_sync(~0u, ((sums[0] | sums[1] | sums[2] | sums[3]) & 0x7fff7fffu) == 0)) return false;
  bool found = false;
#pragma unroll 1
  for (int i = lane; i < kChunks; i += kWarp) {
    const uint4 x = chunks[i];
    if (!HasNonFinite<E>(x)) continue;
    found = found || seen.Holds(first_key + Tile::Key(i));
    chunks[i] = FiniteOrZero<E>(x);
  }
  FenceAsyncProxy();
  return __any_sync(~0u, found);
}

// To rows first_row .. first_row + 15 of the tile, by the warp that has stored them. Inline: after a call, ptxas no
// longer knows that warps are together, and the mainloop pays for that with a fifth of its speed.
template <class Traits, class Params>
__device__ __forceinline__ void AddNonFinite(const Params& params, const TileSm90<Traits>& tile, int first_row) {
  using E = typename Traits::E;
  using Codes = Codec<E, Traits::kKvDType>;
  constexpr int kDim = Traits::kValueDim, kKeys = Traits::kKeys;
  constexpr int kRowBytes = Traits::kQuantised ? Traits::kStoredBytes : 2 * kDim, kPerWord = 4 * kDim / kRowBytes;
  float* const part = tile.part == kWholeTile ? nullptr : SplitWorkspace<Traits::kRows, kDim>(params).Part(tile.part);
  const auto add = [&](int row, int column, float x) {
    if (part != nullptr) {
      part[row * kDim + column] += x;
      return;
    }
    const int64_t i = (tile.rows.token[row] * params.num_heads + tile.rows.head[row]) * kDim + column;
    if (params.out_dtype == DType::kFloat32) {
      static_cast<float*>(params.out)[i] += x;
    } else {
      E& out = static_cast<E*>(params.out)[i];
      out = FromFloat<E>(ToFloat(out) + x);
    }
  };
  __syncwarp();  // all of it have stored
#pragma unroll 1
  for (int block = tile.begin; block < tile.end; ++block) {
    const KeyBlockView view = ViewBlock(params, tile, block, ~0u);
    // Nothing was taken from blocks that all rows see whole.
    const bool whole = tile.all_mapped && view.key_segments == nullptr &&
                       tile.blocks.common[view.run_index].HoldsAll(view.first_key, kKeys);
    if (whole) continue;
#pragma unroll 1
    for (int key = 0; key < kKeys; ++key) {
      const int j = view.first_key + key;
      if (!tile.blocks.seen[view.run_index].Holds(j)) continue;
      int64_t row;
      if constexpr (std::is_same_v<Params, PagedAttentionParams>) {
        const PagedKeys keys = KeysOf(params, tile.b, tile.head, view.run_index);
        const int group = keys.Group(j, keys.Entry(j));
        if (group == kNoGroup) continue;
        row = static_cast<int64_t>(group) * 8 + j % 8;
      } else {
        row = FirstKeyRow(params, tile.b, tile.head) + static_cast<int64_t>(j) * params.num_kv_heads;
      }
      typename Codes::Scale scale = {};
      if constexpr (kHasRowParams<Traits::kKvDType>) {
        scale = UnpackRowScale<E>(static_cast<const uint32_t*>(params.cache.value_params)[row]);
      } else if constexpr (Traits::kQuantised) {
        scale = Codes::MakeScale(HeadScale(params, params.cache.value_params, tile.b, tile.head));
      }
#pragma unroll 1
      for (int base = 0; base < kRowBytes / 4; base += kWarp) {
        const int w = base + threadIdx.x % kWarp;
        uint32_t pairs[kPerWord / 2] = {};
        bool odd = false;
        if (w < kRowBytes / 4) {
          const uint32_t word =
              reinterpret_cast<const uint32_t*>(static_cast<const char*>(ValueArray(params)) + row * kRowBytes)[w];
          if constexpr (Traits::kQuantised) {
            Codes::Neighbours(word, scale, pairs);
          } else {
            pairs[0] = word;
          }
          for (const uint32_t pair : pairs) odd = odd || FiniteOrZero<E>(pair) != pair;
        }
        if (!__any_sync(~0u, odd)) continue;
#pragma unroll 1
        for (int r = first_row; r < min(first_row + 16, tile.num_rows); ++r) {
          if (!odd || !Sees(tile.rows, r, view, key)) continue;
#pragma unroll
          for (int e = 0; e < kPerWord; ++e) {
            E x;
            x.bits = static_cast<uint16_t>(pairs[e / 2] >> (16 * (e % 2)));
            if (!IsFinite(ToFloat(x))) add(r, w * kPerWord + e, ToFloat(x));
          }
        }
      }
    }
  }
}

}  // namespace turboattn::prefill

#endif  // TURBOATTN_KERNELS_PREFILL_NON_FINITE_SM90_CUH_

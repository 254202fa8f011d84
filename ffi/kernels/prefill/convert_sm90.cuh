// Quantised caches on Hopper: a warpgroup that makes tiles of E of the codes that tensor copies bring. Between the
// producers and the consumers of mainloop_sm90.cuh, in the order in which consumers take tiles.
#ifndef TURBOATTN_KERNELS_PREFILL_CONVERT_SM90_CUH_
#define TURBOATTN_KERNELS_PREFILL_CONVERT_SM90_CUH_

#include "kernels/common/fp8.cuh"
#include "kernels/common/int4.cuh"
#include "kernels/common/int8.cuh"
#include "kernels/prefill/mainloop_sm90.cuh"

namespace turboattn::prefill {

template <class Traits, class Params>
struct ConverterSm90 {
  using E = typename Traits::E;
  using Codes = Codec<E, Traits::kKvDType>;
  using Scale = typename Codes::Scale;
  static constexpr bool kRowParams = kHasRowParams<Traits::kKvDType>;
  static constexpr int kKeys = Traits::kKeys, kStages = Traits::kStages;
  static constexpr int kStoredChunks = Traits::kStoredBytes / 16;
  // A thread a row: it reads the row's parameters once, and the chunks that a quarter of a warp reads or writes
  // together, of eight rows, are in different banks.
  static_assert(kKeys == kWarpgroup);

  const Params& params;
  SharedSm90<Traits>& shared;
  const int row = threadIdx.x % kWarpgroup;
  RingSlot<Traits::kCodeStages> code_slot{0};
  RingSlot<kStages> key_slot{1}, value_slot{1};

  __device__ ConverterSm90(const Params& params, SharedSm90<Traits>& shared) : params(params), shared(shared) {}

  // A tile's blocks, from the last to the first.
  __device__ void Run(TileSm90<Traits>& tile) {
    Scale key_scale = {}, value_scale = {};  // fp8: of the head
    if constexpr (!kRowParams) {
      key_scale = Codes::MakeScale(HeadScale(params, params.cache.key_params, tile.b, tile.head));
      value_scale = Codes::MakeScale(HeadScale(params, params.cache.value_params, tile.b, tile.head));
    }
    const int count = 2 * (tile.end - tile.begin);
    int key_block = tile.end, value_block = tile.end;  // the last that was taken
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const bool values = HoldsValues(i, count);
      const RingSlot<kStages> slot = values ? value_slot : key_slot;
      WaitBarrier(&shared.codes.full[code_slot.index], code_slot.parity, kCodesFull);
      uint4 codes[kStoredChunks];
#pragma unroll
      for (int chunk = 0; chunk < kStoredChunks; ++chunk) {
        codes[chunk] = reinterpret_cast<const uint4*>(
            shared.codes.tile[code_slot.index])[SwizzledChunk<kStoredChunks>(row, chunk)];
      }
      const uint32_t mapped = shared.codes.mapped[code_slot.index];
      const int block = values ? --value_block : --key_block;
      const bool seen = tile.blocks.seen[tile.blocks.RunOf(block)].Holds(tile.blocks.FirstKey(block) + row);
      Scale scale = values ? value_scale : key_scale;
      if constexpr (kRowParams) {
        // Codes of unmapped pages are zeros, and so are to be the rows. What lies where no key is must not count: the
        // two ways of decoding round differently.
        const bool exists = (mapped >> (row / 8) & 1u) != 0 && seen;
        scale = UnpackRowScale<E>(exists ? shared.codes.row_params[code_slot.index][row] : 0u);
      }
      const bool saturates = __any_sync(~0u, Codes::MaySaturate(scale));
      bool odd = saturates;
      if constexpr (!kRowParams) {
#pragma unroll
        for (int chunk = 0; chunk < kStoredChunks; ++chunk) odd = odd || HasNonFinite<fp8_e4m3>(codes[chunk]);
        odd = __any_sync(~0u, odd);
      }
      WaitBarrier(values ? &shared.value_empty[slot.index] : &shared.key_empty[slot.index], slot.parity,
                  values ? kValueEmpty : kKeyEmpty);
      if (!values && row == 0) shared.mapped[slot.index] = mapped;
      E* const to = values ? shared.value[slot.index] : shared.key[slot.index];
      if (saturates) {
        ConvertRow<true>(codes, scale, to);
      } else {
        ConvertRow<false>(codes, scale, to);
      }
      if (values && odd) TakeOutNonFinite(to, seen, &tile.non_finite);
      FenceAsyncProxy();
      __syncwarp();
      if (threadIdx.x % kWarp == 0) {
        Arrive(values ? &shared.value_full[slot.index] : &shared.key_full[slot.index]);
        // Not before the codes have been used: an arrival does not wait for loads, and a copy overtook them.
        Arrive(&shared.codes.empty[code_slot.index]);
      }
      code_slot.Advance();
      if (values) {
        value_slot.Advance();
      } else {
        key_slot.Advance();
      }
    }
  }

 private:
  // From this thread's row; see non_finite_sm90.cuh.
  __device__ __forceinline__ void TakeOutNonFinite(E* tile, bool seen, int* non_finite) const {
    bool found = false;
#pragma unroll 1
    for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
      uint4& x = *reinterpret_cast<uint4*>(tile + PanelIndex<kKeys>(row, chunk * kChunk));
      found = found || HasNonFinite<E>(x);
      x = FiniteOrZero<E>(x);
    }
    if (found && seen) atomicOr(non_finite, 1);
  }

  template <bool kSaturates>
  __device__ __forceinline__ void ConvertRow(const uint4 (&codes)[kStoredChunks], Scale scale, E* tile) const {
    constexpr int kPairs = Codes::kPerWord / 2;
#pragma unroll
    for (int chunk = 0; chunk < kStoredChunks; ++chunk) {
      const uint32_t words[4] = {codes[chunk].x, codes[chunk].y, codes[chunk].z, codes[chunk].w};
      uint32_t pairs[4][kPairs];
#pragma unroll
      for (int w = 0; w < 4; ++w) Codes::template Neighbours<kSaturates>(words[w], scale, pairs[w]);
      const auto pair = [&](int i) { return pairs[i / kPairs][i % kPairs]; };
#pragma unroll
      for (int k = 0; k < kPairs; ++k) {
        *reinterpret_cast<uint4*>(tile + PanelIndex<kKeys>(row, (kPairs * chunk + k) * kChunk)) = {
            pair(4 * k), pair(4 * k + 1), pair(4 * k + 2), pair(4 * k + 3)};
      }
    }
  }
};

}  // namespace turboattn::prefill

#endif  // TURBOATTN_KERNELS_PREFILL_CONVERT_SM90_CUH_

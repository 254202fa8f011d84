// Quantised caches on Hopper: a warpgroup that makes tiles of E of the codes that tensor copies bring. Between the
// producers and the consumers of mainloop_sm90.cuh, in the order in which consumers take tiles.
#ifndef TURBOATTN_KERNELS_PREFILL_CONVERT_SM90_CUH_
#define TURBOATTN_KERNELS_PREFILL_CONVERT_SM90_CUH_

#include <cstddef>

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
  const uint32_t base = Opaque(SharedAddress(&shared));
  const int row = static_cast<int>(Opaque(threadIdx.x % kWarpgroup));
  // Of this thread's row, chunk 0. Chunks lie where their number is xored with some bits of the row's.
  const uint32_t codes_at = Opaque(base + offsetof(SharedSm90<Traits>, codes.tile) + 16 * SwizzledChunk<kStoredChunks>(row, 0));
  const uint32_t tile_at = Opaque(base + offsetof(SharedSm90<Traits>, key) + 2 * PanelIndex<kKeys>(row, 0));
  static constexpr uint32_t kToValues = offsetof(SharedSm90<Traits>, value) - offsetof(SharedSm90<Traits>, key);
  RingSlot<Traits::kConverters * Traits::kCodeStages> code_slot{0};
  const bool own_values;
  RingSlot<kStages> key_slot{1}, value_slot{1};

  __device__ ConverterSm90(const Params& params, SharedSm90<Traits>& shared, int number)
      : params(params), shared(shared), own_values(number == 1) {
    code_slot.index = number;
  }

  // A tile's blocks, from the last to the first.
  __device__ void Run(TileSm90<Traits>& tile) {
    Scale key_scale = {}, value_scale = {};  // fp8: of the head
    if constexpr (!kRowParams) {
      key_scale = Codes::MakeScale(HeadScale(params, params.cache.key_params, tile.b, tile.head));
      value_scale = Codes::MakeScale(HeadScale(params, params.cache.value_params, tile.b, tile.head));
    }
#if I8_TWO
    int block = tile.end, run_begin = tile.end, key = 0;
    RunRange seen_keys = {0, 0};
#pragma unroll 1
    while (--block >= tile.begin) {
      key -= kKeys;
      if (block < run_begin) {
        const int run = tile.blocks.RunOf(block);
        run_begin = run == 0 ? 0 : tile.blocks.count[0];
        key = tile.blocks.FirstKey(block) + row;
        seen_keys = tile.blocks.seen[run];
      }
      Convert(own_values, seen_keys.Holds(key), own_values ? value_scale : key_scale, &tile.non_finite);
    }
#else
    const int count = 2 * (tile.end - tile.begin);
    int block = tile.end, run_begin = tile.end, key = 0;
    RunRange seen_keys = {0, 0};
    bool key_seen = false, value_seen = false;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const bool values = HoldsValues(i, count);
      if (!values) {
        --block;
        key -= kKeys;
        if (block < run_begin) {
          const int run = tile.blocks.RunOf(block);
          run_begin = run == 0 ? 0 : tile.blocks.count[0];
          key = tile.blocks.FirstKey(block) + row;
          seen_keys = tile.blocks.seen[run];
        }
        value_seen = key_seen;
        key_seen = seen_keys.Holds(key);
      }
      const bool seen = values ? value_seen : key_seen;
      Convert(values, seen, values ? value_scale : key_scale, &tile.non_finite);
      if (values) value_seen = key_seen;
    }
#endif
  }

 private:
  __device__ __forceinline__ void Convert(bool values, bool seen, Scale scale, int* non_finite) {
    const RingSlot<kStages> slot = I8_TWO ? key_slot : values ? value_slot : key_slot;
    const int place = code_slot.index >= Traits::kCodeStages ? code_slot.index - Traits::kCodeStages : code_slot.index;
    WaitBarrier(&shared.codes.full[code_slot.index], code_slot.parity, kCodesFull);
    const uint32_t from = codes_at + place * (kKeys * Traits::kStoredBytes);
    uint4 codes[kAhead];
#pragma unroll
    for (int chunk = 0; chunk < kAhead; ++chunk) codes[chunk] = LoadShared16(from ^ chunk * 16);
    const uint32_t mapped = shared.codes.mapped[place];
    if constexpr (kRowParams) {
      // Codes of unmapped pages are zeros, and so are to be the rows. What lies where no key is must not count: the
      // two ways of decoding round differently.
      const bool exists = (mapped >> (row / 8) & 1u) != 0 && seen;
      scale = UnpackRowScale<E>(exists ? shared.codes.row_params[place][row] : 0u);
    }
    const bool saturates = __any_sync(~0u, Codes::MaySaturate(scale));
    WaitBarrier(values ? &shared.value_empty[slot.index] : &shared.key_empty[slot.index], slot.parity,
                values ? kValueEmpty : kKeyEmpty);
    if (!values && row == 0) shared.mapped[slot.index] = mapped;
    const uint32_t to = tile_at + (values ? kToValues : 0) + slot.index * (kKeys * Traits::kDim * 2);
    bool odd = saturates;
    if (I8_ABL == 2) {
      if (codes[0].x == 0x12345678) StoreShared16(to, codes[0]);
    } else if (saturates) {
      odd = ConvertRow<true>(codes, from, to, scale) || odd;
    } else {
      odd = ConvertRow<false>(codes, from, to, scale) || odd;
    }
    if (values && __any_sync(~0u, odd)) TakeOutNonFinite(shared.value[slot.index], seen, non_finite);
    if (I8_ABL != 3) FenceAsyncProxy();
    __syncwarp();
    if (threadIdx.x % kWarp == 0) {
      Arrive(values ? &shared.value_full[slot.index] : &shared.key_full[slot.index]);
      // Not before the codes have been used: an arrival does not wait for loads, and a copy overtook them.
      Arrive(&shared.codes.empty[code_slot.index]);
    }
    code_slot.Advance();
    if (I8_TWO) code_slot.Advance();
    if (values && !I8_TWO) {
      value_slot.Advance();
    } else {
      key_slot.Advance();
    }
  }

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

  static constexpr int kAhead = I8_AHEAD < kStoredChunks ? I8_AHEAD : kStoredChunks;  // chunks that are read before they are needed

  // Whether a code was NaN (fp8).
  template <bool kSaturates>
  __device__ __forceinline__ bool ConvertRow(uint4 (&codes)[kAhead], uint32_t from, uint32_t to, Scale scale) const {
    constexpr int kPairs = Codes::kPerWord / 2;
    bool odd = false;
    constexpr int kUnroll = I8_UNROLL ? I8_UNROLL : kStoredChunks / kAhead;
#pragma unroll kUnroll
    for (int base_chunk = 0; base_chunk < kStoredChunks; base_chunk += kAhead) {
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        const uint4 x = codes[k];
        const int chunk = base_chunk + k;
        if (base_chunk + kAhead < kStoredChunks) codes[k] = LoadShared16(from ^ (chunk + kAhead) * 16);
        if constexpr (!kRowParams) odd |= HasNonFinite<fp8_e4m3>(x);
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
        uint32_t pairs[4][kPairs];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          if constexpr (I8_ABL == 1) {
            for (int j = 0; j < kPairs; ++j) pairs[w][j] = words[w] & 0x3fff3fffu;
          } else {
            Codes::template Neighbours<kSaturates>(words[w], scale, pairs[w]);
          }
        }
        const auto pair = [&](int i) { return pairs[i / kPairs][i % kPairs]; };
        const uint32_t first = (to ^ kPairs * chunk % 8 * 16) + kPairs * chunk / 8 * (kKeys * 128);
#pragma unroll
        for (int j = 0; j < kPairs; ++j) {
          StoreShared16(first ^ j * 16, {pair(4 * j), pair(4 * j + 1), pair(4 * j + 2), pair(4 * j + 3)});
        }
      }
    }
    return odd;
  }
};

}  // namespace turboattn::prefill

#endif  // TURBOATTN_KERNELS_PREFILL_CONVERT_SM90_CUH_

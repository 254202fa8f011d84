// Quantised caches on Hopper: a warpgroup that makes tiles of E of the codes that tensor copies bring. Between the
// producers and the consumers of mainloop_sm90.cuh, in the order in which consumers take tiles.
//
// Consumers wait for it: they free V of a block half a block's time before they need the next there. Its instructions
// are to be few and not to wait for each other. int8, 4 x 1024 queries on 8192 keys, on an H200: 1,222 us; 1,331 with
// codes decoded in float32; 1,121 without decoding and 1,032 without reads and writes either, as bf16 (1,008). Two such
// warpgroups, for K and for V, were no faster (1,262 against 1,238). Elements 2^12 times smaller, for one fma a pair
// instead of two: 1,040 for 1,105, int4 1,038 for 1,070.
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
  using Shared = SharedSm90<Traits>;
  using Codes = Codec<E, Traits::kKvDType>;
  using Scale = typename Codes::Scale;
  static constexpr bool kRowParams = kHasRowParams<Traits::kKvDType>;
  static constexpr float kShrink = Codes::kShrink;
  static constexpr int kKeys = Traits::kKeys, kStages = Traits::kStages;
  static constexpr int kStoredChunks = Traits::kStoredBytes / 16;
  static constexpr uint32_t kAllMapped = kAllMappedSm90<Traits>;
  // A thread a row: it reads the row's parameters once, and the chunks that a quarter of a warp reads or writes
  // together, of eight rows, are in different banks.
  static_assert(kKeys == kWarpgroup);

  // What is known of a block before its codes are there.
  struct Block {
    bool row_seen;  // some row of the tile sees this thread's key
    bool common;    // all see all keys
  };

  const Params& params;
  Shared& shared;
  // Opaque: the compiler would read the thread's number and where shared memory is anew wherever it needs them, and
  // wait for them.
  const int row = static_cast<int>(Opaque(threadIdx.x % kWarpgroup));
  // This thread's row in the first tiles: chunk 0. The others are where their number is xored into the address.
  const uint32_t codes_row = Opaque(SharedAddress(shared.codes.tile) + 16 * SwizzledChunk<kStoredChunks>(row, 0));
  const uint32_t key_row = Opaque(SharedAddress(shared.key) + 2 * PanelIndex<kKeys>(row, 0));
  const uint32_t value_row = Opaque(SharedAddress(shared.value) + 2 * PanelIndex<kKeys>(row, 0));
  RingSlot<Traits::kCodeStages> code_slot{0};
  RingSlot<kStages> key_slot{1}, value_slot{1};

  __device__ ConverterSm90(const Params& params, Shared& shared) : params(params), shared(shared) {}

  // A tile's blocks, from the last to the first.
  __device__ void Run(TileSm90<Traits>& tile) {
    Scale key_scale = {}, value_scale = {};  // fp8: of the head
    if constexpr (!kRowParams) {
      key_scale = Codes::MakeScale(HeadScale(params, params.cache.key_params, tile.b, tile.head));
      value_scale = Codes::MakeScale(HeadScale(params, params.cache.value_params, tile.b, tile.head));
    }
    const int count = 2 * (tile.end - tile.begin);
    int block = tile.end, run_begin = block, first_key = 0;  // of the last keys
    RunRange seen = {0, 0}, common = {0, 0};                 // of their run
    Block last = {}, before = {};
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
      const bool values = HoldsValues(i, count);
      if (!values) {
        --block;
        first_key -= kKeys;
        if (block < run_begin) {
          const int run = tile.blocks.RunOf(block);
          run_begin = run == 0 ? 0 : tile.blocks.count[0];
          first_key = tile.blocks.FirstKey(block);
          seen = tile.blocks.seen[run];
          common = tile.blocks.common[run];
        }
        before = last;
        last = {seen.Holds(first_key + row), common.HoldsAll(first_key, kKeys)};
      }
      Block its = last;  // values follow the keys of the block before theirs, but for the last
      if (values && i < count - 1) its = before;
      Convert(values, its, values ? value_scale : key_scale, &tile.non_finite);
    }
  }

 private:
  // The next tile of codes.
  __device__ __forceinline__ void Convert(bool values, Block block, Scale scale, int* non_finite) {
    const RingSlot<kStages> slot = values ? value_slot : key_slot;
    WaitBarrier(&shared.codes.full[code_slot.index], code_slot.parity, kCodesFull);
    const uint32_t from = codes_row + code_slot.index * (kKeys * Traits::kStoredBytes);
    const uint32_t mapped = shared.codes.mapped[code_slot.index];
    if constexpr (kRowParams) {
      // Codes of unmapped pages are zeros, and so are to be the rows. What lies where no key is must not count: the
      // two ways of decoding round differently.
      const uint32_t packed = Opaque(shared.codes.row_params[code_slot.index][row]);  // without a wait for `mapped`
      scale = UnpackRowScale<E>((mapped >> (row / 8) & 1u) != 0 && block.row_seen ? packed : 0u);
    }
    const uint4 first = LoadShared16(from);
    const bool saturates = __any_sync(~0u, Codes::MaySaturate(scale));
    const bool in_part = values && !(block.common && mapped == kAllMapped);
    bool odd = saturates;  // there may be values that are not finite
    if (!kRowParams && in_part) {
#pragma unroll 1
      for (int chunk = 0; chunk < kStoredChunks; ++chunk)
        odd |= HasNonFinite<fp8_e4m3>(LoadShared16(from ^ chunk * 16));
      odd = __any_sync(~0u, odd);
    }
    WaitBarrier(values ? &shared.value_empty[slot.index] : &shared.key_empty[slot.index], slot.parity,
                values ? kValueEmpty : kKeyEmpty);
    if (!values && row == 0) shared.mapped[slot.index] = mapped;
    const uint32_t to = (values ? value_row : key_row) + slot.index * (kKeys * Traits::kDim * 2);
    if (saturates) {
      ConvertRow<true>(first, from, to, scale);
    } else {
      ConvertRow<false>(first, from, to, scale);
    }
    if (in_part && odd) TakeOutNonFinite(to, block.row_seen, non_finite);
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

  // Of the row of E at `row`.
  __device__ static uint32_t ChunkAt(uint32_t row, int chunk) {
    return (row ^ chunk % 8 * 16) + chunk / 8 * (kKeys * 128);
  }

  // codes: the row's first chunk.
  template <bool kSaturates>
  __device__ __forceinline__ void ConvertRow(uint4 codes, uint32_t from, uint32_t to, Scale scale) const {
    constexpr int kPairs = Codes::kPerWord / 2;
#pragma unroll
    for (int chunk = 0; chunk < kStoredChunks; ++chunk) {
      const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
      // A chunk ahead: 2 to 8 were no faster.
      if (chunk + 1 < kStoredChunks) codes = LoadShared16(from ^ (chunk + 1) * 16);
      uint32_t pairs[4][kPairs];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        if constexpr (kSaturates) {
          Codes::Neighbours(words[w], scale, pairs[w]);
          for (uint32_t& pair : pairs[w]) pair = FmaPair<E>(pair, Pack<E>(1.f / kShrink, 1.f / kShrink), 0);
        } else {
          Codes::Shrunk(words[w], scale, pairs[w]);
        }
      }
      const auto pair = [&](int i) { return pairs[i / kPairs][i % kPairs]; };
#pragma unroll
      for (int k = 0; k < kPairs; ++k) {
        StoreShared16(ChunkAt(to, kPairs * chunk + k),
                      {pair(4 * k), pair(4 * k + 1), pair(4 * k + 2), pair(4 * k + 3)});
      }
    }
  }

  // From this thread's row at `to`; see non_finite_sm90.cuh.
  __device__ __forceinline__ void TakeOutNonFinite(uint32_t to, bool seen, int* non_finite) const {
    bool found = false;
#pragma unroll 1
    for (int chunk = 0; chunk < Traits::kChunks; ++chunk) {
      const uint4 x = LoadShared16(ChunkAt(to, chunk));
      found = found || HasNonFinite<E>(x);
      StoreShared16(ChunkAt(to, chunk), FiniteOrZero<E>(x));
    }
    if (found && seen) atomicOr(non_finite, 1);
  }
};

}  // namespace turboattn::prefill

#endif  // TURBOATTN_KERNELS_PREFILL_CONVERT_SM90_CUH_

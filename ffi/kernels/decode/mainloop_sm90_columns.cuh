// The mainloop of the sm90 family whose warps share values: a warp has the scores and probabilities of its own keys,
// which it leaves in shared memory, and then multiplies those of all keys of the step with its own part of the columns
// of V. One barrier a step: it also tells whether some warp's scores pass the maximum, which is one for all of them.
#ifndef TURBOATTN_KERNELS_DECODE_MAINLOOP_SM90_COLUMNS_CUH_
#define TURBOATTN_KERNELS_DECODE_MAINLOOP_SM90_COLUMNS_CUH_

#include <cfloat>
#include <cstdint>

#include "kernels/decode/mainloop_sm90.cuh"

namespace turboattn::decode {

template <class Traits>
struct SharedSm90Columns : SharedSm90<Traits> {
  static constexpr int kWeightBytes = Traits::kStepKeys * Traits::kRows * 2;
  static_assert(2 * kWeightBytes == Traits::kRows * Traits::kDim * sizeof(float));

  // Of values, probability * scale * unit in fp16, [key][row]: of a step and of the next. At the end of a part, its
  // rows of O.
  union {
    alignas(128) unsigned char weights[2][kWeightBytes];
    float output[Traits::kRows][Traits::kDim];
  };
  // What the warps tell each other: of their keys.
  float zeros[kWarps][Traits::kRows];
  float middle[kWarps][Traits::kRows];
  float largest_scale[kWarps];
};

template <class Traits>
struct MainloopSm90Columns : MainloopSm90<Traits> {
  using Base = MainloopSm90<Traits>;
  using Shared = SharedSm90Columns<Traits>;
  using Operand = typename Base::Operand;
  using Codes = typename Base::Codes;
  using Base::lane, Base::warp, Base::rule, Base::place, Base::part;
  using Base::max, Base::sum, Base::zeros, Base::o, Base::query_sum, Base::unit, Base::weight_unit;
  static constexpr int kSteps = Traits::kSteps, kKeyTiles = Traits::kKeyTiles, kColumns = Traits::kColumns;
  static constexpr int kRows = Traits::kRows, kDim = Traits::kDim, kTiles = Base::kTiles;
  static constexpr int kKeySteps = Traits::kStepKeys / 16;  // of the second product
  static constexpr int kWeightTileBytes = 16 * kRows * 2;   // of 16 keys
  static_assert(kColumns == 2);
  // Where a row begins to count from: almost every score passes it, and a score that is not there is no NaN with it.
  static constexpr float kNone = -FLT_MAX;

  Shared& shared;
  const int barrier;
  float factor[kColumns][2];  // from x (see ScoreRule) to exponents
  bool scores_in_units;       // x is in units of the query's row (see CodeQuery): not where that could leave the range
  uint32_t value;             // ldmatrix: the warp's first chunk of a row of V in the ring's first step
  uint32_t weight_store, weight_load;  // of the lane, in the first of two places

  __device__ MainloopSm90Columns(const PagedAttentionParams& params, Shared& shared, const Part& part,
                                 RingSlot<kSteps>& place, int barrier)
      : Base(params, shared, part, place), shared(shared), barrier(barrier) {
    value = Opaque(SharedAddress(shared.tile[0][1]) +
                   SwizzledChunk<Traits::kStoredChunks>(lane, warp * Traits::kOwnChunks) * 16);
    // A row of 32 bytes: which of its halves comes first turns around every 4 keys, for the banks.
    weight_load = Opaque(SharedAddress(shared.weights) + SwizzledChunk<2>(lane % 16, lane / 16) * 16);
    weight_store = weight_load + warp * kWeightTileBytes;
  }

  __device__ void TakeQuery() {
    Base::TakeQuery();
    bool fits = !rule.modified;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float f = unit[n][e] * rule.to_log2;
        factor[n][e] = unit[n][e] == 0.f ? 1.f : f;  // 0: a row past the last
        fits = fits && (unit[n][e] == 0.f || (f >= 0x1p-110f && f <= 0x1p100f));
      }
    }
    scores_in_units = __all_sync(~0u, fits);
    if (scores_in_units) return;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) factor[n][0] = factor[n][1] = rule.to_log2;
  }

  // From products with codes to x.
  __device__ void ScaleScores(const RowScale (&key_scale)[kKeyTiles][2], float (&s)[kKeyTiles][kColumns][4]) const {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float row_unit = scores_in_units ? 1.f : this->LoadUnit(8 * n + lane % 4 * 2 + e % 2);
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) {
          const RowScale scale = key_scale[t][e / 2];
          s[t][n][e] = fmaf(scale.scale, s[t][n][e], scale.zero * query_sum[n][e % 2]) * row_unit;
        }
      }
    }
  }

  // After TakeQuery().
  __device__ void Run() {
    this->Reset();
#pragma unroll
    for (int n = 0; n < kColumns; ++n) max[n][0] = max[n][1] = kNone;
    const int num_blocks = part.Keyed();
    uint32_t turn = 0;  // which place weights have
#pragma unroll 1
    for (int block = 0; block < num_blocks; block += kKeyTiles) {
      // The step before, see MainloopSm90.
      if (block > 0) this->Release(place.index == 0 ? kSteps - 1 : place.index - 1);
      const int slot = place.index;
      WarpTile tiles[kKeyTiles];
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t) {
        const int row = t * kDecodeKeys + warp * kWarpKeys;
        tiles[t] = {this->fragment + slot * (2 * Traits::kArrayBytes) + t * kDecodeKeys * Traits::kStoredBytes,
                    0,
                    nullptr,
                    {&shared.row_params[slot][0][row], &shared.row_params[slot][1][row]}};
      }
      WaitBarrier(&shared.full[slot], place.parity, kWaitFull);
      const uint32_t mapped = shared.mapped[slot] >> 2 * warp;
      uint32_t value_params[kKeyTiles][2];
      this->LoadValueParams(tiles, value_params);
      float s[kKeyTiles][kColumns][4] = {};
      this->MultiplyStoredKeys(tiles, s);
      constexpr uint32_t kAll = 0x303u;
      static_assert(kKeyTiles == 2 && kDecodeKeys == 64);
      const bool plain = (mapped & kAll) == kAll && block >= this->common_begin &&
                         block + kKeyTiles <= this->common_end && scores_in_units;
      RowScale key_scale[kKeyTiles][2];
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t) this->LoadKeyScale(tiles[t], key_scale[t]);
      if (!plain || !StoreWeights<false>(key_scale, value_params, s, turn, true)) {
        ScaleScores(key_scale, s);
        bool rebases = plain;
        if (!plain) {
#pragma unroll
          for (int t = 0; t < kKeyTiles; ++t) this->LookAt(tiles[t], block + t, mapped >> 8 * t & 3u, s[t]);
          this->LoadValueParams(tiles, value_params);
        }
#pragma unroll 1
        while (true) {
          if (rebases) Rebase(s, value_params);
          if (StoreWeights<true>(key_scale, value_params, s, turn, !rebases)) break;  // once: scales may be Inf
          rebases = true;
        }
      }
      MultiplyValues(slot, turn);
      turn ^= Shared::kWeightBytes;
      place.Advance();
    }
    if (num_blocks > 0) this->Release(place.index == 0 ? kSteps - 1 : place.index - 1);
  }

  __device__ static RowScale ValueScale(uint32_t stored) {
    return Base::Centred(UnpackRowScale<typename Traits::E>(stored));
  }

  // Leaves the weights of the step's values, then a barrier. False: scores of a warp pass the maximum, or scales the
  // unit of weights, and nothing was counted; not where !may_change. kScaled: s is x, else products with codes.
  template <bool kScaled>
  __device__ bool StoreWeights(const RowScale (&key_scale)[kKeyTiles][2], const uint32_t (&value_params)[kKeyTiles][2],
                               const float (&s)[kKeyTiles][kColumns][4], uint32_t turn, bool may_change) {
    float next_sum[kColumns][2], next_zeros[kColumns][2];
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        next_sum[n][e] = sum[n][e];
        next_zeros[n][e] = zeros[n][e];
      }
    }
    float top = -Infinity(), larger = 0.f;
    uint32_t w[kKeyTiles][2 * kColumns];
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) {
      RowScale scale[2];
      float weight[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        scale[half] = ValueScale(value_params[t][half]);
        weight[half] = scale[half].scale * weight_unit;
        larger = fmaxf(larger, fabsf(weight[half]));
      }
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
        float y[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const RowScale key = key_scale[t][e / 2];
          const float origin = max[n][e % 2];
          // Not scaled: two roundings, as x has, but others: the same key may weigh half an ulp of x more or less in
          // steps that are scaled. Where x is large they may lift the maximum itself past the slack.
          y[e] =
              kScaled ? s[t][n][e] - origin : fmaf(key.scale, s[t][n][e], fmaf(key.zero, query_sum[n][e % 2], -origin));
          y[e] *= factor[n][e % 2];
          top = fmaxf(top, y[e]);
          y[e] = Exp2(y[e]);
          next_sum[n][e % 2] += y[e];
          next_zeros[n][e % 2] = fmaf(y[e], scale[e / 2].zero, next_zeros[n][e % 2]);
          y[e] *= weight[e / 2];
        }
        w[t][2 * n] = Pack<Operand>(y[0], y[1]);
        w[t][2 * n + 1] = Pack<Operand>(y[2], y[3]);
      }
    }
    const uint32_t to = weight_store + turn;
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) StoreMatrix4(to + t * (kWarps * kWeightTileBytes), w[t]);
    if (SyncNamedOr(barrier, Traits::kThreads, may_change && (top > Base::kSlack || larger > Base::kMaxWeight)))
      return false;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        sum[n][e] = next_sum[n][e];
        zeros[n][e] = next_zeros[n][e];
      }
    }
    return true;
  }

  // o += V^T P^T of all keys of the step, in the warp's columns; of its own keys, the middle of the codes.
  __device__ void MultiplyValues(int slot, uint32_t turn) {
    constexpr int kPairs = Codes::kPerWord / 2;
    const uint32_t from = value + slot * (2 * Traits::kArrayBytes), weights = weight_load + turn;
    {
      uint32_t own[kKeyTiles][4];
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t) {
        LoadMatrix4Transposed(own[t], weight_store + turn + t * (kWarps * kWeightTileBytes));
      }
      constexpr uint32_t kPair = Codes::kMiddle * 0x10001u, kOddPair = kPair << Base::kOddShift;
      const uint32_t middle[4] = {kPair, kOddPair, kPair, kOddPair};
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t) {
#pragma unroll
        for (int n = 0; n < kColumns; ++n) Mma<Operand>(o[kTiles - 1][n], middle, own[t][2 * n], own[t][2 * n + 1]);
      }
    }
#pragma unroll
    for (int k = 0; k < kKeySteps; k += 2) {
      uint32_t w[2][4];  // B fragments of two steps
#pragma unroll
      for (int i = 0; i < 2; ++i) LoadMatrix4Transposed(w[i], weights + (k + i) * kWeightTileBytes);
#pragma unroll
      for (int chunk = 0; chunk < Traits::kOwnChunks; ++chunk) {
        uint32_t x[4];
        LoadMatrix4Transposed(x, (from ^ 16 * chunk) + k * Traits::kTileBytes);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t first[kPairs], second[kPairs];  // of keys 2 c, 2 c + 1 and of 2 c + 8, 2 c + 9
          Codes::ValueCodes(x[2 * i], first);
          Codes::ValueCodes(x[2 * i + 1], second);
#pragma unroll
          for (int j = 0; j < kPairs; j += 2) {
            const uint32_t a[4] = {first[j], first[j + 1], second[j], second[j + 1]};
            const int d = (chunk * kPairs + j) / 2;
#pragma unroll
            for (int n = 0; n < kColumns; ++n) Mma<Operand>(o[d][n], a, w[i][2 * n], w[i][2 * n + 1]);
          }
        }
      }
    }
  }

  // All warps count from the maximum with x of all their keys, and in a unit of weights for the largest scale.
  __device__ void Rebase(const float (&x)[kKeyTiles][kColumns][4], const uint32_t (&value_params)[kKeyTiles][2]) {
    float top[kColumns][2], scale = 0.f;
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) {
#pragma unroll
      for (int half = 0; half < 2; ++half) scale = fmaxf(scale, fabsf(ValueScale(value_params[t][half]).scale));
    }
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float next = fmaxf(x[0][n][e], x[0][n][e + 2]);
#pragma unroll
        for (int t = 1; t < kKeyTiles; ++t) next = fmaxf(next, fmaxf(x[t][n][e], x[t][n][e + 2]));
#pragma unroll
        for (int step = 4; step < 32; step *= 2) next = fmaxf(next, __shfl_xor_sync(~0u, next, step));
        if (lane < 4) shared.states.max[warp][8 * n + lane * 2 + e] = next;
      }
    }
#pragma unroll
    for (int step = 4; step < 32; step *= 2) scale = fmaxf(scale, __shfl_xor_sync(~0u, scale, step));
    if (lane == 0) shared.largest_scale[warp] = scale;
    SyncNamed(barrier, Traits::kThreads);
    scale = shared.largest_scale[0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) scale = fmaxf(scale, shared.largest_scale[w]);
    const float unit_factor = scale * weight_unit > Base::kMaxWeight ? this->SetWeightUnit(scale) : 1.f;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float next = max[n][e];
#pragma unroll
        for (int w = 0; w < kWarps; ++w) next = fmaxf(next, shared.states.max[w][8 * n + lane % 4 * 2 + e]);
        const float f = max[n][e] == next ? 1.f : Exp2((max[n][e] - next) * factor[n][e]);
        max[n][e] = next;
        sum[n][e] *= f;
        zeros[n][e] *= f;
        top[n][e] = f * unit_factor;
      }
#pragma unroll
      for (int d = 0; d < kTiles; ++d) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[d][n][e] *= top[n][e % 2];
      }
    }
  }

  // Leaves the rows of the block's part in shared.output and shared.states. sync(): a barrier of the four warps.
  template <class Sync>
  __device__ void Publish(Sync sync) {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          sum[n][e] += __shfl_xor_sync(~0u, sum[n][e], step);
          zeros[n][e] += __shfl_xor_sync(~0u, zeros[n][e], step);
        }
        const int row = 8 * n + lane % 4 * 2 + e;
        if (lane < 4) {
          shared.states.max[warp][row] = max[n][e] * factor[n][e];
          shared.states.sum[warp][row] = sum[n][e];
          shared.zeros[warp][row] = zeros[n][e];
          shared.middle[warp][row] = o[kTiles - 1][n][e];
        }
      }
    }
    sync();
    const float value_scale = 1.f / weight_unit;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = 8 * n + lane % 4 * 2 + e;
        float zero = 0.f, middle = 0.f;
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          zero += shared.zeros[w][row];
          middle += shared.middle[w][row];
        }
#pragma unroll
        for (int d = 0; d < Traits::kOutputTiles; ++d) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float code_unit = half == 0 ? Base::kCodeUnit : Base::kCodeUnit / (1 << Base::kOddShift);
            const float value = fmaf(o[d][n][2 * half + e], code_unit, -Base::kCodeUnit * middle);
            shared.output[row][this->ValueColumn(warp * Traits::kOutputTiles + d, 2 * half + e)] =
                fmaf(value, value_scale, zero);
          }
        }
      }
    }
    sync();
  }

  // Four columns of a row, after Publish().
  __device__ static float4 Columns(const Shared& shared, int row, int d, float* max_out, float* sum_out) {
    float all = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) all += shared.states.sum[w][row];
    *max_out = all == 0.f ? -Infinity() : shared.states.max[0][row];
    *sum_out = all;
    return *reinterpret_cast<const float4*>(&shared.output[row][d]);
  }
};

}  // namespace turboattn::decode

#endif  // TURBOATTN_KERNELS_DECODE_MAINLOOP_SM90_COLUMNS_CUH_

// The products and the softmax of the decode mainloops, of one warp: mma m16n8k16 with 16 keys, a tile, as the rows and
// query rows as the columns, so that a group of up to 8 heads wastes nothing.
//
//   S^T [16 keys, rows] = K [16, D] Q^T          A = K by ldmatrix,             B = Q^T, in registers or shared memory
//   O^T [D, rows]      += V^T [D, 16] P^T        A = V^T by ldmatrix.trans,     B = P^T, S^T transposed by movmatrix
//
// Where warps share values, P^T passes through shared memory instead, and the second product has a part of D
// (mainloop_sm90_columns.cuh).
//
// The columns of S^T and O^T are the same in every lane, so the softmax state of a column lives where its sums do.
//
// Codes become fp16 in registers between ldmatrix and mma, unscaled: a key is code * scale + zero, so its score is
// scale * (q . code) + zero * sum(q), and a value's scale is a factor of its probability. Both are counted from the
// middle of the codes: a row's zero is its minimum, and large terms that cancel cost bits, of a score two, and would
// make the rounding of probabilities count for more. Keys' codes are made so; of values the middle is subtracted at the
// end, where it is one more tile of O^T, the product with a V^T whose codes are all the middle. Both products are then
// of fp16 whatever E is; queries and scaled probabilities are brought into its range by powers of two. ldmatrix moves
// 16 bits, two or four codes, so the order of a row's elements is permuted. A lane holds one word of each 16-byte chunk
// of a key, 4 or 8 neighbours: 4 of them are its share of a step of 16 elements, and the query's fragments are loaded
// in the same order (QueryElement). Of a value row it holds 16 bits of each chunk: two codes are rows g and g + 8 of a
// tile of O^T (ValueColumn).
#ifndef TURBOATTN_KERNELS_DECODE_PRODUCTS_CUH_
#define TURBOATTN_KERNELS_DECODE_PRODUCTS_CUH_

#include <cstdint>
#include <type_traits>

#include "kernels/common/fp8.cuh"
#include "kernels/common/int4.cuh"
#include "kernels/common/int8.cuh"
#include "kernels/common/ptx.cuh"
#include "kernels/common/query_tile.cuh"
#include "kernels/common/score.cuh"
#include "kernels/common/sequence.cuh"
#include "kernels/decode/traits.h"

namespace turboattn::decode {

// What the warps leave for each other at the end of a part of a unit: each its rows of O, and their softmax states.
template <class Traits>
struct WarpOutput {
  float o[Traits::kRows][Traits::kDim + 4];
};
template <class Traits>
struct WarpState {
  float max[kWarps][Traits::kRows];  // in exponents of 2; of warps that share values, before a part's end: of x
  float sum[kWarps][Traits::kRows];
};

// A row of the query tile against codes: the tile holds query / unit in fp16.
template <int kRows>
struct CodeQuery {
  float unit[kRows];  // a power of two
  float sum[kRows];   // of what the tile holds
};

// The query tile on its way: a thread's chunks of it.
template <class Traits>
class QueryChunks {
 public:
  __device__ QueryChunks(const PagedAttentionParams& params, int group, int first_token, int head, int first_row,
                         int rows, bool one_token) {
    const unsigned heads = static_cast<unsigned>(params.num_heads);
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const unsigned item = threadIdx.x + k * Traits::kThreads;
      const int r = static_cast<int>(item / kChunks);
      x_[k] = {0, 0, 0, 0};
      if (r >= rows) continue;
      const int i = one_token ? 0 : (first_row + r) / group;
      const unsigned of_token = head * group + first_row + r - i * group;
      const uint64_t row = static_cast<uint64_t>(static_cast<unsigned>(first_token + i)) * heads + of_token;
      x_[k] = static_cast<const uint4*>(params.query)[row * kChunks + item % kChunks];
    }
  }

  // By thread `thread`. Rows past the last are zeros. A barrier before use.
  __device__ void Put(typename Traits::E* s_query, unsigned thread) const {
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const unsigned item = thread + k * Traits::kThreads;
      if (kItems % Traits::kThreads != 0 && item >= kItems) break;
      reinterpret_cast<uint4*>(s_query)[SwizzledChunk<kChunks>(item / kChunks, item % kChunks)] = x_[k];
    }
  }

 private:
  static constexpr int kChunks = Traits::kDim / kChunk, kItems = Traits::kRows * kChunks;
  static constexpr int kPerThread = (kItems + Traits::kThreads - 1) / Traits::kThreads;
  uint4 x_[kPerThread];
};

// The query tile for products with codes. fp16 has 11 bits from 2^-14 on: elements 2^28 times smaller than their row's
// largest still have all of theirs. Rows past `rows` are zeros already. By kThreads threads; a barrier before use.
template <class Traits>
__device__ void MakeCodeQuery(typename Traits::E* s_query, CodeQuery<Traits::kRows>& code_query, int rows) {
  using E = typename Traits::E;
  constexpr int kChunks = Traits::kDim / kChunk;
  const int lane = threadIdx.x % 32;
  if (threadIdx.x >= rows && threadIdx.x < Traits::kRows) {
    code_query.unit[threadIdx.x] = code_query.sum[threadIdx.x] = 0.f;
  }
#pragma unroll 1
  for (int row = threadIdx.x / 32; row < rows; row += kWarps) {
    const auto pair_at = [&](int d) {
      return reinterpret_cast<uint32_t*>(s_query + SwizzledChunk<kChunks>(row, d / kChunk) * kChunk + d % kChunk);
    };
    const auto halves = [](uint32_t pair, auto* low, auto* high) {
      low->bits = static_cast<uint16_t>(pair);
      high->bits = static_cast<uint16_t>(pair >> 16);
    };
    float top = 0.f;
#pragma unroll
    for (int d = 2 * lane; d < Traits::kDim; d += 64) {
      E low, high;
      halves(*pair_at(d), &low, &high);
      top = fmaxf(top, fmaxf(fabsf(ToFloat(low)), fabsf(ToFloat(high))));  // NaN is left to itself
    }
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, step));
    // The largest element becomes 2^14 .. 2^15; the unit and its inverse are normal numbers.
    const int exponent = IsFinite(top) ? max(static_cast<int>(FloatToBits(top) >> 23) - 14, 27) : 127;
    const float inverse = BitsToFloat(static_cast<uint32_t>(254 - exponent) << 23);
    float sum = 0.f;
#pragma unroll
    for (int d = 2 * lane; d < Traits::kDim; d += 64) {
      E low, high;
      halves(*pair_at(d), &low, &high);
      const uint32_t pair = Pack<fp16>(ToFloat(low) * inverse, ToFloat(high) * inverse);
      *pair_at(d) = pair;
      fp16 first, second;
      halves(pair, &first, &second);
      sum += ToFloat(first) + ToFloat(second);
    }
    for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    if (lane == 0) {
      code_query.unit[row] = BitsToFloat(static_cast<uint32_t>(exponent) << 23);
      code_query.sum[row] = sum;
    }
  }
}

// 16 keys of a warp and their values in shared memory.
struct WarpTile {
  uint32_t key, value;    // ldmatrix: chunk 0 or 1 of a row of K and of V, this lane's. Two chunks on is at ^ 32.
  unsigned char* values;  // rows of swizzled chunks
  uint32_t* params[2];    // (scale, zero) pairs of keys and of values
};

// PagedKeys::Group() of key j, in 32 bits: those of its result.
__device__ inline int GroupOfPage(const PagedAttentionParams& params, const CallFacts& facts, int32_t layer,
                                  int32_t entry, int head, int j) {
  if (static_cast<unsigned>(layer) >= facts.layers || static_cast<unsigned>(entry) >= facts.pages) return kNoGroup;
  const unsigned page = layer * static_cast<unsigned>(params.cache.num_pages) + entry;
  const unsigned page_head = page * static_cast<unsigned>(params.cache.num_kv_heads) + head;
  return static_cast<int>((page_head << (facts.page_shift - 3)) + ((j & ((1 << facts.page_shift) - 1)) >> 3));
}

// A warp's keys in block `block` of a list; groups: which of its two groups of 8 are mapped.
__device__ inline KeyBlockView BlockViewOf(const PagedAttentionParams& params, const SequenceView& view,
                                           const BlockList<kDecodeKeys>& blocks, int block, int warp, uint32_t groups) {
  const int run = blocks.RunOf(block);
  return {view.runs[run],
          run,
          blocks.FirstKey(block) + warp * kWarpKeys,
          groups,
          nullptr,
          view.has_tree ? params.score.tree_mask : nullptr,
          params.score.tree_columns,
          view.position};
}

template <class Traits>
struct WarpProducts {
  using E = typename Traits::E;
  using Operand = std::conditional_t<Traits::kQuantised, fp16, E>;  // of both products
  using Codes = Codec<E, Traits::kKvDType>;
  static constexpr bool kRowParams = kHasRowParams<Traits::kKvDType>, kFp8 = Traits::kKvDType == DType::kFloat8E4M3;
  static constexpr int kDim = Traits::kDim, kRows = Traits::kRows, kColumns = Traits::kColumns;
  static constexpr int kStoredChunks = Traits::kStoredChunks, kKeyTiles = Traits::kKeyTiles;
  static constexpr int kTiles = Traits::kOutputTiles + (kRowParams ? 1 : 0);  // of O^T; the last: the codes' middle
  static constexpr float kCodeUnit = 0x1p24f;                                 // what makes a number of a subnormal code
  // How far, in exponents of 2, a score may pass the maximum that probabilities count from before that follows: most
  // maxima grow a little in every other step, and with them all sums and outputs would have to be scaled.
  static constexpr float kSlack = 4.f;
  static constexpr float kMaxWeight = 0x1p11f;  // of a value's code at the maximum: 2^kSlack times that is fp16
  static constexpr int kOddShift = Traits::kKvDType == DType::kInt4 ? 4 : 0;  // of ValueCodes' odd pairs

  const PagedAttentionParams& params;
  E* const s_query;
  const TileRows<kRows>& rows;
  const CodeQuery<Traits::kQuantised ? kRows : 1>& code_query;
  const ScoreRule rule;
  const float slack = fminf(kSlack * Reciprocal(rule.to_log2), 0x1p100f);  // of x
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;

  uint2 q[kColumns][kDim / 16];  // B fragments, where there are registers for them
  float o[kTiles][kColumns][4];
  float max[kColumns][2];  // of x (see ScoreRule), by column 2 c + e; within kSlack
  float sum[kColumns][2];

  // Codes.
  float unit[kColumns][2], query_sum[kColumns][2];  // see CodeQuery; where the query is in registers
  float zeros[kColumns][2];                         // sum of probability * zero of the values
  float weight_unit = 0x1p126f;                     // a value's code has the weight probability * scale * weight_unit
  float head_scale[2];                              // fp8: of K and V

  template <class Shared>
  __device__ WarpProducts(const PagedAttentionParams& params, Shared& shared, int b, int head)
      : params(params),
        s_query(shared.query()),
        rows(shared.rows),
        code_query(shared.code_query),
        rule(MakeScoreRule(params.score)) {
    if constexpr (kFp8) {
      head_scale[0] = HeadScale(params, params.cache.key_params, b, head);
      head_scale[1] = HeadScale(params, params.cache.value_params, b, head);
    }
  }

  // ---- fragments

  // The element of a key with which B fragment i of step k begins. Codes: both fragments are next to each other.
  __device__ int QueryElement(int k, int i) const {
    if constexpr (Traits::kQuantised) {
      constexpr int kPerWord = Codes::kPerWord, kStepsPerWord = kPerWord / 4;
      return k / kStepsPerWord * (4 * kPerWord) + lane % 4 * kPerWord + k % kStepsPerWord * 4 + 2 * i;
    } else {
      return 16 * k + lane % 4 * 2 + 8 * i;
    }
  }

  // B fragments of Q^T from the tile in shared memory.
  __device__ uint2 LoadQuery(int n, int k) const {
    const auto at = [&](int d) {
      return s_query + SwizzledChunk<kDim / kChunk>(8 * n + lane / 4, d / kChunk) * kChunk + d % kChunk;
    };
    if constexpr (Traits::kQuantised) {
      return *reinterpret_cast<const uint2*>(at(QueryElement(k, 0)));
    } else {
      return {*reinterpret_cast<const uint32_t*>(at(QueryElement(k, 0))),
              *reinterpret_cast<const uint32_t*>(at(QueryElement(k, 1)))};
    }
  }

  __device__ uint2 Query(int n, int k) const {
    if constexpr (Traits::kQueryInRegisters) {
      return q[n][k];
    } else {
      return LoadQuery(n, k);
    }
  }

  // int8, int4: (scale, zero) of a key or value.
  __device__ static RowScale ScaleOf(const WarpTile& tile, int which, int key) {
    return UnpackRowScale<E>(tile.params[which][key]);
  }

  // The same with the value of the middle code in place of zero.
  __device__ static RowScale Centred(RowScale row) {
    return {row.scale, fmaf(row.scale, static_cast<float>(Codes::kMiddle), row.zero)};
  }

  // s = K Q^T of the step's tiles.
  __device__ void MultiplyKeys(const WarpTile (&tiles)[kKeyTiles], float (&s)[kKeyTiles][kColumns][4]) {
    MultiplyStoredKeys(tiles, s);
    if constexpr (Traits::kQuantised) {
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t) ScaleScores(tiles[t], s[t]);
    }
  }

  // The same, codes without their scales. A product waits for the one before it that adds to the same sums: with one
  // tile of columns, a key tile has two tiles of them.
  __device__ void MultiplyStoredKeys(const WarpTile (&tiles)[kKeyTiles], float (&s)[kKeyTiles][kColumns][4]) {
    float other[kKeyTiles][4] = {};
    if constexpr (Traits::kQuantised) {
      constexpr int kPairs = Codes::kPerWord / 2;
#pragma unroll
      for (int chunk = 0; chunk < kStoredChunks; chunk += 2) {
        uint32_t x[kKeyTiles][4];
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) LoadMatrix4(x[t], tiles[t].key ^ (16 * chunk));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t low[kKeyTiles][kPairs], high[kKeyTiles][kPairs];
#pragma unroll
          for (int t = 0; t < kKeyTiles; ++t) {
            Codes::KeyCodes(x[t][2 * i], low[t]);
            Codes::KeyCodes(x[t][2 * i + 1], high[t]);
          }
#pragma unroll
          for (int j = 0; j < kPairs; j += 2) {
            const int k = ((chunk + i) * kPairs + j) / 2;
#pragma unroll
            for (int n = 0; n < kColumns; ++n) {
              const uint2 query = Query(n, k);
#pragma unroll
              for (int t = 0; t < kKeyTiles; ++t) {
                const uint32_t a[4] = {low[t][j], high[t][j], low[t][j + 1], high[t][j + 1]};
                Mma<Operand>(kColumns == 1 && k % 2 != 0 ? other[t] : s[t][n], a, query.x, query.y);
              }
            }
          }
        }
      }
    } else {
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) {
        uint32_t a[kKeyTiles][4];
#pragma unroll
        for (int t = 0; t < kKeyTiles; ++t) LoadMatrix4(a[t], tiles[t].key ^ (32 * k));
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          const uint2 query = Query(n, k);
#pragma unroll
          for (int t = 0; t < kKeyTiles; ++t) {
            Mma<Operand>(kColumns == 1 && k % 2 != 0 ? other[t] : s[t][n], a[t], query.x, query.y);
          }
        }
      }
    }
#pragma unroll
    for (int t = 0; t < kKeyTiles; ++t) {
      if constexpr (kColumns == 1) {
#pragma unroll
        for (int e = 0; e < 4; ++e) s[t][0][e] += other[t][e];
      }
    }
  }

  // Of row r of the tile, see CodeQuery; with the keys' scale, where it is one of the head. A key's products with a
  // scale of Inf or NaN are of both signs, or NaN themselves.
  __device__ float LoadUnit(int r) const {
    const float key_scale = !kFp8 ? 1.f : IsFinite(head_scale[0]) ? head_scale[0] : QuietNan();
    return code_query.unit[r] * key_scale;
  }

  // int8, int4: of this lane's keys.
  __device__ void LoadKeyScale(const WarpTile& tile, RowScale (&scale)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scale[half] = Centred(ScaleOf(tile, 0, lane / 4 + 8 * half));
      scale[half].zero = fmaf(scale[half].scale, 0.f, scale[half].zero);  // a key with a scale of Inf is NaN
    }
  }

  // From products with codes to scores.
  __device__ void ScaleScores(const WarpTile& tile, float (&s)[kColumns][4]) {
    RowScale scale[2];
    if constexpr (kRowParams) LoadKeyScale(tile, scale);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int r = 8 * n + lane % 4 * 2 + c;
        const float row_unit = Traits::kQueryInRegisters ? unit[n][c] : LoadUnit(r);
        [[maybe_unused]] const float row_sum = Traits::kQueryInRegisters ? query_sum[n][c] : code_query.sum[r];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float& x = s[n][2 * half + c];
          if constexpr (kRowParams) {
            x = fmaf(scale[half].scale, x, scale[half].zero * row_sum) * row_unit;
          } else {
            x *= row_unit;
          }
        }
      }
    }
  }

  // o += V^T P^T of a tile.
  __device__ void MultiplyValues(const WarpTile& tile, const uint32_t (&p)[kColumns][2]) {
    if constexpr (Traits::kQuantised) {
      constexpr int kPairs = Codes::kPerWord / 2;
#pragma unroll
      for (int chunk = 0; chunk < kStoredChunks; chunk += 2) {
        uint32_t x[4];
        LoadMatrix4Transposed(x, tile.value ^ (16 * chunk));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t first[kPairs], second[kPairs];  // of keys 2 c, 2 c + 1 and of 2 c + 8, 2 c + 9
          Codes::ValueCodes(x[2 * i], first);
          Codes::ValueCodes(x[2 * i + 1], second);
#pragma unroll
          for (int j = 0; j < kPairs; j += 2) {
            const uint32_t a[4] = {first[j], first[j + 1], second[j], second[j + 1]};
            const int d = ((chunk + i) * kPairs + j) / 2;
#pragma unroll
            for (int n = 0; n < kColumns; ++n) Mma<Operand>(o[d][n], a, p[n][0], p[n][1]);
          }
        }
      }
      if constexpr (kRowParams) {
        constexpr uint32_t kPair = Codes::kMiddle * 0x10001u, kOddPair = kPair << kOddShift;
        const uint32_t middle[4] = {kPair, kOddPair, kPair, kOddPair};
#pragma unroll
        for (int n = 0; n < kColumns; ++n) Mma<Operand>(o[kTiles - 1][n], middle, p[n][0], p[n][1]);
      }
    } else {
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) {
        uint32_t a[4];
        LoadMatrix4Transposed(a, tile.value ^ (32 * d));
#pragma unroll
        for (int n = 0; n < kColumns; ++n) Mma<Operand>(o[d][n], a, p[n][0], p[n][1]);
      }
    }
  }

  // Which element of a value row o[d][.][e] belongs to.
  __device__ int ValueColumn(int d, int e) const {
    if constexpr (Traits::kQuantised) {
      constexpr int kPerUnit = Codes::kPerWord / 2, kTilesPerUnit = kPerUnit / 2;
      return d / kTilesPerUnit * (8 * kPerUnit) + Codes::UnitElement(lane / 4, d % kTilesPerUnit * 2 + e / 2);
    } else {
      return 16 * d + lane / 4 + e / 2 * 8;
    }
  }

  // ---- softmax

  __device__ void ModifyAndMask(const KeyBlockView& block, bool partial, float (&s)[kColumns][4]) {
    if (rule.modified) ScaleAndCap(rule, s);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int row = 8 * n + lane % 4 * 2 + e, key = lane / 4;
        if (params.score.alibi_slopes != nullptr) {
          const float slope = rows.slope[row];
          const RowDistance distance(rows.position[row], block, key, 16);
          s[n][e] -= slope * distance.To(0);
          s[n][e + 2] -= slope * distance.To(8);
        }
        if (!partial) continue;
        if (!Sees(rows, row, block, key)) s[n][e] = -Infinity();
        if (!Sees(rows, row, block, key + 8)) s[n][e + 2] = -Infinity();
      }
    }
  }

  // (scale, zero) of this lane's values, as they are stored.
  __device__ void LoadValueParams(const WarpTile (&tiles)[kKeyTiles], uint32_t (&stored)[kKeyTiles][2]) const {
    if constexpr (kRowParams) {
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t) {
        for (int half = 0; half < 2; ++half) stored[t][half] = tiles[t].params[1][lane / 4 + 8 * half];
      }
    }
  }

  // Scores of the step's tiles to probabilities, as B fragments of the second product. value_params: LoadValueParams().
  __device__ void Softmax(const uint32_t (&value_params)[kKeyTiles][2], float (&s)[kKeyTiles][kColumns][4],
                          uint32_t (&p)[kKeyTiles][kColumns][2]) {
    RowScale scale[kKeyTiles][2];
    float larger = 0.f;  // any bits may be stored
    if constexpr (kRowParams) {
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          scale[t][half] = Centred(UnpackRowScale<E>(value_params[t][half]));
          larger = fmaxf(larger, fabsf(scale[t][half].scale));
        }
      }
    }
    bool changes = larger * weight_unit > kMaxWeight;
    float top[kColumns][2];
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        top[n][e] = fmaxf(s[0][n][e], s[0][n][e + 2]);
#pragma unroll
        for (int t = 1; t < kKeyTiles; ++t) top[n][e] = fmaxf(top[n][e], fmaxf(s[t][n][e], s[t][n][e + 2]));
        changes = changes || top[n][e] - max[n][e] > slack;  // max + slack may round up by twice the slack
      }
    }
    if (__any_sync(~0u, changes)) Rebase(top, larger);
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int t = 0; t < kKeyTiles; ++t) {
        float (&x)[4] = s[t][n];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          // From the maximum before scaling: far from 0, half an ulp of a scaled maximum is no small exponent. No key
          // yet: any finite origin will do, and exp(-Inf) must not become exp(-Inf + Inf).
          const float origin = max[n][e % 2] == -Infinity() ? 0.f : max[n][e % 2];
          x[e] = Exp2((x[e] - origin) * rule.to_log2);
          sum[n][e % 2] += x[e];
          if constexpr (kRowParams) {
            zeros[n][e % 2] = fmaf(x[e], scale[t][e / 2].zero, zeros[n][e % 2]);
            x[e] *= scale[t][e / 2].scale * weight_unit;
          }
        }
        p[t][n][0] = TransposeMatrix(Pack<Operand>(x[0], x[1]));
        p[t][n][1] = TransposeMatrix(Pack<Operand>(x[2], x[3]));
      }
    }
  }

  // Counts from the maximum with `top`, of this lane's keys, and in a unit of weights for `scale`, of its values.
  __device__ void Rebase(const float (&top)[kColumns][2], float scale) {
    float factor[kColumns][2];
    const float unit_factor = kRowParams ? ChangeWeightUnit(scale) : 1.f;
    bool scales = false;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float next = fmaxf(top[n][e], max[n][e]);
#pragma unroll
        for (int step = 4; step < 32; step *= 2) next = fmaxf(next, __shfl_xor_sync(~0u, next, step));
        // No key yet: there is nothing to scale but what TakeOutElements may have added, Inf, which 0 would make NaN.
        const bool counted = max[n][e] != -Infinity(), grows = counted && max[n][e] != next;
        factor[n][e] = grows ? Exp2((max[n][e] - next) * rule.to_log2) : 1.f;
        scales = scales || grows || (counted && unit_factor != 1.f);
        max[n][e] = next;
      }
    }
    // Most short parts do without the rest, whose instructions arrive more slowly than they run.
    if (!__any_sync(~0u, scales)) return;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        sum[n][e] *= factor[n][e];
        if constexpr (kRowParams) zeros[n][e] *= factor[n][e];
        factor[n][e] *= unit_factor;
      }
#pragma unroll
      for (int d = 0; d < kTiles; ++d) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[d][n][e] *= factor[n][e % 2];
      }
    }
  }

  // The unit of weights follows the largest scale of the warp's values, as far as it must: a probability of 1 then has
  // a weight of up to kMaxWeight, and values 2^25 times smaller than others still have all bits of theirs. Returns what
  // older weights are to be multiplied by.
  __device__ float ChangeWeightUnit(float scale) {
    if (!__any_sync(~0u, scale * weight_unit > kMaxWeight)) return 1.f;
    for (int step = 4; step < 32; step *= 2) scale = fmaxf(scale, __shfl_xor_sync(~0u, scale, step));
    return SetWeightUnit(scale);
  }
  // For `scale`, the largest.
  __device__ float SetWeightUnit(float scale) {
    const int exponent = static_cast<int>(FloatToBits(scale) >> 23);  // scale < 2^(exponent - 126)
    const float next = BitsToFloat(static_cast<uint32_t>(::max(254 + 10 - exponent, 1)) << 23);
    const float factor = next * Reciprocal(weight_unit);  // powers of two
    weight_unit = next;
    return factor;
  }

  // As in prefill: values of Inf or NaN must not meet the probability 0 of a row that does not see their key. They are
  // added to the rows that do and zeroed in the tile. Only needed where rows see different keys: what none of them sees
  // was never loaded and is zero.
  //
  // int8, int4: a decoded row is finite or all NaN, as its parameters are. Before probabilities meet these.
  __device__ void TakeOutRows(const KeyBlockView& block, const WarpTile& tile) {
    const auto finite = [&](int key) {
      const RowScale scale = ScaleOf(tile, 1, key);
      return IsFinite(scale.scale) && IsFinite(scale.zero);
    };
    const bool found = !finite(lane % kWarpKeys);
    if (!__any_sync(~0u, found)) return;
#pragma unroll 1
    for (int key = 0; key < kWarpKeys; ++key) {
      if (finite(key)) continue;
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int e = 0; e < (Traits::kSplitsColumns ? 2 : 4); ++e) {
          if (!Sees(rows, 8 * n + lane % 4 * 2 + e % 2, block, key)) continue;
          if constexpr (Traits::kSplitsColumns) {
            zeros[n][e] = QuietNan();  // joins all columns
          } else {
#pragma unroll
            for (int d = 0; d < kDim / 16; ++d) o[d][n][e] = QuietNan();
          }
        }
      }
    }
    __syncwarp();
    if (found) tile.params[1][lane % kWarpKeys] = 0;
    __syncwarp();
  }

  // Chunk `chunk` of a value of the tile.
  __device__ static uint4* ValueChunk(const WarpTile& tile, int key, int chunk) {
    return reinterpret_cast<uint4*>(tile.values) + SwizzledChunk<kStoredChunks>(key, chunk);
  }

  // 16 bits and fp8. False: fp8 with a scale of Inf or NaN, no value is left to multiply.
  __device__ bool TakeOutElements(const KeyBlockView& block, const WarpTile& tile) {
    using Stored = std::conditional_t<kFp8, fp8_e4m3, E>;
    constexpr int kPerChunk = 16 / sizeof(Stored);
    const bool all = ValuesAreNotFinite();
    bool found = all;
    for (int i = lane; i < kWarpKeys * kStoredChunks; i += 32) {
      found = found || HasNonFinite<Stored>(*ValueChunk(tile, i / kStoredChunks, i % kStoredChunks));
    }
    if (!__any_sync(~0u, found)) return true;
    const auto value = [&](Stored x) {
      if constexpr (kFp8) {
        return DecodeFp8<E>(x, head_scale[1]);
      } else {
        return ToFloat(x);
      }
    };
    const auto element = [&](int key, int column) -> Stored& {
      return reinterpret_cast<Stored*>(ValueChunk(tile, key, column / kPerChunk))[column % kPerChunk];
    };
#pragma unroll 1
    for (int key = 0; key < kWarpKeys; ++key) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (!Sees(rows, 8 * n + lane % 4 * 2 + e % 2, block, key)) continue;
#pragma unroll
          for (int d = 0; d < kDim / 16; ++d) {
            const float v = value(element(key, ValueColumn(d, e)));
            if (!IsFinite(v)) o[d][n][e] += v;
          }
        }
      }
    }
    if (all) return false;
    __syncwarp();
    for (int i = lane; i < kWarpKeys * kDim; i += 32) {
      Stored& x = element(i / kDim, i % kDim);
      if (!IsFinite(value(x))) x = Stored{0};
    }
    __syncwarp();
    return true;
  }

  // Whether every value is Inf or NaN, whatever its code.
  __device__ bool ValuesAreNotFinite() const {
    if constexpr (kFp8) {
      return !IsFinite(head_scale[1]);
    } else {
      return false;
    }
  }

  // Then a barrier.
  __device__ void TakeQuery() {
    if constexpr (Traits::kQueryInRegisters) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int k = 0; k < kDim / 16; ++k) q[n][k] = LoadQuery(n, k);
        if constexpr (Traits::kQuantised) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int row = 8 * n + lane % 4 * 2 + e;
            unit[n][e] = LoadUnit(row);
            query_sum[n][e] = code_query.sum[row];
          }
        }
      }
    }
  }

  __device__ void Reset() {
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        max[n][e] = -Infinity();
        sum[n][e] = zeros[n][e] = 0.f;
      }
#pragma unroll
      for (int d = 0; d < kTiles; ++d) o[d][n][0] = o[d][n][1] = o[d][n][2] = o[d][n][3] = 0.f;
    }
  }

  // Leaves the warp's results for the block.
  __device__ void Publish(WarpOutput<Traits>& output, WarpState<Traits>& state) {
    // Values that are not finite are in o themselves, see TakeOutElements.
    const float value_scale = kRowParams ? 1.f / weight_unit : kFp8 && !ValuesAreNotFinite() ? head_scale[1] : 1.f;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          sum[n][e] += __shfl_xor_sync(~0u, sum[n][e], step);
          if constexpr (kRowParams) zeros[n][e] += __shfl_xor_sync(~0u, zeros[n][e], step);
        }
        const int row = 8 * n + lane % 4 * 2 + e;
        if (lane < 4) {
          state.max[warp][row] = max[n][e] * rule.to_log2;
          state.sum[warp][row] = sum[n][e];
        }
      }
      // Codes count from the middle again, and as numbers that are not subnormal: by powers of two, with one rounding.
      [[maybe_unused]] float middle[4], unit[4];
      if constexpr (kRowParams) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          unit[e] = e < 2 ? kCodeUnit : kCodeUnit / (1 << kOddShift);
          middle[e] = -unit[e] * o[kTiles - 1][n][e];
        }
      }
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float value = o[d][n][e];
          if constexpr (kRowParams) {
            value = fmaf(fmaf(value, unit[e], middle[e]), value_scale, zeros[n][e % 2]);
          } else if constexpr (kFp8) {
            value *= value_scale;
          }
          output.o[8 * n + lane % 4 * 2 + e % 2][ValueColumn(d, e)] = value;
        }
      }
    }
  }
};

}  // namespace turboattn::decode

#endif  // TURBOATTN_KERNELS_DECODE_PRODUCTS_CUH_

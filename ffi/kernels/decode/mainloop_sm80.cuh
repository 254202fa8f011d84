// The decode mainloop of the sm80 family: one warp, 16 keys a step, mma m16n8k16 with keys as the 16 rows and query
// rows as the columns, so that a group of up to 8 heads wastes nothing.
//
//   S^T [16 keys, rows] = K [16, D] Q^T          A = K by ldmatrix,             B = Q^T, in registers or shared memory
//   O^T [D, rows]      += V^T [D, 16] P^T        A = V^T by ldmatrix.trans,     B = P^T, S^T transposed by movmatrix
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
#ifndef TURBOATTN_KERNELS_DECODE_MAINLOOP_SM80_CUH_
#define TURBOATTN_KERNELS_DECODE_MAINLOOP_SM80_CUH_

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

// A warp's ring: K and V of 16 keys a step, and their (scale, zero) pairs.
template <class Traits>
struct RingSm80 {
  alignas(Traits::kStoredBytes < 128 ? 128
                                     : Traits::kStoredBytes) unsigned char tile[Traits::kSteps][2][Traits::kTileBytes];
  uint32_t row_params[Traits::kSteps][2][kHasRowParams<Traits::kKvDType> ? kWarpKeys : 1];
};

// What the warps leave for each other at the end of a part of a unit.
template <class Traits>
struct WarpResults {
  float o[kWarps][Traits::kRows][Traits::kDim + 4];
  float max[kWarps][Traits::kRows];  // in exponents of 2
  float sum[kWarps][Traits::kRows];
};

// What the blocks of a cluster send each other: [part][quads of four columns that the block finishes], rows with one
// more quad than that, so that parts lie in different banks.
constexpr int kMaxCluster = 16;
template <class Traits>
struct ClusterParts {
  static constexpr int kQuads = Traits::kRows * Traits::kDim / 4 + kMaxCluster;
  float4 x[kQuads];
  float2 state[kQuads];  // max, sum
};

// A row of the query tile against codes: the tile holds query / unit in fp16.
template <int kRows>
struct CodeQuery {
  float unit[kRows];  // a power of two
  float sum[kRows];   // of what the tile holds
};

// A sequence's share of the flat list.
struct Share {
  int first_token, q_len;
  int kv_len;       // plain calls
  int blocks;       // of a unit, at least 1
  int part_blocks;  // of a part; 0: parts are cut by the grid
  int parts;        // of a unit: that many of part_blocks, or blocks
  int64_t cost;     // length in the list: parts of all units, which are kv heads x tiles of rows
};

// The last step of each ring is empty until the first has been multiplied. By then the query is in registers: until
// then it lies there, where it fits; turns and the new rows of a fused step pass through other rings'.
template <class Traits>
struct SharedSm80 {
  static constexpr int kQueryElements = Traits::kRows * Traits::kDim, kStepBytes = 2 * Traits::kTileBytes;
  static constexpr bool kQueryInRing =
      Traits::kQueryInRegisters && kQueryElements * sizeof(typename Traits::E) <= kStepBytes;
  static_assert(kWarps * Traits::kDim * sizeof(float) <= kStepBytes);

  union {
    RingSm80<Traits> rings[kWarps];
    struct {
      WarpResults<Traits> results;
      alignas(16) ClusterParts<Traits> parts;
    };
  };
  alignas(128) typename Traits::E query_apart[kQueryInRing ? 8 : kQueryElements];
  TileRows<Traits::kRows> rows;
  CodeQuery<Traits::kQuantised ? Traits::kRows : 1> code_query;
  WorkList list;
  int last_parts;  // of the unit that goes on in the next block, if it begins in this one; 0: the list says it
  // The place that is worked on, where the block's end, the sequence, and where in its share.
  int64_t position, end;
  int b;  // -1: there is none
  int64_t offset;
  Share share;
  SequenceView view;
  BlockList<kDecodeKeys> blocks;

  __device__ typename Traits::E* query() {
    if constexpr (kQueryInRing) {
      return reinterpret_cast<typename Traits::E*>(rings[0].tile[Traits::kSteps - 1]);
    } else {
      return query_apart;
    }
  }
  // Where all rows are of one token: the turns of its pairs.
  __device__ SinCos* turns() {
    static_assert(Traits::kDim / 2 * sizeof(SinCos) <= kStepBytes);
    return reinterpret_cast<SinCos*>(rings[2].tile[Traits::kSteps - 1]);
  }
  // kDim floats of a warp's own.
  __device__ float* new_row() {
    return reinterpret_cast<float*>(rings[1].tile[Traits::kSteps - 1]) + threadIdx.x / kWarp * Traits::kDim;
  }
};

// The query tile on its way: a thread's chunks of it.
template <class Traits>
class QueryChunks {
 public:
  __device__ QueryChunks(const PagedAttentionParams& params, int group, int first_token, int head, int first_row,
                         int rows, bool one_token) {
    const int heads = static_cast<int>(params.num_heads);
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const int item = threadIdx.x + k * Traits::kThreads, r = item / kChunks;
      x_[k] = {0, 0, 0, 0};
      if (r >= rows) continue;
      const int i = one_token ? 0 : (first_row + r) / group;
      const int64_t row = static_cast<int64_t>(first_token + i) * heads + (head * group + first_row + r - i * group);
      x_[k] = static_cast<const uint4*>(params.query)[row * kChunks + item % kChunks];
    }
  }

  // Rows past the last are zeros. __syncthreads() before use.
  __device__ void Put(typename Traits::E* s_query) const {
#pragma unroll
    for (int k = 0; k < kPerThread; ++k) {
      const int item = threadIdx.x + k * Traits::kThreads;
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
// largest still have all of theirs. Rows past `rows` are zeros already. By the whole block; __syncthreads() before use.
template <class Traits>
__device__ void MakeCodeQuery(SharedSm80<Traits>& shared, int rows) {
  using E = typename Traits::E;
  constexpr int kChunks = Traits::kDim / kChunk;
  const int lane = threadIdx.x % 32;
  if (threadIdx.x >= rows && threadIdx.x < Traits::kRows) {
    shared.code_query.unit[threadIdx.x] = shared.code_query.sum[threadIdx.x] = 0.f;
  }
#pragma unroll 1
  for (int row = threadIdx.x / 32; row < rows; row += kWarps) {
    const auto pair_at = [&](int d) {
      return reinterpret_cast<uint32_t*>(shared.query() + SwizzledChunk<kChunks>(row, d / kChunk) * kChunk +
                                         d % kChunk);
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
      shared.code_query.unit[row] = BitsToFloat(static_cast<uint32_t>(exponent) << 23);
      shared.code_query.sum[row] = sum;
    }
  }
}

template <class Traits>
struct MainloopSm80 {
  using E = typename Traits::E;
  using Operand = std::conditional_t<Traits::kQuantised, fp16, E>;  // of both products
  using Codes = Codec<E, Traits::kKvDType>;
  static constexpr bool kRowParams = kHasRowParams<Traits::kKvDType>, kFp8 = Traits::kKvDType == DType::kFloat8E4M3;
  static constexpr int kDim = Traits::kDim, kColumns = Traits::kColumns, kSteps = Traits::kSteps;
  static constexpr int kStoredChunks = Traits::kStoredChunks;
  static constexpr int kTiles = kDim / 16 + (kRowParams ? 1 : 0);  // of O^T; the last with the middle of the codes
  static constexpr float kCodeUnit = 0x1p24f;                      // what makes a number of a subnormal code
  static constexpr float kMaxWeight = 0x1p15f;  // of a value's code, times probability: far below fp16's largest
  static constexpr int kOddShift = Traits::kKvDType == DType::kInt4 ? 4 : 0;  // of ValueCodes' odd pairs
  static constexpr int kLookUp = 16;  // steps whose two groups of 8 keys the 32 lanes look up together
  static_assert(kSteps <= kLookUp);

  const PagedAttentionParams& params;
  SharedSm80<Traits>& shared;
  RingSm80<Traits>& ring;
  const SequenceView& view;
  const BlockList<kDecodeKeys>& blocks;
  const CallFacts& facts;
  const ScoreRule rule;
  const int head;         // kv head
  const int first_block;  // of this part of the unit
  const int num_blocks;
  const bool rows_differ;        // in what they see
  int common_begin, common_end;  // steps whose keys of this warp all rows see, in the sequence's own run
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;

  uint2 q[kColumns][kDim / 16];  // B fragments, where there are registers for them
  float o[kTiles][kColumns][4];
  float max[kColumns][2];  // of x (see ScoreRule), by column 2 c + e
  float sum[kColumns][2];

  // A lane copies one chunk of every kRowsPerCopy-th row; a copy takes both groups, one, or part of one.
  static constexpr int kRowsPerCopy = 32 / kStoredChunks, kStepBytes = 2 * Traits::kTileBytes;
  const char* copy_from[2];  // of K and V, of group 0
  const char* params_from;
  uint32_t copy_to;  // in the first step of the ring
  // ldmatrix: chunk 0 or 1 of a row of K and of V in the first step. Two chunks on is at ^ 32.
  uint32_t key_fragment, value_fragment;

  int32_t layer;
  const int32_t* own_pages;
  int32_t next_entry = 0;
  bool next_present = false;
  int group = kNoGroup;
  uint32_t mapped = 0;  // two bits a step, one a group: of the step that is multiplied, the next, ... the last loaded

  // Codes.
  float unit[kColumns][2], query_sum[kColumns][2];  // see CodeQuery; where the query is in registers
  float zeros[kColumns][2];                         // sum of probability * zero of the values
  float weight_unit = 0x1p126f;                     // a value's code has the weight probability * scale * weight_unit
  float head_scale[2];                              // fp8: of K and V

  __device__ MainloopSm80(const PagedAttentionParams& params, const CallFacts& facts, SharedSm80<Traits>& shared, int b,
                          int head, int first_block, int num_blocks, bool rows_differ)
      : params(params),
        shared(shared),
        ring(shared.rings[threadIdx.x / 32]),
        view(shared.view),
        blocks(shared.blocks),
        facts(facts),
        rule(MakeScoreRule(params.score)),
        head(head),
        first_block(first_block),
        num_blocks(num_blocks),
        rows_differ(rows_differ) {
    layer = params.seqs.layer[b];
    own_pages = params.seqs.page_table + static_cast<int64_t>(b) * static_cast<int>(params.seqs.max_pages);
    // Step s, if it is of the own run, has the warp's keys number kWarps * (first + s) + warp, in units of kWarpKeys.
    const RunRange common = blocks.common[kOwnRun];
    const int first = blocks.first[kOwnRun] + first_block - blocks.count[0];
    const int lo = static_cast<int>((common.lo + (kWarpKeys - 1u)) / kWarpKeys), hi = common.hi / kWarpKeys;
    common_begin = ::max(((lo - warp + kWarps - 1) >> 2) - first, blocks.count[0] - first_block);
    common_end = ((hi - warp - 1) >> 2) - first + 1;
    static_assert(kWarps == 4);
    const int r0 = lane / kStoredChunks, chunk = lane % kStoredChunks;
    const int copied = r0 % 8 * Traits::kStoredBytes + chunk * 16;
    copy_from[0] = static_cast<const char*>(params.cache.key) + copied;
    copy_from[1] = static_cast<const char*>(params.cache.value) + copied;
    params_from =
        static_cast<const char*>(lane < kWarpKeys ? params.cache.key_params : params.cache.value_params) + lane % 8 * 4;
    const uint32_t tiles = SharedAddress(ring.tile);
    copy_to = Opaque(tiles + SwizzledChunk<kStoredChunks>(r0, chunk) * 16);
    key_fragment = Opaque(tiles + SwizzledChunk<kStoredChunks>(lane % 16, lane / 16) * 16);
    value_fragment = Traits::kQuantised
                         ? key_fragment
                         : Opaque(tiles + SwizzledChunk<kStoredChunks>(lane / 16 * 8 + lane % 8, lane / 8 % 2) * 16);
    if constexpr (kFp8) {
      head_scale[0] = HeadScale(params, params.cache.key_params, b, head);
      head_scale[1] = HeadScale(params, params.cache.value_params, b, head);
    }
  }

  // ---- loading

  __device__ int FirstKey(int step) const { return blocks.FirstKey(first_block + step) + warp * kWarpKeys; }

  // Reads the page table for steps base .. base + 15, two lanes a step, long before the keys are loaded.
  __device__ void LookUp(int base) {
    const int step = base + lane / 2;
    next_present = false;
    if (step >= num_blocks) return;
    const int run = blocks.RunOf(first_block + step), j = FirstKey(step) + lane % 2 * 8;
    const RunRange seen = blocks.seen[run];
    next_present = seen.Meets(j, 8);
    if (next_present) next_entry = (run == kOwnRun ? own_pages : params.seqs.prefix_pages)[j >> facts.page_shift];
  }

  // PagedKeys::Group() of key j, in 32 bits: those of its result.
  __device__ int GroupAt(int j, int32_t entry) const {
    if (static_cast<unsigned>(layer) >= facts.layers || static_cast<unsigned>(entry) >= facts.pages) return kNoGroup;
    const unsigned page = layer * static_cast<unsigned>(params.cache.num_pages) + entry;
    const unsigned page_head = page * static_cast<unsigned>(params.cache.num_kv_heads) + head;
    return static_cast<int>((page_head << (facts.page_shift - 3)) + ((j & ((1 << facts.page_shift) - 1)) >> 3));
  }

  // K and V of a step into the ring, or nothing past the last step; one group of copies either way.
  __device__ void Load(int step) {
    mapped >>= 2;
    if (step < num_blocks) {
      if (step % kLookUp == 0) {
        group = next_present ? GroupAt(FirstKey(step + lane / 2) + lane % 2 * 8, next_entry) : kNoGroup;
        LookUp(step + kLookUp);
      }
      const int local = step % kLookUp * 2;
      const int groups[2] = {__shfl_sync(~0u, group, local), __shfl_sync(~0u, group, local + 1)};
      if (groups[0] != kNoGroup) mapped |= 1u << (2 * kSteps - 2);
      if (groups[1] != kNoGroup) mapped |= 1u << (2 * kSteps - 1);
      if (groups[0] != kNoGroup && groups[1] != kNoGroup && IsCommon(step)) {
        Copy(step, groups, [](int, int) { return true; });
      } else {
        const RunRange seen = blocks.seen[blocks.RunOf(first_block + step)];
        const int first_key = FirstKey(step);
        Copy(step, groups, [&](int r, int g) { return g != kNoGroup && seen.Holds(first_key + r); });
      }
    }
    CommitCopies();
  }

  // Whether all rows see all of the warp's keys of a step, mapped or not.
  __device__ bool IsCommon(int step) const { return step >= common_begin && step < common_end; }

  // Rows of two groups; zeros in place of those that do not exist: exists(row of the step, its group).
  template <class Exists>
  __device__ void Copy(int step, const int (&groups)[2], Exists exists) {
    constexpr int kGroupBytes = 8 * Traits::kStoredBytes;
    const int r0 = lane / kStoredChunks;
    const uint32_t to = copy_to + step % kSteps * kStepBytes;
#pragma unroll
    for (int kv = 0; kv < 2; ++kv) {
      const char* from[2];  // the first row of each group that this lane copies
#pragma unroll
      for (int h = 0; h < 2; ++h) from[h] = copy_from[kv] + static_cast<int64_t>(groups[h]) * kGroupBytes;
#pragma unroll
      for (int i = 0; i < kWarpKeys / kRowsPerCopy; ++i) {
        const int h = kRowsPerCopy > 8 ? r0 / 8 : i * kRowsPerCopy / 8, r = i * kRowsPerCopy + r0;
        const char* address = (h == 0 ? from[0] : from[1]) + i * kRowsPerCopy % 8 * Traits::kStoredBytes;
        const bool valid = exists(r, h == 0 ? groups[0] : groups[1]);
        // Rows of 8 chunks and more: the low bits of a row's number turn the chunk's around.
        const uint32_t turned = kStoredChunks >= 8 ? to ^ (i * kRowsPerCopy % 8 * 16) : to;
        CopyAsync16(turned + kv * Traits::kTileBytes + i * kRowsPerCopy * Traits::kStoredBytes,
                    valid ? address : static_cast<const char*>(params.cache.key), valid);
      }
    }
    if constexpr (kRowParams) {
      const int r = lane % kWarpKeys, g = r < 8 ? groups[0] : groups[1];
      const bool valid = exists(r, g);
      CopyAsync4(SharedAddress(&ring.row_params[step % kSteps][lane / kWarpKeys][r]),
                 valid ? params_from + static_cast<int64_t>(g) * 32 : params_from, valid);
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
      return shared.query() + SwizzledChunk<kDim / kChunk>(8 * n + lane / 4, d / kChunk) * kChunk + d % kChunk;
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
  __device__ RowScale ScaleOf(int slot, int which, int key) const {
    return UnpackRowScale<E>(ring.row_params[slot][which][key]);
  }

  // The same with the value of the middle code in place of zero.
  __device__ RowScale CentredScaleOf(int slot, int which, int key) const {
    const RowScale row = ScaleOf(slot, which, key);
    return {row.scale, fmaf(row.scale, static_cast<float>(Codes::kMiddle), row.zero)};
  }

  // s = K Q^T of one step. A product waits for the one before it that adds to the same sums: there are two tiles of
  // them, if need be both of the same columns.
  __device__ void MultiplyKeys(int slot, float (&s)[kColumns][4]) {
    float other[4] = {};
    const uint32_t tile = key_fragment + slot * kStepBytes;
    if constexpr (Traits::kQuantised) {
      constexpr int kPairs = Codes::kPerWord / 2;
#pragma unroll
      for (int chunk = 0; chunk < kStoredChunks; chunk += 2) {
        uint32_t x[4];
        LoadMatrix4(x, tile ^ (16 * chunk));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          uint32_t low[kPairs], high[kPairs];
          Codes::KeyCodes(x[2 * i], low);
          Codes::KeyCodes(x[2 * i + 1], high);
#pragma unroll
          for (int j = 0; j < kPairs; j += 2) {
            const uint32_t a[4] = {low[j], high[j], low[j + 1], high[j + 1]};
            const int k = ((chunk + i) * kPairs + j) / 2;
#pragma unroll
            for (int n = 0; n < kColumns; ++n) {
              const uint2 query = Query(n, k);
              Mma<Operand>(kColumns == 1 && k % 2 != 0 ? other : s[n], a, query.x, query.y);
            }
          }
        }
      }
    } else {
#pragma unroll
      for (int k = 0; k < kDim / 16; ++k) {
        uint32_t a[4];
        LoadMatrix4(a, tile ^ (32 * k));
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          const uint2 query = Query(n, k);
          Mma<Operand>(kColumns == 1 && k % 2 != 0 ? other : s[n], a, query.x, query.y);
        }
      }
    }
    if constexpr (kColumns == 1) {
#pragma unroll
      for (int e = 0; e < 4; ++e) s[0][e] += other[e];
    }
    if constexpr (Traits::kQuantised) ScaleScores(slot, s);
  }

  // Of row r of the tile, see CodeQuery; with the keys' scale, where it is one of the head. A key's products with a
  // scale of Inf or NaN are of both signs, or NaN themselves.
  __device__ float LoadUnit(int r) const {
    const float key_scale = !kFp8 ? 1.f : IsFinite(head_scale[0]) ? head_scale[0] : QuietNan();
    return shared.code_query.unit[r] * key_scale;
  }

  // From products with codes to scores.
  __device__ void ScaleScores(int slot, float (&s)[kColumns][4]) {
    RowScale scale[2];
    if constexpr (kRowParams) {
      for (int half = 0; half < 2; ++half) {
        scale[half] = CentredScaleOf(slot, 0, lane / 4 + 8 * half);
        scale[half].zero = fmaf(scale[half].scale, 0.f, scale[half].zero);  // a key with a scale of Inf is NaN
      }
    }
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const int r = 8 * n + lane % 4 * 2 + c;
        const float row_unit = Traits::kQueryInRegisters ? unit[n][c] : LoadUnit(r);
        [[maybe_unused]] const float row_sum = Traits::kQueryInRegisters ? query_sum[n][c] : shared.code_query.sum[r];
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

  // o += V^T P^T of one step.
  __device__ void MultiplyValues(int slot, const uint32_t (&p)[kColumns][2]) {
    const uint32_t tile = value_fragment + slot * kStepBytes;
    if constexpr (Traits::kQuantised) {
      constexpr int kPairs = Codes::kPerWord / 2;
#pragma unroll
      for (int chunk = 0; chunk < kStoredChunks; chunk += 2) {
        uint32_t x[4];
        LoadMatrix4Transposed(x, (tile ^ (16 * chunk)) + Traits::kTileBytes);
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
        LoadMatrix4Transposed(a, (tile ^ (32 * d)) + Traits::kTileBytes);
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
          const float slope = shared.rows.slope[row];
          const RowDistance distance(shared.rows.position[row], block, key, 16);
          s[n][e] -= slope * distance.To(0);
          s[n][e + 2] -= slope * distance.To(8);
        }
        if (!partial) continue;
        if (!Sees(shared.rows, row, block, key)) s[n][e] = -Infinity();
        if (!Sees(shared.rows, row, block, key + 8)) s[n][e + 2] = -Infinity();
      }
    }
  }

  // Scores to probabilities, as B fragments of the second product; rescales what there is when a maximum grows.
  __device__ void Softmax(int slot, float (&s)[kColumns][4], uint32_t (&p)[kColumns][2]) {
    RowScale scale[2];  // of this lane's values
    if constexpr (kRowParams) {
      for (int half = 0; half < 2; ++half) scale[half] = CentredScaleOf(slot, 1, lane / 4 + 8 * half);
      const float larger = fmaxf(fabsf(scale[0].scale), fabsf(scale[1].scale));  // any bits may be stored
      if (__any_sync(~0u, larger * weight_unit > kMaxWeight)) ChangeWeightUnit(larger);
    }
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
      float top[2];
      bool grows = false;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        top[e] = fmaxf(s[n][e], s[n][e + 2]);
        grows = grows || top[e] > max[n][e];
      }
      if (__any_sync(~0u, grows)) {
        float alpha[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          top[e] = fmaxf(top[e], max[n][e]);
#pragma unroll
          for (int step = 4; step < 32; step *= 2) top[e] = fmaxf(top[e], __shfl_xor_sync(~0u, top[e], step));
          alpha[e] = max[n][e] == top[e]        ? 1.f
                     : max[n][e] == -Infinity() ? 0.f
                                                : Exp2((max[n][e] - top[e]) * rule.to_log2);
          max[n][e] = top[e];
          sum[n][e] *= alpha[e];
          if constexpr (kRowParams) zeros[n][e] *= alpha[e];
        }
#pragma unroll
        for (int d = 0; d < kTiles; ++d) {
#pragma unroll
          for (int e = 0; e < 4; ++e) o[d][n][e] *= alpha[e % 2];
        }
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        // From the maximum before scaling: far from 0, half an ulp of a scaled maximum is no small exponent. No key
        // yet: any finite origin will do, and exp(-Inf) must not become exp(-Inf + Inf).
        const float origin = max[n][e % 2] == -Infinity() ? 0.f : max[n][e % 2];
        s[n][e] = Exp2((s[n][e] - origin) * rule.to_log2);
        sum[n][e % 2] += s[n][e];
        if constexpr (kRowParams) {
          zeros[n][e % 2] = fmaf(s[n][e], scale[e / 2].zero, zeros[n][e % 2]);
          s[n][e] *= scale[e / 2].scale * weight_unit;
        }
      }
      p[n][0] = TransposeMatrix(Pack<Operand>(s[n][0], s[n][1]));
      p[n][1] = TransposeMatrix(Pack<Operand>(s[n][2], s[n][3]));
    }
  }

  // The unit of weights follows the largest scale of the warp's values, as far as it must: a probability of 1 then has
  // a weight of up to 2^15, and values 2^29 times smaller than others still have all bits of theirs.
  __device__ void ChangeWeightUnit(float scale) {
    for (int step = 4; step < 32; step *= 2) scale = fmaxf(scale, __shfl_xor_sync(~0u, scale, step));
    const int exponent = static_cast<int>(FloatToBits(scale) >> 23);  // scale < 2^(exponent - 126)
    const float next = BitsToFloat(static_cast<uint32_t>(::max(254 + 14 - exponent, 1)) << 23);
    const float factor = next / weight_unit;
#pragma unroll
    for (int n = 0; n < kColumns; ++n) {
#pragma unroll
      for (int d = 0; d < kTiles; ++d) {
#pragma unroll
        for (int e = 0; e < 4; ++e) o[d][n][e] *= factor;
      }
    }
    weight_unit = next;
  }

  // As in prefill: values of Inf or NaN must not meet the probability 0 of a row that does not see their key. They are
  // added to the rows that do and zeroed in the tile. Only needed where rows see different keys: what none of them sees
  // was never loaded and is zero.
  //
  // int8, int4: a decoded row is finite or all NaN, as its parameters are. Before probabilities meet these.
  __device__ void TakeOutRows(const KeyBlockView& block, int slot) {
    const auto finite = [&](int key) {
      const RowScale scale = ScaleOf(slot, 1, key);
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
        for (int e = 0; e < 4; ++e) {
          if (!Sees(shared.rows, 8 * n + lane % 4 * 2 + e % 2, block, key)) continue;
#pragma unroll
          for (int d = 0; d < kDim / 16; ++d) o[d][n][e] = QuietNan();
        }
      }
    }
    __syncwarp();
    if (found) ring.row_params[slot][1][lane % kWarpKeys] = 0;
    __syncwarp();
  }

  // 16 bits and fp8. False: fp8 with a scale of Inf or NaN, no value is left to multiply.
  __device__ bool TakeOutElements(const KeyBlockView& block, int slot) {
    using Stored = std::conditional_t<kFp8, fp8_e4m3, E>;
    constexpr int kPerChunk = 16 / sizeof(Stored);
    unsigned char* tile = ring.tile[slot][1];
    const bool all = ValuesAreNotFinite();
    bool found = all;
    for (int i = lane; i < Traits::kTileBytes / 16; i += 32) {
      found = found || HasNonFinite<Stored>(reinterpret_cast<const uint4*>(tile)[i]);
    }
    if (!__any_sync(~0u, found)) return true;
    const auto value = [&](Stored x) {
      if constexpr (kFp8) {
        return DecodeFp8<E>(x, head_scale[1]);
      } else {
        return ToFloat(x);
      }
    };
    const Stored* elements = reinterpret_cast<const Stored*>(tile);
#pragma unroll 1
    for (int key = 0; key < kWarpKeys; ++key) {
#pragma unroll
      for (int n = 0; n < kColumns; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (!Sees(shared.rows, 8 * n + lane % 4 * 2 + e % 2, block, key)) continue;
#pragma unroll
          for (int d = 0; d < kDim / 16; ++d) {
            const int column = ValueColumn(d, e);
            const int chunk = SwizzledChunk<kStoredChunks>(key, column / kPerChunk);
            const float v = value(elements[chunk * kPerChunk + column % kPerChunk]);
            if (!IsFinite(v)) o[d][n][e] += v;
          }
        }
      }
    }
    if (all) return false;
    __syncwarp();
    for (int i = lane; i < kWarpKeys * kDim; i += 32) {
      Stored& x = reinterpret_cast<Stored*>(tile)[i];
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
            query_sum[n][e] = shared.code_query.sum[row];
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

  // After LookUp(0). take_query() leaves the query in place by TakeQuery(), and what is loaded from step `new_step` on
  // in memory: once, with a ring full of loads on their way, or those of the steps before new_step. The first loads and
  // those of the loop are one piece of code: it takes longer to arrive than to run.
  template <class TakeQuery>
  __device__ void Run(int new_step, TakeQuery take_query) {
    const int query_step = ::min(::max(new_step, 0) - (kSteps - 1), 0);  // max: of the rows, is a member
#pragma unroll 1
    for (int step = 1 - kSteps; step < num_blocks || step <= 0; ++step) {
      if (step == query_step) {
        take_query();
        Reset();
      }
      WaitCopies<kSteps - 2>();
      __syncwarp();
      Load(step + kSteps - 1);
      if (step < 0 || num_blocks == 0) continue;
      const int slot = step % kSteps;
      float s[kColumns][4] = {};
      MultiplyKeys(slot, s);
      const uint32_t groups = mapped & 3u;
      const bool partial = groups != 3u || !IsCommon(step);
      const auto block = [&] {
        const int run = blocks.RunOf(first_block + step);
        return KeyBlockView{view.runs[run],
                            run,
                            FirstKey(step),
                            groups,
                            nullptr,
                            view.has_tree ? params.score.tree_mask : nullptr,
                            params.score.tree_columns,
                            view.position};
      };
      if (partial || rule.modified) ModifyAndMask(block(), partial, s);
      const bool look = (partial && rows_differ) || ValuesAreNotFinite();
      if constexpr (kRowParams) {
        if (look) TakeOutRows(block(), slot);
      }
      uint32_t p[kColumns][2];
      Softmax(slot, s, p);
      if constexpr (kRowParams) {
        MultiplyValues(slot, p);
      } else {
        if (!look || TakeOutElements(block(), slot)) MultiplyValues(slot, p);
      }
    }
    WaitCopies<0>();
  }

  // Leaves the warp's results for the block; the rings are no longer used by then.
  __device__ void Publish() {
    WarpResults<Traits>& results = shared.results;
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
          results.max[warp][row] = max[n][e] * rule.to_log2;
          results.sum[warp][row] = sum[n][e];
        }
      }
#pragma unroll
      for (int d = 0; d < kDim / 16; ++d) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float value = o[d][n][e];
          if constexpr (kRowParams) {
            const float codes = (value - o[kTiles - 1][n][e]) * (e < 2 ? kCodeUnit : kCodeUnit / (1 << kOddShift));
            value = fmaf(codes, value_scale, zeros[n][e % 2]);
          } else if constexpr (kFp8) {
            value *= value_scale;
          }
          results.o[warp][8 * n + lane % 4 * 2 + e % 2][ValueColumn(d, e)] = value;
        }
      }
    }
  }
};

}  // namespace turboattn::decode

#endif  // TURBOATTN_KERNELS_DECODE_MAINLOOP_SM80_CUH_

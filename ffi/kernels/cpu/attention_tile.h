// The inner part of CPU attention: a tile of query rows takes in one block of keys. attention_tile.inl holds the code;
// it is compiled once for each instruction set (attention_tile.cc) and chosen at run time.
#ifndef TURBOATTN_KERNELS_CPU_ATTENTION_TILE_H_
#define TURBOATTN_KERNELS_CPU_ATTENTION_TILE_H_

#include <cstdint>

#include "core/params.h"

namespace turboattn::cpu {

constexpr int kBlockKeys =
    64;  // keys a block; 64 keys of K^T and V in float32 at D = 128 are 2 x 32 KB, inside any recent L2
constexpr int kTileRows = 96;  // (token, head) rows of a tile at most; a multiple of the 6 rows of a register tile
constexpr int64_t kPad = 16;   // rows of float32 scratch are padded with zeros to a multiple of this, the widest vector

constexpr int64_t Padded(int64_t elements) { return (elements + kPad - 1) / kPad * kPad; }

// Up to kBlockKeys keys that exist, as addresses of stored rows, in ascending position.
struct KeyBlock {
  int count;
  const void* key[kBlockKeys];
  const void* value[kBlockKeys];
  const void* key_params[kBlockKeys];  // int8/int4: the row's (scale, zero), E; fp8: the head's float32 scale
  const void* value_params[kBlockKeys];
  int64_t position[kBlockKeys];
  int32_t segment[kBlockKeys];  // set when rows have segments
};

// What does not change from block to block.
struct TileSpec {
  DType dtype;     // E
  DType kv_dtype;  // of stored rows
  int64_t head_dim;
  int64_t value_dim;
  float scale;
  float soft_cap;  // 0: off
  bool has_alibi;
  bool has_segments;
  bool has_tree;
  int64_t tree_columns;
};

// One tile of query rows. All arrays are float32 scratch unless noted.
struct Tile {
  int rows;                  // 1 .. kTileRows
  float* query;              // [rows, Padded(D)]
  float* max;                // [rows] result
  float* sum;                // [rows] result
  float* acc;                // [rows, Padded(Dv)] result: unnormalised sum of p * v
  int64_t* visible_lo;       // [rows] positions [lo, hi) that the row sees
  int64_t* visible_hi;       // [rows]
  int64_t* position;         // [rows]
  float* slope;              // [rows], set when has_alibi
  int32_t* segment;          // [rows], set when has_segments
  const uint8_t** tree;      // [rows] rows of the tree mask, set when has_tree
  int64_t tree_start;        // position of its column 0, the sequence's first new token
  float* score;              // [rows, kBlockKeys]
  float* alpha;              // [rows]
  float* key;                // [kBlockKeys, Padded(D)]
  float* key_t;              // [Padded(D), kBlockKeys]
  float* value;              // [kBlockKeys, Padded(Dv)]
  float* zeros;              // [Padded(Dv)]
  float* ones;               // [rows]
  const float** key_t_rows;  // [Padded(D)] addresses of the rows of key_t
};

// next: the block that comes after, which is only prefetched; its count may be 0.
using TakeBlock = void (*)(const TileSpec& spec, const KeyBlock& block, const KeyBlock& next, const Tile& tile);

// The best version for this machine.
TakeBlock SelectTakeBlock();

}  // namespace turboattn::cpu

#endif  // TURBOATTN_KERNELS_CPU_ATTENTION_TILE_H_

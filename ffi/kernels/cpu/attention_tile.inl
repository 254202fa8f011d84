// One tile of query rows takes in one block of keys: decode the stored rows to float32, scores, online softmax, weighted values.
// Included by attention_tile.cc inside a namespace that defines kLanes, Vec, IVec, Fma, kGemmRows and kGemmVectors.

#define TA_INLINE static inline __attribute__((always_inline))

// -- vectors ---------------------------------------------------------------------------------------------------------------------------------

TA_INLINE Vec Load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
TA_INLINE void Store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }
TA_INLINE Vec Splat(float x) { return Vec{} + x; }

TA_INLINE float Sum(Vec v) {
  float lanes[kLanes];
  Store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  }
  return lanes[0];
}

TA_INLINE float Max(Vec v) {
  float lanes[kLanes];
  Store(lanes, v);
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int i = 0; i < width; ++i) lanes[i] = lanes[i + width] > lanes[i] ? lanes[i + width] : lanes[i];
  }
  return lanes[0];
}

// e^x for x <= 88, 2 ulp; below -87.3 it is 0; NaN stays NaN. e^x = 2^n e^r with r in [-ln2/2, ln2/2], e^r = 1 + r + r^2 q(r), q of degree 4 with
// an error of 6e-8 (minimax, so 8e-9 in e^r).
TA_INLINE Vec Exp(Vec x) {
  const Vec magic = Splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const Vec shifted = Fma(x, Splat(1.44269504f), magic);
  const Vec n = shifted - magic;
  Vec r = Fma(n, Splat(-0.693359375f), x);  // ln 2 in two parts, the first with 9 bits: n times it is exact
  r = Fma(n, Splat(2.12194440e-4f), r);
  Vec q = Splat(0x1.6d7548p-10f);
  q = Fma(q, r, Splat(0x1.120b70p-7f));
  q = Fma(q, r, Splat(0x1.5554b8p-5f));
  q = Fma(q, r, Splat(0x1.5554dcp-3f));
  q = Fma(q, r, Splat(0.5f));
  const Vec p = Fma(q * r, r, r) + 1.f;
  const IVec exponent = ((IVec)shifted - (IVec)magic + 127) << 23;
  return x < -87.3f ? Vec{} : p * (Vec)exponent;
}

// tanh(y), 2 ulp: an odd polynomial near 0, where 1 - 2 / (e^2y + 1) would cancel.
TA_INLINE Vec Tanh(Vec y) {
  const Vec magnitude = y < 0.f ? -y : y;
  const Vec z = y * y;
  Vec q = Splat(-0.00611318f);
  q = Fma(q, z, Splat(0.02101007f));
  q = Fma(q, z, Splat(-0.05385407f));
  q = Fma(q, z, Splat(0.13332795f));
  q = Fma(q, z, Splat(-0.33333329f));
  const Vec small = Fma(q * z, y, y);
  const Vec bounded = magnitude > 10.f ? Splat(10.f) : magnitude;  // tanh(10) rounds to 1
  const Vec large = 1.f - 2.f / (Exp(bounded + bounded) + 1.f);
  return magnitude < 0.625f ? small : y < 0.f ? -large : large;
}

// -- stored rows to float32 ------------------------------------------------------------------------------------------------------------------

struct Rows {
  const void* const* data;    // [count]
  const void* const* params;  // [count]
  int count;
  int64_t elements;
  float* out;  // [count, Padded(elements)]; columns past `elements` are zero already and stay so
};

template <class E>
void LoadPlain(const Rows& rows) {
  for (int i = 0; i < rows.count; ++i) {
    const E* row = static_cast<const E*>(rows.data[i]);
    float* out = rows.out + i * Padded(rows.elements);
    for (int64_t d = 0; d < rows.elements; ++d) out[d] = ToFloat(row[d]);
  }
}

template <class E>
TA_INLINE RowScale LoadRowScale(const void* params) {
  const E* pair = static_cast<const E*>(params);
  return {ToFloat(pair[0]), ToFloat(pair[1])};
}

template <class E>
void LoadInt8(const Rows& rows) {
  for (int i = 0; i < rows.count; ++i) {
    const uint8_t* row = static_cast<const uint8_t*>(rows.data[i]);
    const RowScale scale = LoadRowScale<E>(rows.params[i]);
    float* out = rows.out + i * Padded(rows.elements);
    for (int64_t d = 0; d < rows.elements; ++d) out[d] = DecodeCode<E>(row[d], scale);
  }
}

template <class E>
void LoadInt4(const Rows& rows) {
  for (int i = 0; i < rows.count; ++i) {
    const uint8_t* row = static_cast<const uint8_t*>(rows.data[i]);
    const RowScale scale = LoadRowScale<E>(rows.params[i]);
    float* out = rows.out + i * Padded(rows.elements);
    for (int64_t d = 0; d < rows.elements; d += 8) {
      uint32_t packed;
      std::memcpy(&packed, row + d / 2, 4);
      for (int e = 0; e < 8; ++e) out[d + e] = DecodeCode<E>(static_cast<uint8_t>((packed >> Int4Shift(e)) & 0xf), scale);
    }
  }
}

template <class E>
void LoadFp8(const Rows& rows) {
  for (int i = 0; i < rows.count; ++i) {
    const fp8_e4m3* row = static_cast<const fp8_e4m3*>(rows.data[i]);
    const float scale = *static_cast<const float*>(rows.params[i]);
    float* out = rows.out + i * Padded(rows.elements);
    for (int64_t d = 0; d < rows.elements; ++d) out[d] = DecodeFp8<E>(row[d], scale);
  }
}

template <class E>
void LoadAs(DType kv_dtype, const Rows& rows) {
  switch (kv_dtype) {
    case DType::kInt8: return LoadInt8<E>(rows);
    case DType::kInt4: return LoadInt4<E>(rows);
    case DType::kFloat8E4M3: return LoadFp8<E>(rows);
    default: return LoadPlain<E>(rows);
  }
}

static void LoadRows(const TileSpec& spec, const Rows& rows) {
  switch (spec.dtype) {
    case DType::kBfloat16: return LoadAs<bf16>(spec.kv_dtype, rows);
    case DType::kFloat16: return LoadAs<fp16>(spec.kv_dtype, rows);
    default: return LoadAs<float>(spec.kv_dtype, rows);
  }
}

// Addresses of the block's rows in float32: the stored rows themselves where they can be used as they are, else the buffer they are decoded to.
static void FloatRows(const TileSpec& spec, const Rows& rows, const float** addresses) {
  const bool direct = spec.kv_dtype == DType::kFloat32 && rows.elements % kLanes == 0;
  if (!direct) LoadRows(spec, rows);
  for (int i = 0; i < rows.count; ++i) {
    addresses[i] = direct ? static_cast<const float*>(rows.data[i]) : rows.out + i * Padded(rows.elements);
  }
}

// -- matrix products -------------------------------------------------------------------------------------------------------------------------

// c[r, 0 .. NV*kLanes) = (beta ? beta[r] * c : 0) + sum_k a[r, k] * b[k][...] for Rows rows.
template <int kRows, int kVectors>
TA_INLINE void GemmTile(int64_t depth, const float* a, int64_t lda, const float* const* b, int64_t column, float* c, int64_t ldc, const float* beta) {
  Vec sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sum[r][v] = beta == nullptr ? Vec{} : Load(c + r * ldc + v * kLanes) * beta[r];
  }
  for (int64_t k = 0; k < depth; ++k) {
    const float* row = b[k] + column;
    Vec x[kVectors];
    for (int v = 0; v < kVectors; ++v) x[v] = Load(row + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      const Vec factor = Splat(a[r * lda + k]);
      for (int v = 0; v < kVectors; ++v) sum[r][v] = Fma(factor, x[v], sum[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) Store(c + r * ldc + v * kLanes, sum[r][v]);
  }
}

template <int kRows>
void GemmRows(int64_t depth, int64_t vectors, const float* a, int64_t lda, const float* const* b, float* c, int64_t ldc, const float* beta) {
  constexpr int kWide = kRows <= 2 ? 2 * kGemmVectors : kGemmVectors;  // few rows: more columns keep as many sums in flight
  int64_t v = 0;
  for (; v + kWide <= vectors; v += kWide) GemmTile<kRows, kWide>(depth, a, lda, b, v * kLanes, c + v * kLanes, ldc, beta);
  for (; v < vectors; ++v) GemmTile<kRows, 1>(depth, a, lda, b, v * kLanes, c + v * kLanes, ldc, beta);
}

static void Gemm(int rows, int64_t depth, int64_t vectors, const float* a, int64_t lda, const float* const* b, float* c, int64_t ldc,
                 const float* beta) {
  for (int r = 0; r < rows;) {
    const float* ar = a + r * lda;
    float* cr = c + r * ldc;
    const float* br = beta == nullptr ? nullptr : beta + r;
    const int left = rows - r;
    if (kGemmRows == 6 && left >= 6) {
      GemmRows<kGemmRows>(depth, vectors, ar, lda, b, cr, ldc, br), r += 6;
    } else if (left >= 4) {
      GemmRows<4>(depth, vectors, ar, lda, b, cr, ldc, br), r += 4;
    } else if (left >= 2) {
      GemmRows<2>(depth, vectors, ar, lda, b, cr, ldc, br), r += 2;
    } else {
      GemmRows<1>(depth, vectors, ar, lda, b, cr, ldc, br), r += 1;
    }
  }
}

// score[r, j] = query[r] . key[j] for kRows rows, four keys at a time; `keys` has kBlockKeys valid addresses.
template <int kRows>
void DotRows(int64_t width, const float* query, const float* const* keys, int count, float* score) {
  for (int j = 0; j < count; j += 4) {
    Vec sum[kRows][4];
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < 4; ++i) sum[r][i] = Vec{};
    }
    const float *k0 = keys[j], *k1 = keys[j + 1], *k2 = keys[j + 2], *k3 = keys[j + 3];
    for (int64_t d = 0; d < width; d += kLanes) {
      const Vec x[4] = {Load(k0 + d), Load(k1 + d), Load(k2 + d), Load(k3 + d)};
      for (int r = 0; r < kRows; ++r) {
        const Vec q = Load(query + r * Padded(width) + d);
        for (int i = 0; i < 4; ++i) sum[r][i] = Fma(q, x[i], sum[r][i]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < 4; ++i) score[r * kBlockKeys + j + i] = Sum(sum[r][i]);
    }
  }
}

static void Dot(int rows, int64_t width, const float* query, const float* const* keys, int count, float* score) {
  for (int r = 0; r < rows;) {
    const float* q = query + r * Padded(width);
    float* s = score + r * kBlockKeys;
    const int left = rows - r;
    if (left >= 4) {
      DotRows<4>(width, q, keys, count, s), r += 4;
    } else if (left >= 2) {
      DotRows<2>(width, q, keys, count, s), r += 2;
    } else {
      DotRows<1>(width, q, keys, count, s), r += 1;
    }
  }
}

// key_t[d, j] = keys[j][d]. Columns past `count` keep what they held; their scores are never used.
static void Transpose(int64_t width, const float* const* keys, int count, float* key_t) {
  for (int64_t d0 = 0; d0 < width; d0 += kLanes) {
    for (int j = 0; j < count; ++j) {
      const float* row = keys[j] + d0;
      for (int d = 0; d < kLanes; ++d) key_t[(d0 + d) * kBlockKeys + j] = row[d];
    }
  }
}

// -- softmax ---------------------------------------------------------------------------------------------------------------------------------

static bool Sees(const TileSpec& spec, const KeyBlock& block, const Tile& tile, int r, int j) {
  if (spec.has_segments && block.segment[j] != tile.segment[r]) return false;
  return block.position[j] >= tile.visible_lo[r] && block.position[j] < tile.visible_hi[r];
}

// Some key of the block is invisible to some row of the tile.
static bool IsPartial(const TileSpec& spec, const KeyBlock& block, const Tile& tile) {
  if (spec.has_segments) return true;
  // Ends grow with the row: the last row has the largest lo, the first the smallest hi.
  return block.position[0] < tile.visible_lo[tile.rows - 1] || block.position[block.count - 1] >= tile.visible_hi[0];
}

// Scores of row r: scale, soft cap, ALiBi, and -Inf for the keys that the row does not see.
static void FinishScores(const TileSpec& spec, const KeyBlock& block, const Tile& tile, int r, bool partial) {
  float* score = tile.score + r * kBlockKeys;
  const int padded = (block.count + kLanes - 1) / kLanes * kLanes;
  for (int j = 0; j < padded; j += kLanes) {
    Vec x = Load(score + j) * spec.scale;
    if (spec.soft_cap != 0.f) x = Tanh(x / spec.soft_cap) * spec.soft_cap;
    Store(score + j, x);
  }
  if (spec.has_alibi) {
    for (int j = 0; j < block.count; ++j) {
      const int64_t distance = tile.position[r] - block.position[j];
      score[j] -= tile.slope[r] * static_cast<float>(distance < 0 ? -distance : distance);
    }
  }
  if (partial) {
    const int32_t lo = tile.visible_lo[r], hi = tile.visible_hi[r];
    for (int j = 0; j < block.count; ++j) {
      const bool seen = (block.position[j] >= lo) & (block.position[j] < hi);
      score[j] = seen ? score[j] : -INFINITY;
    }
    if (spec.has_segments) {
      for (int j = 0; j < block.count; ++j) score[j] = block.segment[j] == tile.segment[r] ? score[j] : -INFINITY;
    }
  }
  for (int j = block.count; j < padded; ++j) score[j] = -INFINITY;
}

// Scores become probabilities relative to the row's new maximum; alpha[r] rescales what was summed before.
static void UpdateSoftmax(const KeyBlock& block, const Tile& tile, int r) {
  float* score = tile.score + r * kBlockKeys;
  const int padded = (block.count + kLanes - 1) / kLanes * kLanes;
  Vec largest = Splat(tile.max[r]);
  for (int j = 0; j < padded; j += kLanes) {
    const Vec x = Load(score + j);
    largest = x > largest ? x : largest;
  }
  const float max = Max(largest);
  const float origin = max == -INFINITY ? 0.f : max;  // a row that has seen nothing: exp(-Inf - 0) = 0
  Vec sum = {};
  for (int j = 0; j < padded; j += kLanes) {
    const Vec p = Exp(Load(score + j) - origin);
    Store(score + j, p);
    sum += p;
  }
  const float alpha = tile.max[r] == -INFINITY ? 0.f : std::exp(tile.max[r] - origin);
  tile.alpha[r] = alpha;
  tile.sum[r] = tile.sum[r] * alpha + Sum(sum);
  tile.max[r] = max;
}

// -- values ----------------------------------------------------------------------------------------------------------------------------------

static bool AllFinite(const float* row, int64_t elements) {
  IVec bad = {};
  for (int64_t d = 0; d < elements; d += kLanes) {
    IVec bits;
    std::memcpy(&bits, row + d, sizeof(bits));
    bad |= (bits & 0x7f800000) == 0x7f800000;
  }
  int32_t lanes[kLanes], any = 0;
  std::memcpy(lanes, &bad, sizeof(lanes));
  for (int i = 0; i < kLanes; ++i) any |= lanes[i];
  return any == 0;
}

// In a block that not every row sees, 0 * NaN must not reach the rows that do not: such values leave the product and are added row by row.
static void AddNonFinite(const TileSpec& spec, const KeyBlock& block, const Tile& tile, const float* const* values, const bool* excluded) {
  const int64_t width = Padded(spec.value_dim);
  for (int j = 0; j < block.count; ++j) {
    if (!excluded[j]) continue;
    for (int r = 0; r < tile.rows; ++r) {
      if (!Sees(spec, block, tile, r, j)) continue;
      const float p = tile.score[r * kBlockKeys + j];
      float* acc = tile.acc + r * width;
      for (int64_t d = 0; d < spec.value_dim; ++d) acc[d] += p * values[j][d];
    }
  }
}

static void AddValues(const TileSpec& spec, const KeyBlock& block, const Tile& tile, bool partial) {
  const float* values[kBlockKeys];
  FloatRows(spec, {block.value, block.value_params, block.count, spec.value_dim, tile.value}, values);
  const int64_t width = Padded(spec.value_dim);
  const int64_t used = (spec.value_dim + kLanes - 1) / kLanes * kLanes;
  bool excluded[kBlockKeys] = {};
  bool any_excluded = false;
  const float* rows[kBlockKeys] = {};
  for (int j = 0; j < block.count; ++j) {
    excluded[j] = partial && !AllFinite(values[j], used);
    any_excluded |= excluded[j];
    rows[j] = excluded[j] ? tile.zeros : values[j];
  }
  Gemm(tile.rows, block.count, used / kLanes, tile.score, kBlockKeys, rows, tile.acc, width, tile.alpha);
  if (any_excluded) AddNonFinite(spec, block, tile, values, excluded);
}

void Take(const TileSpec& spec, const KeyBlock& block, const Tile& tile) {
  const float* keys[kBlockKeys];
  FloatRows(spec, {block.key, block.key_params, block.count, spec.head_dim, tile.key}, keys);
  const int64_t width = (spec.head_dim + kLanes - 1) / kLanes * kLanes;
  constexpr int kDotRows = 8;  // up to here a transposed copy of the block costs more than the sums across lanes
  if (tile.rows <= kDotRows) {
    for (int j = block.count; j % 4 != 0; ++j) keys[j] = keys[block.count - 1];
    Dot(tile.rows, width, tile.query, keys, block.count, tile.score);
  } else {
    Transpose(width, keys, block.count, tile.key_t);
    Gemm(tile.rows, spec.head_dim, (block.count + kLanes - 1) / kLanes, tile.query, Padded(spec.head_dim), tile.key_t_rows, tile.score, kBlockKeys,
         nullptr);
  }
  const bool partial = IsPartial(spec, block, tile);
  for (int r = 0; r < tile.rows; ++r) {
    FinishScores(spec, block, tile, r, partial);
    UpdateSoftmax(block, tile, r);
  }
  AddValues(spec, block, tile, partial);
}

#undef TA_INLINE

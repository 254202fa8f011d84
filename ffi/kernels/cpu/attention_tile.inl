// One tile of query rows takes in one block of keys: decode the stored rows to float32, scores, online softmax,
// weighted values. Included by attention_tile.cc inside a namespace that defines kLanes, Vec, IVec, Fma, Fold,
// LoadCodes, kGemmRows and kGemmVectors.

// -- vectors --

TA_INLINE Vec Load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
TA_INLINE void Store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }
TA_INLINE Vec Splat(float x) { return Vec{} + x; }

TA_INLINE float Sum(Vec v) {
  const Vec4 x = Fold(v, [](auto a, auto b) { return a + b; });
  return (x[0] + x[2]) + (x[1] + x[3]);
}

TA_INLINE float Max(Vec v) {
  const Vec4 x = Fold(v, [](auto a, auto b) { return a > b ? a : b; });
  const float even = x[0] > x[2] ? x[0] : x[2], odd = x[1] > x[3] ? x[1] : x[3];
  return even > odd ? even : odd;
}

TA_INLINE bool Any(IVec mask) {
  uint64_t words[sizeof(IVec) / 8], any = 0;
  std::memcpy(words, &mask, sizeof(words));
  for (uint64_t word : words) any |= word;
  return any != 0;
}

TA_INLINE Vec4 ZipLow(Vec4 a, Vec4 b) { return __builtin_shufflevector(a, b, 0, 4, 1, 5); }
TA_INLINE Vec4 ZipHigh(Vec4 a, Vec4 b) { return __builtin_shufflevector(a, b, 2, 6, 3, 7); }

// Sums of four vectors, one a lane.
TA_INLINE Vec4 Sum4(Vec a, Vec b, Vec c, Vec d) {
  const auto add = [](auto x, auto y) { return x + y; };
  const Vec4 a4 = Fold(a, add), b4 = Fold(b, add), c4 = Fold(c, add), d4 = Fold(d, add);
  const Vec4 ab = ZipLow(a4, b4) + ZipHigh(a4, b4);  // a02 b02 a13 b13
  const Vec4 cd = ZipLow(c4, d4) + ZipHigh(c4, d4);
  return __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7);
}

// e^x for x <= 88, 2 ulp; below -87.3 it is 0; NaN stays NaN. e^x = 2^n e^r with r in [-ln2/2, ln2/2], e^r = 1 + r +
// r^2 q(r), q of degree 4 with an error of 6e-8 (minimax, so 8e-9 in e^r).
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

// -- stored rows to float32 --

struct Rows {
  const void* const* data;    // [count]
  const void* const* params;  // [count]
  int count;
  int64_t elements;
  float* out;               // [count, Padded(elements)]; columns past `elements` are zero already and stay so
  const void* const* next;  // [next_count] rows of the next block, to be fetched while these are worked on
  int next_count;
  int64_t row_bytes;
};

TA_INLINE void Prefetch(const Rows& rows, int i) {
  if (i >= rows.next_count) return;
  const char* row = static_cast<const char*>(rows.next[i]);
  for (int64_t byte = 0; byte < rows.row_bytes; byte += 64) __builtin_prefetch(row + byte, 0, 2);
}

// Rounds float32 values to E; they must be NaN or in E's range.
template <class E, class V, class I>
TA_INLINE void RoundFinite(V& x) {
  if constexpr (std::is_same_v<E, bf16>) {
    const I bits = (I)x;
    x = (V)((bits + 0x7fff + ((bits >> 16) & 1)) & ~0xffff);
  } else if constexpr (std::is_same_v<E, fp16>) {
    const I bits = (I)x, magnitude = bits & 0x7fffffff;
    const I normal = (magnitude + 0xfff + ((magnitude >> 13) & 1)) & ~0x1fff;
    const I small = (I)(((V)magnitude + 0.5f) - 0.5f);  // below 2^-14 an fp16 step is 2^-24, the ulp of 0.5
    x = (V)((magnitude < 0x38800000 ? small : normal) | (bits & ~0x7fffffff));
  }
}

template <class E>
TA_INLINE RowScale LoadRowScale(const void* params) {
  const E* pair = static_cast<const E*>(params);
  return {ToFloat(pair[0]), ToFloat(pair[1])};
}

// No code of the row can leave E's range, nor is any parameter Inf or NaN: DecodeCode needs none of its special cases.
template <class E>
TA_INLINE bool IsTame(RowScale scale) {
  return std::fabs(scale.scale) * 256.f + std::fabs(scale.zero) < MaxFinite<E>();
}

template <class E>
void LoadPlain(const Rows& rows) {
  for (int i = 0; i < rows.count; ++i) {
    Prefetch(rows, i);
    const E* row = static_cast<const E*>(rows.data[i]);
    float* out = rows.out + i * Padded(rows.elements);
    for (int64_t d = 0; d < rows.elements; ++d) out[d] = ToFloat(row[d]);
  }
}

template <class E>
void LoadInt8(const Rows& rows) {
  for (int i = 0; i < rows.count; ++i) {
    Prefetch(rows, i);
    const uint8_t* row = static_cast<const uint8_t*>(rows.data[i]);
    const RowScale scale = LoadRowScale<E>(rows.params[i]);
    float* out = rows.out + i * Padded(rows.elements);
    int64_t d = 0;
    if (IsTame<E>(scale)) {
      for (; d + kLanes <= rows.elements; d += kLanes) {
        Vec x = __builtin_convertvector(LoadCodes(row + d), Vec) * scale.scale + scale.zero;
        RoundFinite<E, Vec, IVec>(x);
        Store(out + d, x);
      }
    }
    for (; d < rows.elements; ++d) out[d] = DecodeCode<E>(row[d], scale);
  }
}

template <class E>
void LoadInt4(const Rows& rows) {
  const IVec8 shifts = {Int4Shift(0), Int4Shift(1), Int4Shift(2), Int4Shift(3),
                        Int4Shift(4), Int4Shift(5), Int4Shift(6), Int4Shift(7)};
  for (int i = 0; i < rows.count; ++i) {
    Prefetch(rows, i);
    const uint8_t* row = static_cast<const uint8_t*>(rows.data[i]);
    const RowScale scale = LoadRowScale<E>(rows.params[i]);
    const bool tame = IsTame<E>(scale);
    float* out = rows.out + i * Padded(rows.elements);
    for (int64_t d = 0; d < rows.elements; d += 8) {
      int32_t packed;
      std::memcpy(&packed, row + d / 2, 4);
      const IVec8 codes = ((IVec8{} + packed) >> shifts) & 0xf;
      if (tame) {
        Vec8 x = __builtin_convertvector(codes, Vec8) * scale.scale + scale.zero;
        RoundFinite<E, Vec8, IVec8>(x);
        std::memcpy(out + d, &x, sizeof(x));
      } else {
        for (int e = 0; e < 8; ++e) out[d + e] = DecodeCode<E>(static_cast<uint8_t>(codes[e]), scale);
      }
    }
  }
}

template <class E>
void LoadFp8(const Rows& rows) {
  for (int i = 0; i < rows.count; ++i) {
    Prefetch(rows, i);
    const fp8_e4m3* row = static_cast<const fp8_e4m3*>(rows.data[i]);
    const float scale = *static_cast<const float*>(rows.params[i]);
    const bool tame = IsTame<E>({scale * 2.f, 0.f});  // 448 < 2 * 256
    float* out = rows.out + i * Padded(rows.elements);
    int64_t d = 0;
    for (; tame && d + kLanes <= rows.elements; d += kLanes) {
      const IVec codes = LoadCodes(row + d), body = codes & 0x7f;
      const Vec subnormal = __builtin_convertvector(body, Vec) * 0x1p-9f;
      const Vec normal = (Vec)((body << 20) + (120 << 23));
      const Vec magnitude = body == 0x7f ? Splat(QuietNan()) : body < 8 ? subnormal : normal;
      Vec value = (Vec)((IVec)magnitude | ((codes & 0x80) << 24)) * scale;
      RoundFinite<E, Vec, IVec>(value);
      Store(out + d, value);
    }
    for (; d < rows.elements; ++d) out[d] = DecodeFp8<E>(row[d], scale);
  }
}

template <class E>
void LoadAs(DType kv_dtype, const Rows& rows) {
  switch (kv_dtype) {
    case DType::kInt8:
      return LoadInt8<E>(rows);
    case DType::kInt4:
      return LoadInt4<E>(rows);
    case DType::kFloat8E4M3:
      return LoadFp8<E>(rows);
    default:
      return LoadPlain<E>(rows);
  }
}

static void LoadRows(const TileSpec& spec, const Rows& rows) {
  switch (spec.dtype) {
    case DType::kBfloat16:
      return LoadAs<bf16>(spec.kv_dtype, rows);
    case DType::kFloat16:
      return LoadAs<fp16>(spec.kv_dtype, rows);
    default:
      return LoadAs<float>(spec.kv_dtype, rows);
  }
}

// Addresses of the block's rows in float32: the stored rows themselves where they can be used as they are, else the
// buffer they are decoded to.
static void FloatRows(const TileSpec& spec, const Rows& rows, const float** addresses) {
  const bool direct = spec.kv_dtype == DType::kFloat32 && rows.elements % kLanes == 0;
  if (!direct) LoadRows(spec, rows);
  for (int i = 0; i < rows.count; ++i) {
    if (direct) Prefetch(rows, i);
    addresses[i] = direct ? static_cast<const float*>(rows.data[i]) : rows.out + i * Padded(rows.elements);
  }
}

static Rows KeyRows(const TileSpec& spec, const KeyBlock& block, const KeyBlock& next, const Tile& tile) {
  return {block.key, block.key_params, block.count, spec.head_dim,
          tile.key,  next.key,         next.count,  RowBytes(spec.kv_dtype, spec.head_dim)};
}

static Rows ValueRows(const TileSpec& spec, const KeyBlock& block, const KeyBlock& next, const Tile& tile) {
  return {block.value, block.value_params, block.count, spec.value_dim,
          tile.value,  next.value,         next.count,  RowBytes(spec.kv_dtype, spec.value_dim)};
}

// -- matrix products --

// c[r, 0 .. kVectors * kLanes) = (beta ? beta[r] * c : 0) + sum_k a[r, k] * b[k][...] for kRows rows. The sum starts
// from 0 and meets c once, so errors grow with the depth of one call and not with all that c has taken in.
template <int kRows, int kVectors>
TA_INLINE void GemmTile(int64_t depth, const float* a, int64_t lda, const float* const* b, int64_t column, float* c,
                        int64_t ldc, const float* beta) {
  Vec sum[kRows][kVectors];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVectors; ++v) sum[r][v] = Vec{};
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
    for (int v = 0; v < kVectors; ++v) {
      float* out = c + r * ldc + v * kLanes;
      Store(out, beta == nullptr ? sum[r][v] : Fma(Load(out), Splat(beta[r]), sum[r][v]));
    }
  }
}

template <int kRows>
void GemmRows(int64_t depth, int64_t vectors, const float* a, int64_t lda, const float* const* b, float* c, int64_t ldc,
              const float* beta) {
  constexpr int kWide =
      kRows <= 2 ? 2 * kGemmVectors : kGemmVectors;  // few rows: more columns keep as many sums in flight
  int64_t v = 0;
  for (; v + kWide <= vectors; v += kWide)
    GemmTile<kRows, kWide>(depth, a, lda, b, v * kLanes, c + v * kLanes, ldc, beta);
  for (; v < vectors; ++v) GemmTile<kRows, 1>(depth, a, lda, b, v * kLanes, c + v * kLanes, ldc, beta);
}

static void Gemm(int rows, int64_t depth, int64_t vectors, const float* a, int64_t lda, const float* const* b, float* c,
                 int64_t ldc, const float* beta) {
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
      const Vec4 dots = Sum4(sum[r][0], sum[r][1], sum[r][2], sum[r][3]);
      std::memcpy(score + r * kBlockKeys + j, &dots, sizeof(dots));
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

// key_t[d, j] = keys[j][d], in squares of 4. `keys` has kBlockKeys valid addresses up to the next multiple of 4 of
// count; columns past it keep what they held, and their scores are never used.
static void Transpose(int64_t width, const float* const* keys, int count, float* key_t) {
  for (int j = 0; j < count; j += 4) {
    for (int64_t d = 0; d < width; d += 4) {
      Vec4 row[4];
      for (int i = 0; i < 4; ++i) std::memcpy(&row[i], keys[j + i] + d, sizeof(row[i]));
      const Vec4 even_low = ZipLow(row[0], row[2]), even_high = ZipHigh(row[0], row[2]);
      const Vec4 odd_low = ZipLow(row[1], row[3]), odd_high = ZipHigh(row[1], row[3]);
      const Vec4 column[4] = {ZipLow(even_low, odd_low), ZipHigh(even_low, odd_low), ZipLow(even_high, odd_high),
                              ZipHigh(even_high, odd_high)};
      for (int i = 0; i < 4; ++i) std::memcpy(key_t + (d + i) * kBlockKeys + j, &column[i], sizeof(column[i]));
    }
  }
}

// -- softmax --

// Tokens before the new ones are seen by all rows.
static bool SeesInTree(const TileSpec& spec, const KeyBlock& block, const Tile& tile, int r, int j) {
  const int64_t column = block.position[j] - tile.tree_start;
  return column < 0 || (column < spec.tree_columns && tile.tree[r][column] != 0);
}

static bool Sees(const TileSpec& spec, const KeyBlock& block, const Tile& tile, int r, int j) {
  if (spec.has_segments && block.segment[j] != tile.segment[r]) return false;
  if (spec.has_tree && !SeesInTree(spec, block, tile, r, j)) return false;
  return block.position[j] >= tile.visible_lo[r] && block.position[j] < tile.visible_hi[r];
}

// Some key of the block is invisible to some row of the tile.
static bool IsPartial(const TileSpec& spec, const KeyBlock& block, const Tile& tile) {
  if (spec.has_segments) return true;
  if (spec.has_tree && block.position[block.count - 1] >= tile.tree_start) return true;
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
    const int64_t lo = tile.visible_lo[r], hi = tile.visible_hi[r];
    for (int j = 0; j < block.count; ++j) {
      const bool seen = (block.position[j] >= lo) & (block.position[j] < hi);
      score[j] = seen ? score[j] : -INFINITY;
    }
    if (spec.has_segments) {
      for (int j = 0; j < block.count; ++j) score[j] = block.segment[j] == tile.segment[r] ? score[j] : -INFINITY;
    }
    if (spec.has_tree) {
      for (int j = 0; j < block.count; ++j) score[j] = SeesInTree(spec, block, tile, r, j) ? score[j] : -INFINITY;
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

// -- values --

static bool AllFinite(const float* row, int64_t elements) {
  IVec bad = {};
  for (int64_t d = 0; d < elements; d += kLanes) {
    IVec bits;
    std::memcpy(&bits, row + d, sizeof(bits));
    bad |= (bits & 0x7f800000) == 0x7f800000;
  }
  return !Any(bad);
}

// In a block that not every row sees, 0 * NaN must not reach the rows that do not: such values leave the product and
// are added row by row.
static void AddNonFinite(const TileSpec& spec, const KeyBlock& block, const Tile& tile, const float* const* values,
                         const bool* excluded) {
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

static void AddValues(const TileSpec& spec, const KeyBlock& block, const KeyBlock& next, const Tile& tile,
                      bool partial) {
  const float* values[kBlockKeys];
  FloatRows(spec, ValueRows(spec, block, next, tile), values);
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

void Take(const TileSpec& spec, const KeyBlock& block, const KeyBlock& next, const Tile& tile) {
  const float* keys[kBlockKeys];
  FloatRows(spec, KeyRows(spec, block, next, tile), keys);
  for (int j = block.count; j % 4 != 0; ++j) keys[j] = keys[block.count - 1];
  const int64_t width = (spec.head_dim + kLanes - 1) / kLanes * kLanes;
  // Products summed in one chain. A key of 30 in all of 64 dims has partial sums of hundreds where the score is 46: with
  // chains of 16 and 32 lse was 4 % over its budget on a host whose BLAS, which the baseline takes, sums more evenly.
  constexpr int64_t kDepth = 8;
  constexpr int kDotRows = 8;  // up to here a transposed copy of the block costs more than the sums across lanes
  if (tile.rows <= kDotRows) {
    Dot(tile.rows, width, tile.query, keys, block.count, tile.score);
  } else {
    Transpose(width, keys, block.count, tile.key_t);
    for (int64_t d = 0; d < spec.head_dim; d += kDepth) {
      const int64_t depth = spec.head_dim - d < kDepth ? spec.head_dim - d : kDepth;
      Gemm(tile.rows, depth, (block.count + kLanes - 1) / kLanes, tile.query + d, Padded(spec.head_dim),
           tile.key_t_rows + d, tile.score, kBlockKeys, d == 0 ? nullptr : tile.ones);
    }
  }
  const bool partial = IsPartial(spec, block, tile);
  for (int r = 0; r < tile.rows; ++r) {
    FinishScores(spec, block, tile, r, partial);
    UpdateSoftmax(block, tile, r);
  }
  AddValues(spec, block, next, tile, partial);
}

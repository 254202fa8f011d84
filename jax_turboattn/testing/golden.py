"""What every implementation must compute: the contract in numpy float64, in plain loops.

The functions have the names and arguments of the public API (without hints and `implementation`, which change no
result), take numpy arrays that are already rounded to their dtypes, and return a `Result` (or a `Cache`). One loop over
query tokens; each token looks only at the keys it sees, so nothing else can reach its output.

With `baseline=True` the same loops run in float32 with the probabilities cast to the query dtype: the plain
implementation whose error is the yardstick of `tolerances`. The one cast of the output is left to the caller.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from . import codecs

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class Cache:
    """A paged cache in numpy, field by field `jax_turboattn.PagedKVCache`."""

    key: Array  # [L?, N, K, P, D], int4 [L?, N, K, P, D/2]
    value: Array | None  # [L?, N, K, P, Dv]; None: V is the first value_dim columns of K
    key_params: Array | None  # int8, int4: [L?, N, K, P, 2] (scale, zero); fp8: float32 [L?, K]
    value_params: Array | None
    dtype: str
    value_dim: int
    shared_value: bool = False


@dataclasses.dataclass
class Result:
    """Outputs, and per row what a tolerance needs to know. Rows that see nothing keep the values of `empty`."""

    out: Array  # [..., H, Dv]
    lse: Array  # [..., H], natural log
    keys: Array  # [...] int64, visible keys
    peak: Array  # [..., H], largest |logit| (sink included)
    spread: Array  # [..., H, Dv], sum of p * |v|: what rounding errors are relative to

    @staticmethod
    def empty(rows: tuple[int, ...], heads: int, value_dim: int) -> Result:
        return Result(
            out=np.zeros((*rows, heads, value_dim)),
            lse=np.full((*rows, heads), -np.inf),
            keys=np.zeros(rows, np.int64),
            peak=np.zeros((*rows, heads)),
            spread=np.zeros((*rows, heads, value_dim)),
        )

    def reshape(self, *rows: int) -> Result:
        """The same result with its row axes reshaped to `rows`."""
        return Result(
            out=self.out.reshape(*rows, *self.out.shape[-2:]),
            lse=self.lse.reshape(*rows, self.lse.shape[-1]),
            keys=self.keys.reshape(rows),
            peak=self.peak.reshape(*rows, self.peak.shape[-1]),
            spread=self.spread.reshape(*rows, *self.spread.shape[-2:]),
        )


# ---- one row of attention


class _Softmax:
    """The options that all rows of one call share, and the formula of contract section 1."""

    def __init__(
        self,
        query: Array,
        *,
        is_causal: bool,
        scale: float | None,
        local_window_size: Any,
        logits_soft_cap: float | None,
        sinks: Array | None,
        alibi_slopes: Array | None,
        baseline: bool,
    ):
        self.real: Any = np.float32 if baseline else np.float64
        self.rounding = query.dtype if baseline else None
        self.scale = self.real(1.0 / math.sqrt(query.shape[-1]) if scale is None else scale)
        self.soft_cap = None if logits_soft_cap is None else self.real(logits_soft_cap)
        self.sinks = None if sinks is None else sinks.astype(self.real)
        self.slopes = None if alibi_slopes is None else alibi_slopes.astype(self.real)
        self.is_causal = is_causal
        self.left, self.right = _window(local_window_size)

    def sees(self, p: int, s: Array) -> Array:
        """Which of the keys at positions s [n] the window of the query at position p leaves (causality apart)."""
        distance = p - s
        inside = np.ones(s.shape, bool)
        if self.left != -1:
            inside &= distance <= self.left
        if self.right != -1:
            inside &= distance >= -self.right
        return inside

    def row(
        self,
        result: Result,
        at: Any,
        q: Array,
        k: Array,
        v: Array,
        p: int,
        s: Array,
        visible: Array,
        bias: Array | None = None,
        heads: slice = slice(None),
    ) -> None:
        """Writes row `at` of result: q [h, D] at position p over the visible of k [n, k, D], v [n, k, Dv] at s [n].

        `heads` says which query heads q, k, v and bias [h, n] belong to.
        """
        sinks = None if self.sinks is None else self.sinks[heads]
        seen: Any = np.flatnonzero(visible)
        if len(seen) == 0:
            if sinks is not None:
                result.lse[at][heads] = sinks
                result.peak[at][heads] = np.abs(sinks)
            return
        if seen[-1] - seen[0] + 1 == len(seen):
            seen = slice(seen[0], seen[-1] + 1)  # a view instead of a copy
        num_heads, kv_heads = q.shape[0], k.shape[1]
        k, v, distance = k[seen].astype(self.real), v[seen].astype(self.real), np.abs(p - s[seen])
        grouped = q.astype(self.real).reshape(kv_heads, num_heads // kv_heads, -1)
        x = self.scale * (grouped @ k.transpose(1, 2, 0)).reshape(num_heads, -1)
        if self.soft_cap is not None:
            x = self.soft_cap * np.tanh(x / self.soft_cap)
        if self.slopes is not None:
            x = x - self.slopes[heads, None] * distance.astype(self.real)
        if bias is not None:
            x = x + bias[:, seen].astype(self.real)
        top, peak = x.max(-1), np.abs(x).max(-1)
        if sinks is not None:
            top, peak = np.maximum(top, sinks), np.maximum(peak, np.abs(sinks))
        origin = np.where(top == -np.inf, self.real(0), top)
        weights = np.exp(x - origin[:, None])
        total = weights.sum(-1)
        if sinks is not None:
            total = total + np.exp(sinks - origin)
        probs = np.divide(weights, total[:, None], out=np.zeros_like(weights), where=total[:, None] != 0)
        if self.rounding is not None:
            probs = probs.astype(self.rounding).astype(self.real)
        probs, values = probs.reshape(kv_heads, num_heads // kv_heads, -1), v.transpose(1, 0, 2)
        result.out[at][heads] = (probs @ values).reshape(num_heads, -1)
        result.lse[at][heads] = origin + np.log(total)
        result.keys[at] = max(result.keys[at], x.shape[-1])
        result.peak[at][heads] = peak
        result.spread[at][heads] = (probs @ np.abs(values)).reshape(num_heads, -1)


def _window(local_window_size: Any) -> tuple[int, int]:
    """(left, right) with -1 for unbounded."""
    if local_window_size is None:
        return -1, -1
    if np.ndim(local_window_size) == 0 and not isinstance(local_window_size, tuple):
        return int(local_window_size), int(local_window_size)
    left, right = local_window_size
    return (-1 if left is None else int(left)), (-1 if right is None else int(right))


def _ranges(offsets: Array, rows: int) -> Iterator[tuple[int, int]]:
    """Rows [lo, hi) that each sequence owns, whatever the offsets hold."""
    for start, end in zip(offsets[:-1], offsets[1:]):
        lo = min(max(int(start), 0), rows)
        yield lo, min(max(int(end), lo), rows)


# ---- dense and packed attention


def attention(
    query: Array,
    key: Array,
    value: Array,
    bias: Array | None = None,
    mask: Array | None = None,
    *,
    is_causal: bool = False,
    query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None,
    segment_ids: Any = None,
    query_offset: Any = None,
    scale: float | None = None,
    local_window_size: Any = None,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    baseline: bool = False,
) -> Result:
    """query [B, T, H, D], key [B, S, K, D], value [B, S, K, Dv]."""
    B, T, H, _ = query.shape
    S, group, Dv = key.shape[1], H // key.shape[2], value.shape[-1]
    softmax = _Softmax(
        query,
        is_causal=is_causal,
        scale=scale,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        baseline=baseline,
    )
    segments_q, segments_kv = segment_ids if isinstance(segment_ids, tuple) else (segment_ids, segment_ids)
    offsets = np.broadcast_to(np.asarray(0 if query_offset is None else query_offset, np.int64), (B,))
    result = Result.empty((B, T), H, Dv)
    s = np.arange(S)
    with np.errstate(all="ignore"):
        for b in range(B):
            q_len = T if query_seq_lengths is None else int(query_seq_lengths[b])
            kv_len = S if key_value_seq_lengths is None else int(key_value_seq_lengths[b])
            for i in range(min(max(q_len, 0), T)):
                p = i + int(offsets[b])
                visible = (s < kv_len) & softmax.sees(p, s)
                if is_causal:
                    visible &= s <= p
                if segments_q is not None:
                    visible &= segments_kv[b] == segments_q[b, i]
                row_bias = None if bias is None else np.broadcast_to(bias, (B, H, T, S))[b, :, i]
                if mask is None:
                    softmax.row(result, (b, i), query[b, i], key[b], value[b], p, s, visible, row_bias)
                    continue
                for h in range(H):
                    one, kv = slice(h, h + 1), slice(h // group, h // group + 1)
                    kept = visible & np.broadcast_to(mask, (B, H, T, S))[b, h, i]
                    one_bias = None if row_bias is None else row_bias[one]
                    softmax.row(
                        result, (b, i), query[b, i, one], key[b, :, kv], value[b, :, kv], p, s, kept, one_bias, one
                    )
    return result


def ragged_attention(
    query: Array,
    key: Array,
    value: Array,
    q_offsets: Array,
    kv_offsets: Array,
    *,
    is_causal: bool = True,
    scale: float | None = None,
    local_window_size: Any = None,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    baseline: bool = False,
) -> Result:
    """query [T, H, D], key [S, K, D], value [S, K, Dv], offsets [B + 1]."""
    T, H, _ = query.shape
    softmax = _Softmax(
        query,
        is_causal=is_causal,
        scale=scale,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        baseline=baseline,
    )
    result = Result.empty((T,), H, value.shape[-1])
    with np.errstate(all="ignore"):
        for (lo, hi), (kv_lo, kv_hi) in zip(_ranges(q_offsets, T), _ranges(kv_offsets, key.shape[0])):
            s = np.arange(kv_hi - kv_lo)
            for i in range(hi - lo):
                p = len(s) - (hi - lo) + i
                visible = softmax.sees(p, s)
                if is_causal:
                    visible &= s <= p
                softmax.row(result, lo + i, query[lo + i], key[kv_lo:kv_hi], value[kv_lo:kv_hi], p, s, visible)
    return result


# ---- paged attention


def _layer(cache: Cache, layer: Any) -> Cache | None:
    """The cache of one layer, without the layer axis; None when the layer does not exist."""
    if cache.key.ndim == 4:
        return cache
    if not 0 <= int(layer) < cache.key.shape[0]:
        return None

    def pick(array: Array | None) -> Array | None:
        return None if array is None else array[int(layer)]

    return dataclasses.replace(
        cache,
        key=pick(cache.key),
        value=pick(cache.value),
        key_params=pick(cache.key_params),
        value_params=pick(cache.value_params),
    )


def decode(cache: Cache, layer: Any, pages: Array, dtype: Any, rounded: bool = True) -> tuple[Array, Array]:
    """Keys and values of whole pages of an existing layer, rounded to dtype: [n, K, P, D], [n, K, P, Dv].

    rounded=False: what quantised caches hold in float64, before that rounding.
    """
    whole = _layer(cache, layer)
    assert whole is not None

    def one(data: Array, params: Array | None) -> Array:
        if params is None:
            return data[pages]
        if cache.dtype == "float8_e4m3fn":
            return codecs.decode_fp8(data[pages], params[:, None, None], dtype, rounded)
        return codecs.decode_int(data[pages], params[pages], cache.dtype, rounded)

    key = one(whole.key, whole.key_params)
    if whole.value is None:
        return key, key[..., : cache.value_dim]
    return key, one(whole.value, whole.value_params)


def _read(
    cache: Cache, layer: Any, table: Array, kv_len: int, dtype: Any, cp_rank: int, cp_size: int, rounded: bool = True
) -> tuple[Array, Array, Array]:
    """The stored keys of one sequence: global positions s [n], k [n, K, D], v [n, K, Dv].

    Only mapped pages, only s < kv_len.
    """
    one = _layer(cache, layer)
    num_pages, kv_heads, page_size = cache.key.shape[-4:-1]
    mapped = (table >= 0) & (table < num_pages) & (one is not None)
    columns = np.flatnonzero(mapped & (0 <= int(cp_rank) < cp_size))  # a rank that does not exist holds no token
    s = ((columns[:, None] * page_size + np.arange(page_size)) * cp_size + int(cp_rank)).reshape(-1)
    k, v = decode(cache, 0 if one is None else layer, table[columns], dtype, rounded)
    inside = s < min(max(kv_len, 0), len(table) * page_size * cp_size)
    k, v = (x.transpose(0, 2, 1, 3).reshape(len(s), kv_heads, x.shape[-1])[inside] for x in (k, v))
    return s[inside], k, v


def _array_names(cache: Cache) -> list[str]:
    return [name for name in ("key", "value", "key_params", "value_params") if getattr(cache, name) is not None]


def paged_attention(
    query: Array,
    cache: Cache,
    page_table: Array,
    kv_lens: Array,
    q_offsets: Array,
    *,
    is_causal: bool = True,
    layer: Any = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    shared_prefix: Any = None,
    tree_mask: Array | None = None,
    scale: float | None = None,
    local_window_size: Any = None,
    logits_soft_cap: float | None = None,
    sinks: Array | None = None,
    alibi_slopes: Array | None = None,
    folded: bool = False,
    baseline: bool = False,
) -> Result:
    """query [T, H, D], page_table [B, M], kv_lens [B], q_offsets [B + 1].

    folded: decoded values are not rounded to E, as in kernels that fold scales into scores and probabilities, which
    contract section 3 leaves them free to do.
    """
    T, H, _ = query.shape
    softmax = _Softmax(
        query,
        is_causal=is_causal,
        scale=scale,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        baseline=baseline,
    )
    result = Result.empty((T,), H, cache.value_dim)
    start = 0  # absolute position of a sequence's own first token
    prefix: tuple[Array, ...] | None = None
    with np.errstate(all="ignore"):
        if shared_prefix is not None:
            ids, start = np.asarray(shared_prefix[0]), int(shared_prefix[1])
            prefix = _read(cache, layer, ids, start, query.dtype, 0, 1, not folded)
        for b, (lo, hi) in enumerate(_ranges(q_offsets, T)):
            if lo == hi:
                continue
            own, k, v = _read(cache, layer, page_table[b], int(kv_lens[b]), query.dtype, cp_rank, cp_size, not folded)
            history = int(kv_lens[b]) - (hi - lo)
            s = own + start
            if prefix is not None:
                s, k, v = np.concatenate([prefix[0], s]), np.concatenate([prefix[1], k]), np.concatenate([prefix[2], v])
            for i in range(hi - lo):
                p = start + history + i
                visible = softmax.sees(p, s)
                if tree_mask is not None:
                    visible &= _tree(tree_mask[lo + i], s - (start + history))
                elif is_causal:
                    visible &= s <= p
                softmax.row(result, lo + i, query[lo + i], k, v, p, s, visible)
    return result


def _tree(row: Array, j: Array) -> Array:
    """Visibility of the sequence's new tokens j [n] (negative: history) under one row [Q] of the tree mask."""
    inside = (j >= 0) & (j < len(row))
    allowed: Array = j < 0
    allowed[inside] = row[j[inside]]
    return allowed


def paged_decode(query: Array, cache: Cache, page_table: Array, kv_lens: Array, **options: Any) -> Result:
    """query [B, H, D] or [B, Q, H, D]; options as `paged_attention`."""
    rows = query.shape[:-2]
    per_sequence = rows[1] if len(rows) == 2 else 1
    offsets = np.arange(rows[0] + 1) * per_sequence
    packed = paged_attention(query.reshape(-1, *query.shape[-2:]), cache, page_table, kv_lens, offsets, **options)
    return packed.reshape(*rows)


# ---- RoPE and prologue


def rope_inv_freq(rope: Any, base: float | None = None) -> Array:
    """Radians a token of each pair, float64 [dim / 2], from the attributes of a RopeConfig."""
    if rope.kind == "dynamic":
        if base is None:
            raise ValueError("rope_inv_freq: rope_base must be given for kind 'dynamic', got None")
    else:
        base = rope.base
    assert base is not None
    j = np.arange(rope.dim // 2, dtype=np.float64)
    f: Array = float(base) ** (-2.0 * j / rope.dim)
    if rope.kind == "linear":
        f = f / rope.factor
    elif rope.kind == "yarn":

        def correction(rotations: float) -> float:
            return (
                rope.dim * math.log(rope.original_max_position / (2 * math.pi * rotations)) / (2 * math.log(rope.base))
            )

        low, high = correction(rope.beta_fast), correction(rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rope.dim - 1)
        if low == high:
            high += 0.001
        ramp = np.clip((j - low) / (high - low), 0, 1)
        f = f * (1 - ramp * (1 - 1 / rope.factor))
    elif rope.kind == "llama3":
        wavelengths = rope.original_max_position * f / (2 * math.pi)  # in the trained context
        smooth = np.clip((wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
        f = (1 - smooth) * f / rope.factor + smooth * f
    elif rope.kind == "longrope":
        f = 1.0 / (np.asarray(rope.long_factor if rope.long else rope.short_factor, np.float64) / f)
    return f


def rope_attention_factor(rope: Any) -> float:
    """The factor on cos and sin."""
    if rope.attention_factor is not None:
        return float(rope.attention_factor)
    if rope.kind == "yarn" and rope.factor > 1:
        return 0.1 * math.log(rope.factor) + 1.0
    if rope.kind == "longrope" and rope.factor > 1:
        return math.sqrt(1.0 + math.log(rope.factor) / math.log(rope.original_max_position))
    return 1.0


def rope_axes(rope: Any) -> Array:
    """Which of the three position axes turns each pair, [dim / 2]."""
    j = np.arange(rope.dim // 2)
    if not rope.sections or not any(rope.sections):
        return np.zeros_like(j)
    t, h, w = rope.sections
    if not rope.sections_interleaved:
        return np.where(j < t, 0, np.where(j < t + h, 1, 2))
    axis, cycle = j % 3, j // 3
    return np.where((axis == 1) & (cycle < h), 1, np.where((axis == 2) & (cycle < w), 2, 0))


def rotate(x: Array, rope: Any, position: Any, base: float | None = None, baseline: bool = False) -> Array:
    """x [heads, D] turned for one token; position: int, or 3 ints. float64, or float32 with baseline."""
    real: Any = np.float32 if baseline else np.float64
    per_pair = np.broadcast_to(np.asarray(position, np.int64), (3,))[rope_axes(rope)]
    angle = np.remainder(per_pair * rope_inv_freq(rope, base) + math.pi, 2 * math.pi) - math.pi
    factor = real(rope_attention_factor(rope))
    cos, sin = np.cos(angle.astype(real)) * factor, np.sin(angle.astype(real)) * factor
    if rope.pairing == "half":
        first = rope.offset + np.arange(rope.dim // 2)
        second = first + rope.dim // 2
    else:
        first = rope.offset + 2 * np.arange(rope.dim // 2)
        second = first + 1
    turned = x.astype(real)
    turned[:, first] = cos * x[:, first].astype(real) - sin * x[:, second].astype(real)
    turned[:, second] = cos * x[:, second].astype(real) + sin * x[:, first].astype(real)
    return turned


def _logn(position: Any, m: int, zero_based: bool) -> float:
    n = int(np.ravel(position)[0]) + (0 if zero_based else 1)
    return math.log(n) / math.log(m) if n > m else 1.0


def _prologue(
    x: Array,
    bias: Array | None,
    rope: Any = None,
    position: Any = 0,
    base: float | None = None,
    factor: float = 1.0,
    baseline: bool = False,
    rounded: bool = True,
) -> Array:
    """One token's heads [heads, D] of dtype E through bias, RoPE and a factor, rounded once to E (or not at all)."""
    y = x.astype(np.float32)
    if bias is not None:
        y = y + bias.astype(np.float32)
    if rope is not None:
        y = rotate(y, rope, position, base, baseline)
    if factor != 1.0:
        y = y * (np.float32(factor) if baseline else factor)
    return y.astype(x.dtype) if rounded else y.astype(np.float64)


def append_kv(
    cache: Cache,
    key: Array,
    value: Array | None,
    page_table: Array,
    kv_lens: Array,
    q_offsets: Array,
    *,
    layer: Any = None,
    key_bias: Array | None = None,
    value_bias: Array | None = None,
    rope: Any = None,
    rope_base: Array | None = None,
    positions: Array | None = None,
    read_only_pages: Array | None = None,
    cp_rank: int = 0,
    cp_size: int = 1,
    start: int = 0,
) -> Cache:
    """The cache with key [T, K, D] and value [T, K, Dv] stored.

    start: absolute position of each sequence's own first token; only RoPE depends on it.
    """
    written = dataclasses.replace(cache, **{name: getattr(cache, name).copy() for name in _array_names(cache)})
    one = _layer(written, layer)
    num_pages, _, page_size = cache.key.shape[-4:-1]
    for b, (lo, hi) in enumerate(_ranges(q_offsets, key.shape[0])):
        for i in range(hi - lo):
            p = int(kv_lens[b]) - (hi - lo) + i
            if not 0 <= p < page_table.shape[1] * page_size * cp_size or p % cp_size != int(cp_rank):
                continue
            column, slot = divmod(p // cp_size, page_size)
            page = int(page_table[b, column])
            if (
                one is None
                or not 0 <= page < num_pages
                or (read_only_pages is not None and column < int(read_only_pages[b]))
            ):
                continue
            position = start + p if positions is None else positions[lo + i]
            base = None if rope_base is None else float(rope_base[b])
            new_key = _prologue(key[lo + i], key_bias, rope, position, base)
            _store(one.key, one.key_params, cache.dtype, page, slot, new_key)
            if value is not None:
                assert one.value is not None
                new_value = _prologue(value[lo + i], value_bias)
                _store(one.value, one.value_params, cache.dtype, page, slot, new_value)
    return written


def _store(data: Array, params: Array | None, kv_dtype: str, page: int, slot: int, x: Array) -> None:
    """Encodes one token's heads x [K, D] into slot `slot` of page `page`, in place."""
    if params is None:
        data[page, :, slot] = x
    elif kv_dtype == "float8_e4m3fn":
        data[page, :, slot] = codecs.encode_fp8(x, params[:, None])
    else:
        data[page, :, slot], params[page, :, slot] = codecs.encode_int(x, kv_dtype)


def prologue_queries(
    query: Array,
    kv_lens: Array,
    q_offsets: Array,
    *,
    query_bias: Array | None = None,
    rope: Any = None,
    rope_base: Array | None = None,
    positions: Array | None = None,
    logn: int | None = None,
    logn_zero_based: bool = False,
    start: int = 0,
    baseline: bool = False,
    rounded: bool = True,
) -> Array:
    """The queries [T, H, D] that the attention of a fused step sees. Rows of no sequence are left as they are.

    rounded=False: float64, before the one rounding to E.
    """
    turned = query.copy() if rounded else query.astype(np.float64)
    for b, (lo, hi) in enumerate(_ranges(q_offsets, query.shape[0])):
        for i in range(hi - lo):
            position = start + int(kv_lens[b]) - (hi - lo) + i if positions is None else positions[lo + i]
            factor = 1.0 if logn is None else _logn(position, logn, logn_zero_based)
            base = None if rope_base is None else float(rope_base[b])
            turned[lo + i] = _prologue(query[lo + i], query_bias, rope, position, base, factor, baseline, rounded)
    return turned


def paged_attention_step(
    query: Array,
    key: Array,
    value: Array | None,
    cache: Cache,
    page_table: Array,
    kv_lens: Array,
    q_offsets: Array,
    *,
    query_bias: Array | None = None,
    key_bias: Array | None = None,
    value_bias: Array | None = None,
    rope: Any = None,
    rope_base: Array | None = None,
    positions: Array | None = None,
    logn: int | None = None,
    logn_zero_based: bool = False,
    read_only_pages: Array | None = None,
    stored: Cache | None = None,
    **options: Any,
) -> tuple[Result, Cache]:
    """The fused step: append, then attention. options as `paged_attention`.

    stored: attend over this cache instead of the one written here. With RoPE an implementation's codes may differ by
    one from the golden's, and attention is defined over what was stored.
    """
    start = 0 if options.get("shared_prefix") is None else int(options["shared_prefix"][1])
    place = {name: options[name] for name in ("layer", "cp_rank", "cp_size") if name in options}
    turning = dict(rope=rope, rope_base=rope_base, positions=positions, start=start)
    written = append_kv(
        cache,
        key,
        value,
        page_table,
        kv_lens,
        q_offsets,
        key_bias=key_bias,
        value_bias=value_bias,
        read_only_pages=read_only_pages,
        **turning,
        **place,
    )
    turned = prologue_queries(
        query,
        kv_lens,
        q_offsets,
        query_bias=query_bias,
        logn=logn,
        logn_zero_based=logn_zero_based,
        baseline=options.get("baseline", False),
        **turning,
    )
    return paged_attention(
        turned, written if stored is None else stored, page_table, kv_lens, q_offsets, **options
    ), written


# ---- gather, copy, merge


def gather_kv(
    cache: Cache, page_table: Array, kv_lens: Array, *, layer: Any = None, out_dtype: Any = None
) -> tuple[Array, Array]:
    """key [B, M*P, K, D], value [B, M*P, K, Dv], zeros past kv_len and on unmapped pages.

    In dtype E; fp8 in out_dtype (default bfloat16).
    """
    if cache.dtype == "float8_e4m3fn":
        dtype = np.dtype(codecs.ml_dtypes.bfloat16 if out_dtype is None else out_dtype)
    else:
        dtype = (cache.key if cache.key_params is None else cache.key_params).dtype
    B, M = page_table.shape
    kv_heads, page_size = cache.key.shape[-3:-1]
    head_dim = cache.key.shape[-1] * (2 if cache.dtype == "int4" else 1)
    key = np.zeros((B, M * page_size, kv_heads, head_dim), dtype)
    value = np.zeros((B, M * page_size, kv_heads, cache.value_dim), dtype)
    for b in range(B):
        s, k, v = _read(cache, layer, page_table[b], int(kv_lens[b]), dtype, 0, 1)
        key[b, s], value[b, s] = k, v
    return key, value


def copy_pages(cache: Cache, source: Array, destination: Array, *, layer: Any = None) -> Cache:
    """The cache with page destination[i] a copy of page source[i]; all sources are read before any write.

    layer None copies the pages of every layer.
    """
    written = dataclasses.replace(cache, **{name: getattr(cache, name).copy() for name in _array_names(cache)})
    every_layer = cache.key.ndim == 5 and layer is None
    for each in range(cache.key.shape[0]) if every_layer else (layer,):
        before, after = _layer(cache, each), _layer(written, each)
        if before is None or after is None:
            continue
        num_pages = before.key.shape[0]
        for src, dst in zip(source, destination, strict=True):
            if 0 <= src < num_pages and 0 <= dst < num_pages:
                for name in _array_names(cache):
                    if not (cache.dtype == "float8_e4m3fn" and name.endswith("params")):
                        getattr(after, name)[dst] = getattr(before, name)[src]
    return written


def merge_partials(outs: Array, lses: Array, *, sinks: Array | None = None, baseline: bool = False) -> Result:
    """outs [R, ..., H, Dv], lses [R, ..., H], sinks [H]."""
    real: Any = np.float32 if baseline else np.float64
    logs = lses.astype(real)
    with np.errstate(all="ignore"):
        top = logs.max(0) if len(logs) else np.full(lses.shape[1:], -np.inf, real)
        if sinks is not None:
            top = np.maximum(top, sinks.astype(real))
        origin = np.where(top == -np.inf, real(0), top)
        weights = np.exp(logs - origin)
        total = weights.sum(0) + (0 if sinks is None else np.exp(sinks.astype(real) - origin))
        parts = np.where((logs == -np.inf)[..., None], real(0), outs.astype(real))
        share = np.divide(weights, total, out=np.zeros_like(weights), where=total != 0)[..., None]
        return Result(
            out=(share * parts).sum(0),
            lse=np.where(total == 0, -np.inf, origin + np.log(total)),
            keys=np.full(lses.shape[1:-1], len(logs)),
            peak=np.where(np.isfinite(origin), np.abs(origin), 0),
            spread=(share * np.abs(parts)).sum(0),
        )

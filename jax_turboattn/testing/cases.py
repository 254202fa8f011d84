"""Named cases, for tests and benchmarks alike.

A `Spec` is everything static of a call: one spec, one XLA executable. A `Values` says what is sent through it: lengths,
data, poison, wild integers. `build(case)` makes the numpy arguments, the same for a case's name on every machine.

    case = cases.find("paged_attention/gqa2/boundary")
    call = cases.build(case)
    golden.paged_attention(**call.semantic)          # numpy
    jax_turboattn.paged_attention(**call.arguments)  # after `to_jax` of the caches
"""

from __future__ import annotations

import dataclasses
import functools
import math
import zlib
from typing import Any

import ml_dtypes
import numpy as np

from ..rope import RopeConfig
from . import codecs, poison
from .golden import Cache

Array = np.ndarray[Any, Any]

DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in ("float32", "float16", "bfloat16")}
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Spec:
    """The static half of a case. Letters as in the contract."""

    op: str
    name: str
    heads: tuple[int, int] = (4, 2)  # H, K
    dim: int = 64  # D
    value_dim: int | None = None  # Dv, default D
    dtype: str = "bfloat16"  # E
    B: int = 5
    T: int = 40  # packed: rows of the query; dense: query tokens a sequence
    S: int = 40  # dense and ragged: keys
    Q: int | None = None  # paged_decode: new tokens a sequence (None: query [B, H, D]); tree_mask: its columns
    kv_dtype: str | None = None  # None: E
    P: int = 16
    M: int = 6
    L: int | None = None
    shared_value: bool = False
    prefix: int = 0  # pages of the shared prefix
    parts: int = 3  # merge_partials: R
    arrays: tuple[str, ...] = ()  # optional array arguments that are present
    static: tuple[tuple[str, Any], ...] = ()  # static arguments that have a meaning
    hints: tuple[tuple[str, Any], ...] = ()  # static arguments that only the implementations take
    tags: frozenset[str] = frozenset()

    @property
    def label(self) -> str:
        return f"{self.op}/{self.name}"

    @property
    def options(self) -> dict[str, Any]:
        return dict(self.static)

    @property
    def cp_size(self) -> int:
        return int(self.options.get("cp_size", 1))

    @property
    def capacity(self) -> int:
        """Global tokens that a sequence's page table can hold."""
        return self.M * self.P * self.cp_size


@dataclasses.dataclass(frozen=True)
class Values:
    """The run-time half of a case."""

    name: str
    lens: str = "random"  # see `_packed_lengths`, `_decode_lengths`, `_dense_lengths`
    data: str = "normal"  # see `_tensors`
    poison: str = "nan"
    extreme: str = ""  # "huge_sinks", "tiny_sinks", "infinite_sinks", "unmapped", "far_positions", "wild_layer"
    seed: int = 0
    cp_rank: int = 0


@dataclasses.dataclass(frozen=True)
class Case:
    """One spec with one set of values."""

    spec: Spec
    values: Values

    @property
    def name(self) -> str:
        return f"{self.spec.label}/{self.values.name}"

    @property
    def tags(self) -> frozenset[str]:
        return self.spec.tags | {self.values.lens, self.values.data} | ({self.values.extreme} - {""})


@dataclasses.dataclass(frozen=True)
class Call:
    """Arguments by name. Arrays are numpy, caches are `golden.Cache`."""

    arrays: dict[str, Any]
    static: dict[str, Any]
    hints: dict[str, Any]

    @property
    def semantic(self) -> dict[str, Any]:
        """What the golden takes."""
        return self.arrays | self.static

    @property
    def arguments(self) -> dict[str, Any]:
        """What the public function takes."""
        return self.arrays | self.static | self.hints


def build(case: Case) -> Call:
    """The arguments of a case."""
    spec, values = case.spec, case.values
    rng = np.random.default_rng([zlib.crc32(case.name.encode()), values.seed])
    arrays = _BUILDERS[spec.op](spec, values, rng)
    return Call(arrays, spec.options, dict(spec.hints))


# ---- data


def _tensors(
    rng: np.random.Generator, kind: str, spec: Spec, q: tuple[int, ...], kv: tuple[int, ...], s: Array
) -> tuple[Array, Array, Array]:
    """Queries [*q, H, D], keys [*kv, K, D] and values [*kv, K, Dv] in E; s: keys' positions, broadcastable to kv."""
    (H, K), D, Dv, dtype = spec.heads, spec.dim, spec.value_dim or spec.dim, DTYPES[spec.dtype]
    query, key, value = (rng.standard_normal((*lead, n, d)) for lead, n, d in ((q, H, D), (kv, K, D), (kv, K, Dv)))
    if kind == "mixture":  # a few outliers of another size, as activations have
        for x in (query, key, value):
            x += 10 * rng.standard_normal(x.shape) * (rng.random(x.shape) < 0.003)
    elif kind == "ones":
        value[:] = 1
    elif kind == "index":  # the output is a mean of positions
        query[:] = 0
        value[:] = np.broadcast_to(s, kv)[..., None, None]
    elif kind == "huge_key":
        if kv and kv[-1]:
            np.put_along_axis(key, rng.integers(0, kv[-1], (*kv[:-1], 1, 1, 1)), 30.0, axis=len(kv) - 1)
    elif kind == "negative":  # all scores near -1.3e5
        scale = _scale(spec)
        size = min(math.sqrt(1.3e5 / abs(scale)), 5e4) if scale else 0.0
        query[:], key[:] = np.round(2 * query) / 2, np.round(2 * key) / 2  # sums of products stay exact in float32
        query[..., 0], key[..., 0] = size, -math.copysign(size, scale)
    elif kind == "heads":
        value[:] = (1 + np.arange(K))[:, None]
    elif kind == "nan_rows":
        bad = rng.random((2, *kv, K)) < 0.02
        key[bad[0]], value[bad[1]] = np.nan, np.inf if spec.kv_dtype else np.nan
    elif kind == "nan_queries":
        query[rng.random((*q, H)) < 0.1] = np.nan
    elif kind == "outliers":  # rows that hold E's largest numbers, both signs where their difference stays finite
        top = float(ml_dtypes.finfo(dtype).max)
        key[..., 0], value[..., -1] = top, -top
        if spec.dtype == "float16":
            key[..., 1], value[..., 1] = -top, top
    elif kind == "constant_rows":
        key[:] = np.round(key[..., :1])
        value[:] = 0.25 * np.round(value[..., :1])
    elif (
        kind == "denormal"
    ):  # rows whose scale is subnormal in E or flushed; inputs that float32 holds as normals, since
        key *= 2.0**-18 if spec.dtype == "float16" else 2.0**-121  # XLA reads others as zero on the CPU
        key[np.abs(key) < 2.0**-124] = 0
    else:
        assert kind == "normal", kind
    return query.astype(dtype), key.astype(dtype), value.astype(dtype)


def _scale(spec: Spec) -> float:
    scale = spec.options.get("scale")
    return 1 / math.sqrt(spec.dim) if scale is None else float(scale)


def _head_options(spec: Spec, values: Values, rng: np.random.Generator) -> dict[str, Array]:
    """sinks, alibi_slopes and a traced window, those of them that the spec has."""
    found: dict[str, Array] = {}
    H = spec.heads[0]
    if "sinks" in spec.arrays:
        size = {"huge_sinks": 1e4, "tiny_sinks": -1e30, "infinite_sinks": -np.inf}.get(values.extreme)
        sinks = 2 * rng.standard_normal(H) if size is None else np.full(H, size)
        found["sinks"] = sinks.astype(np.float32)
    if "alibi_slopes" in spec.arrays:
        found["alibi_slopes"] = np.exp2(-rng.uniform(0, 6, H)).astype(np.float32)
    if "local_window_size" in spec.arrays:
        sides = rng.choice([-1, 0, 1, 3, 7, 15, 16, 17, 31, 62, 63, 64, 1000, INT32_MAX], 2)
        found["local_window_size"] = np.array(sides, np.int32)
    return found


# ---- lengths


def _packed_lengths(kind: str, spec: Spec, rng: np.random.Generator, capacity: int) -> tuple[Array, Array]:
    """q_offsets [B + 1] and kv_lens [B] of packed sequences in T rows."""
    B, T, P = spec.B, spec.T, spec.P
    if B == 0:
        return np.array([rng.integers(0, T + 1)], np.int32), np.zeros(0, np.int32)
    first = 0
    share = T // B
    q = rng.integers(0, share + 1, B)
    if kind in ("mixed", "random", "holes"):
        q[::2] = np.minimum(q[::2], 1) if kind == "mixed" else q[::2]
        q[0] = min(1, T)
        if kind == "mixed" and B > 1:
            q[1] = min(share, max(T - 1, 0))
        kv = q + rng.integers(0, capacity + 1, B)
        first = int(rng.integers(0, T - q.sum() + 1)) if kind == "holes" else 0
    elif kind == "boundary":
        q = np.minimum(rng.integers(1, max(share, 1) + 1, B), share)
        edges = [P * spec.cp_size * j + d for j in (1, 2, spec.M) for d in (-1, 0, 1)] + [1, 2, 7]
        kv = rng.choice(edges, B)
    elif kind == "short":  # more queries than keys, and no keys at all
        q = np.minimum(rng.integers(1, 6, B), share)
        kv = rng.integers(0, 3, B)
    elif kind == "full":
        kv = np.full(B, capacity)
    elif kind == "prefill":
        q = np.minimum(rng.integers(1, max(share, 1) + 1, B), share)
        kv = q.copy()
    elif kind == "one":  # all rows are one sequence's
        q = np.zeros(B, np.int64)
        q[B // 2] = T
        kv = np.minimum(q + rng.integers(0, capacity + 1, B), capacity)
    elif kind == "few":  # tokens dealt out to any sequences; contexts may be shorter than that
        q = np.bincount(rng.integers(0, B, rng.integers(0, T + 1)), minlength=B)
        kv = rng.integers(0, capacity + 1, B)
    elif kind == "empty":
        q[:], kv = 0, rng.integers(0, capacity + 1, B)
    else:
        assert kind == "wild", kind
        bounds = np.sort(rng.integers(0, T + 1, B + 1))
        bounds[0], bounds[-1] = INT32_MIN, INT32_MAX
        garbage = [INT32_MIN, INT32_MAX, -1, capacity + 1, capacity + 3 * P, 5]
        return bounds.astype(np.int32), rng.permutation(garbage)[np.arange(B) % 6].astype(np.int32)
    offsets = first + np.concatenate([[0], np.cumsum(q)])
    return offsets.astype(np.int32), np.clip(kv, 0, capacity).astype(np.int32)


def _decode_lengths(kind: str, spec: Spec, rng: np.random.Generator) -> Array:
    B, P, capacity = spec.B, spec.P, spec.capacity
    if kind == "boundary":
        lens = rng.choice([P * spec.cp_size * j + d for j in (1, 2, spec.M) for d in (-1, 0, 1)] + [1, 2, 7], B)
    elif kind == "short":
        lens = rng.integers(0, 3, B)
    elif kind == "full":
        lens = np.full(B, capacity)
    elif kind == "wild":
        garbage = [INT32_MIN, INT32_MAX, -1, capacity + 1, capacity + 3 * P, 5]
        return rng.permutation(garbage)[np.arange(B) % 6].astype(np.int32)
    else:
        lens = rng.integers(0, capacity + 1, B)
    return np.clip(lens, 0, capacity).astype(np.int32)


def _dense_lengths(kind: str, spec: Spec, rng: np.random.Generator, limit: int) -> Array:
    B = spec.B
    if kind == "full":
        return np.full(B, limit, np.int32)
    if kind == "short":
        return np.resize(np.minimum([0, 1, 2], limit), B).astype(np.int32)
    if kind == "wild":
        return np.resize([INT32_MAX, -1, limit + 1, INT32_MIN], B).astype(np.int32)
    return rng.integers(0, limit + 1, B).astype(np.int32)


# ---- dense and packed attention


def _attention(spec: Spec, values: Values, rng: np.random.Generator) -> dict[str, Any]:
    B, T, S, H = spec.B, spec.T, spec.S, spec.heads[0]
    q, k, v = _tensors(rng, values.data, spec, (B, T), (B, S), np.arange(S))
    found: dict[str, Any] = dict(query=q, key=k, value=v, **_head_options(spec, values, rng))
    if "query_seq_lengths" in spec.arrays:
        found["query_seq_lengths"] = _dense_lengths(values.lens, spec, rng, T)
        beyond = np.arange(T) < found["query_seq_lengths"][:, None]
        found["query"] = poison.poison_rows(q, beyond, values.poison)
    if "key_value_seq_lengths" in spec.arrays:
        found["key_value_seq_lengths"] = _dense_lengths(values.lens, spec, rng, S)
        beyond = np.arange(S) < found["key_value_seq_lengths"][:, None]
        found["key"], found["value"] = (poison.poison_rows(x, beyond, values.poison) for x in (k, v))
    if "query_offset" in spec.arrays:
        choices = [INT32_MIN, INT32_MAX, -1] if values.lens == "wild" else [0, S - T, -3, 1, S, rng.integers(-T, S + 1)]
        found["query_offset"] = rng.choice(choices, B).astype(np.int32)
    if "segment_ids" in spec.arrays:
        ids = [np.sort(rng.integers(-1, 4, (B, n)), axis=-1).astype(np.int32) for n in (T, S)]
        found["segment_ids"] = ids[0] if T == S else tuple(ids)
    for name in ("bias", "mask"):
        for shape in (a for a in spec.arrays if a.split("_")[0] == name):  # "bias_1h": axes B and H broadcast or whole
            lead = (B if shape[-2:-1] == "b" else 1, H if shape[-1:] == "h" else 1)
            draw = rng.standard_normal((*lead, T, S)) if name == "bias" else rng.random((*lead, T, S)) < 0.6
            found[name] = draw.astype(np.float32) if name == "bias" else draw
    return found


def _ragged(spec: Spec, values: Values, rng: np.random.Generator) -> dict[str, Any]:
    T, S, B = spec.T, spec.S, spec.B
    q_offsets, kv_lens = _packed_lengths(values.lens, spec, rng, max(S // max(B, 1), 1))
    if values.lens == "wild":
        kv_offsets = np.sort(rng.integers(0, S + 1, B + 1))
        kv_offsets[0], kv_offsets[-1] = INT32_MIN, INT32_MAX
    else:
        kv_lens = np.minimum(kv_lens, S // max(B, 1))
        first = rng.integers(0, S - kv_lens.sum() + 1) if values.lens == "holes" else 0
        kv_offsets = first + np.concatenate([[0], np.cumsum(kv_lens)])
    clamped = np.clip(kv_offsets, 0, S)
    starts = np.repeat(clamped[:-1], np.diff(clamped))
    s = np.zeros(S)
    s[clamped[0] : clamped[-1]] = np.arange(clamped[0], clamped[-1]) - starts
    q, k, v = _tensors(rng, values.data, spec, (T,), (S,), s)
    used = (np.arange(S) >= clamped[0]) & (np.arange(S) < clamped[-1])
    k, v = (poison.poison_rows(x, used, values.poison) for x in (k, v))
    owned = (np.arange(T) >= q_offsets[0]) & (np.arange(T) < q_offsets[-1])
    offsets = dict(q_offsets=q_offsets, kv_offsets=kv_offsets.astype(np.int32))
    return dict(
        query=poison.poison_rows(q, owned, values.poison), key=k, value=v, **offsets, **_head_options(spec, values, rng)
    )


# ---- paged


def encode(spec: Spec, x: Array, scale: Array | None) -> tuple[Array, Array | None]:
    """Rows x [..., K, D] of dtype E as the cache stores them; scale [K] for fp8."""
    kv_dtype = spec.kv_dtype or spec.dtype
    if kv_dtype in codecs.BITS:
        return codecs.encode_int(x, kv_dtype)
    if kv_dtype == "float8_e4m3fn":
        assert scale is not None
        return codecs.encode_fp8(x, scale[:, None]), None
    return x, None


class _Pool:
    """A cache under construction: sequences' tokens laid out in permuted pages, everything else poisoned."""

    def __init__(self, spec: Spec, values: Values, rng: np.random.Generator):
        self.spec, self.values, self.rng = spec, values, rng
        self.num_pages = max(spec.B * spec.M + spec.prefix + 1, 1)  # one page is nobody's
        ids = poison.lay_out(rng, 1, spec.B * spec.M + spec.prefix, self.num_pages)[0]
        self.table = ids[: spec.B * spec.M].reshape(spec.B, spec.M)
        self.prefix = ids[spec.B * spec.M :]
        self.cp_rank = values.cp_rank

    def cache(self, k: Array, v: Array, prefix: tuple[Array, Array] | None, used: Array) -> Cache:
        """k [B, M*P, K, D] and v by rank-local index; used [N, P]: the slots that keep their tokens."""
        spec, rng = self.spec, self.rng
        kv_dtype, K = spec.kv_dtype or spec.dtype, spec.heads[1]
        scales = None
        if kv_dtype == "float8_e4m3fn":  # |x| up to about 4: stays inside 448 scales
            scales = rng.uniform(0.01, 0.06, (2, K)).astype(np.float32)

        def pages(x: Array, extra: Array | None, which: int) -> tuple[Array, Array | None]:
            data, params = encode(spec, x, None if scales is None else scales[which])
            store = np.zeros((self.num_pages, K, spec.P, data.shape[-1]), data.dtype)
            par = None if params is None else np.zeros((self.num_pages, K, spec.P, 2), params.dtype)
            for ids, rows, pars in ((self.table.ravel(), data, params), *self._extra(extra, scales, which)):
                store[ids] = rows.reshape(len(ids), spec.P, K, rows.shape[-1]).transpose(0, 2, 1, 3)
                if par is not None:
                    par[ids] = pars.reshape(len(ids), spec.P, K, 2).transpose(0, 2, 1, 3)
            return store, par if scales is None else scales[which]

        key, key_params = pages(k, None if prefix is None else prefix[0], 0)
        value = value_params = None
        if not spec.shared_value:
            value, value_params = pages(v, None if prefix is None else prefix[1], 1)
        value_dim = spec.value_dim or spec.dim
        one = Cache(key, value, key_params, value_params, kv_dtype, value_dim, spec.shared_value)
        cache = poison.poison(one, used, self.values.poison, rng)
        if spec.L is None:
            return cache
        other = poison.poison(one, np.zeros_like(used), self.values.poison, rng)
        names = [n for n in ("key", "value", "key_params", "value_params") if getattr(cache, n) is not None]
        layers = [cache if layer == 1 else other for layer in range(spec.L)]
        return dataclasses.replace(cache, **{n: np.stack([getattr(c, n) for c in layers]) for n in names})

    def _extra(self, extra: Array | None, scales: Array | None, which: int) -> list[tuple[Array, Array, Any]]:
        if extra is None:
            return []
        return [(self.prefix, *encode(self.spec, extra, None if scales is None else scales[which]))]


def _paged(spec: Spec, values: Values, rng: np.random.Generator) -> dict[str, Any]:
    """paged_attention, paged_decode, paged_attention_step, append_kv: they differ in what is new and what is asked."""
    decode, fused, append = (spec.op == op for op in ("paged_decode", "paged_attention_step", "append_kv"))
    B, P, M, cp = spec.B, spec.P, spec.M, spec.cp_size
    pool = _Pool(spec, values, rng)
    if decode:
        kv_lens = _decode_lengths(values.lens, spec, rng)
        per_sequence = spec.Q or 1
        q_lens, q_offsets = np.full(B, per_sequence), None
        lead: tuple[int, ...] = (B,) if spec.Q is None else (B, spec.Q)
    else:
        q_offsets, kv_lens = _packed_lengths(values.lens, spec, rng, spec.capacity)
        clamped = np.clip(q_offsets.astype(np.int64), 0, spec.T)
        q_lens, lead = np.diff(clamped), (spec.T,)
    s = np.arange(M * P) * cp + values.cp_rank
    q, k, v = _tensors(rng, values.data, spec, lead, (B, M * P), s)
    found: dict[str, Any] = _head_options(spec, values, rng) if not append else {}

    stored = kv_lens.astype(np.int64) - (q_lens if fused or append else 0)  # tokens that the cache already holds
    live = np.arange(M) * P * cp < np.minimum(kv_lens.astype(np.int64), spec.capacity)[:, None]
    left = _left(spec, found)
    if left is not None and not append:  # pages wholly left of every window
        live &= (np.arange(M) + 1) * P * cp > (kv_lens.astype(np.int64) - q_lens - left)[:, None]
    prologue = _prologue(spec, values, rng) if fused or append else {}
    kept = np.arange(M) < prologue.get("read_only_pages", np.zeros(B))[:, None]  # these hold their tokens already
    used = np.zeros((pool.num_pages, P), bool)
    for b in range(B):
        filled = s.reshape(M, P) < np.where(kept[b], kv_lens[b], stored[b])[:, None]
        used[pool.table[b][live[b]]] = filled[live[b]]
    prefix = None
    if spec.prefix:
        length = {"short": 1, "full": spec.prefix * P + 5, "wild": 0}.get(
            values.lens, rng.integers(0, spec.prefix * P + 1)
        )
        _, *prefix = _tensors(rng, values.data, spec, (), (spec.prefix * P,), np.arange(spec.prefix * P))
        used[pool.prefix] = (np.arange(spec.prefix * P) < length).reshape(-1, P)
        found["shared_prefix"] = (pool.prefix.astype(np.int32), np.int32(length))
    found["cache"] = pool.cache(k, v, prefix, used)
    table = pool.table.copy()
    if values.extreme == "unmapped":  # holes in the middle of a context
        live &= rng.random(live.shape) < 0.7
    found["page_table"] = poison.wild_entries(rng, table, live, pool.num_pages)
    if values.extreme == "unmapped":
        wild = np.array([-1, pool.num_pages, INT32_MIN, INT32_MAX])
        found["page_table"] = np.where(live, table, rng.choice(wild, table.shape)).astype(np.int32)
    found["kv_lens"] = kv_lens
    if spec.L is not None:
        found["layer"] = np.int32(
            rng.choice([-1, spec.L, INT32_MIN, INT32_MAX]) if values.extreme == "wild_layer" else 1
        )
    if cp > 1:
        found["cp_rank"] = np.int32(values.cp_rank)
    if decode:
        found["query"] = q
    else:
        found["q_offsets"] = q_offsets
        owned = (np.arange(spec.T) >= clamped[0]) & (np.arange(spec.T) < clamped[-1])
        if not append:
            found["query"] = poison.poison_rows(q, owned, values.poison)
    if spec.Q is not None and "tree_mask" in spec.arrays:
        found["tree_mask"] = rng.random((B * spec.Q if decode else spec.T, spec.Q)) < 0.6
    if fused or append:
        _, key, value = _tensors(rng, values.data, spec, (spec.T,), (spec.T,), np.zeros(spec.T))
        found["key"] = poison.poison_rows(key, owned, values.poison)
        found["value"] = None if spec.shared_value else poison.poison_rows(value, owned, values.poison)
        found |= prologue
    return found


def _left(spec: Spec, found: dict[str, Any]) -> int | None:
    """Left side of the window, when there is one and nothing else moves the positions."""
    window = found.get("local_window_size", spec.options.get("local_window_size"))
    if window is None or spec.prefix:
        return None
    left = int(window) if np.ndim(window) == 0 else window[0]
    return None if left is None or left < 0 else int(left)


def _prologue(spec: Spec, values: Values, rng: np.random.Generator) -> dict[str, Any]:
    (H, K), D, Dv, T = spec.heads, spec.dim, spec.value_dim or spec.dim, spec.T
    found: dict[str, Any] = {}
    shapes = dict(query_bias=(H, D), key_bias=(K, D), value_bias=(K, Dv))
    for name, shape in shapes.items():
        if name in spec.arrays:
            found[name] = rng.standard_normal(shape).astype(DTYPES[spec.dtype])
    if "rope_base" in spec.arrays:
        found["rope_base"] = rng.uniform(5e3, 1e6, spec.B).astype(np.float32)
    if "positions" in spec.arrays:
        rope = spec.options.get("rope")
        shape = (T, 3) if rope is not None and rope.sections and values.lens != "prefill" else (T,)
        low, high = (-5000, 2**20) if values.extreme == "far_positions" else (0, 4096)
        found["positions"] = rng.integers(low, high, shape).astype(np.int32)
    if "read_only_pages" in spec.arrays:
        found["read_only_pages"] = rng.integers(-1, spec.M + 1, spec.B).astype(np.int32)
    return found


def _gather(spec: Spec, values: Values, rng: np.random.Generator) -> dict[str, Any]:
    found = _paged(dataclasses.replace(spec, op="paged_decode", Q=None), values, rng)
    return {name: found[name] for name in ("cache", "page_table", "kv_lens", "layer") if name in found}


def _copy(spec: Spec, values: Values, rng: np.random.Generator) -> dict[str, Any]:
    found = _gather(spec, values, rng)
    num_pages = found["cache"].key.shape[-4]
    destination = rng.permutation(num_pages)[: spec.T]  # distinct; chains and self-copies happen
    source = rng.integers(0, num_pages, len(destination))
    for ids in (source, destination):
        ids[rng.random(len(ids)) < 0.2] = rng.choice([-1, num_pages, INT32_MIN, INT32_MAX])
    pages = dict(source=source.astype(np.int32), destination=destination.astype(np.int32))
    keep = {"cache", "layer"} if "layer" in spec.arrays else {"cache"}
    return {name: x for name, x in found.items() if name in keep} | pages


def _merge(spec: Spec, values: Values, rng: np.random.Generator) -> dict[str, Any]:
    R, T, (H, _), Dv = spec.parts, spec.T, spec.heads, spec.value_dim or spec.dim
    outs = rng.standard_normal((R, T, H, Dv)).astype(DTYPES[spec.dtype])
    size = {"huge": 1e4, "full": 1e-3}.get(values.lens, 5.0)
    lses = (size * rng.standard_normal((R, T, H))).astype(np.float32)
    empty = rng.random((R, T, H)) < {"full": 0.0, "short": 0.9}.get(values.lens, 0.3)
    if values.lens == "empty":
        empty[:] = True
    lses[empty] = -np.inf
    outs = poison.poison_rows(outs, ~empty, values.poison)
    return dict(outs=outs, lses=lses, **_head_options(spec, values, rng))


_BUILDERS = dict(
    attention=_attention,
    ragged_attention=_ragged,
    paged_attention=_paged,
    paged_decode=_paged,
    append_kv=_paged,
    paged_attention_step=_paged,
    gather_kv=_gather,
    copy_pages=_copy,
    merge_partials=_merge,
)


# ---- the lists

GROUPS = ((2, 2), (4, 2), (6, 2), (5, 1), (12, 2), (7, 1), (8, 1), (9, 1), (12, 1), (16, 1), (32, 1))


def _spec(
    op: str, name: str, arrays: str = "", tags: str = "", hints: dict[str, Any] | None = None, **fields: Any
) -> Spec:
    """A spec; keywords that are not fields of Spec are static arguments of the function."""
    known = {f.name for f in dataclasses.fields(Spec)}
    static = tuple(sorted((n, x) for n, x in fields.items() if n not in known))
    shape = {n: x for n, x in fields.items() if n in known}
    names = tuple(arrays.split())
    features = {n.split("_")[0] if n.split("_")[0] in ("bias", "mask") else n for n in names}
    features |= {n for n, _ in static} | set(tags.split())
    if shape.get("shared_value"):
        features.add("shared_value")
    if shape.get("prefix"):
        features.add("shared_prefix")
    return Spec(
        op, name, arrays=names, static=static, hints=tuple((hints or {}).items()), tags=frozenset(features), **shape
    )


def _values(*rows: str) -> tuple[Values, ...]:
    """Values from rows "lens data poison [extreme]"; the names say what differs."""
    made = []
    for row in rows:
        lens, data, kind, *extreme = row.split()
        name = "-".join([lens, *([data] if data != "normal" else []), *extreme])
        made.append(Values(name, lens, data, kind, *extreme))
    return tuple(made)


_DENSE = _values("full normal nan", "random mixture nan", "short heads inf")
_DENSE_CORE = _values(
    "full ones nan",
    "full index nan",
    "random huge_key inf",
    "full negative nan",
    "wild normal nan",
    "full nan_rows nan",
    "full nan_queries nan",
)
_PACKED = _values("mixed normal nan", "boundary mixture inf", "short heads negative_inf", "full normal nan")
_PACKED_CORE = _values(
    "prefill normal nan",
    "one mixture inf",
    "empty normal nan",
    "holes normal nan",
    "wild normal inf",
    "random ones nan",
    "random index inf",
    "boundary huge_key nan",
    "full negative nan",
    "random nan_rows nan",
    "full nan_queries inf",
)
_PAGED_CORE = _values("full normal nan unmapped", "random mixture inf unmapped")
_DECODE = _values("random normal nan", "boundary mixture inf", "short heads negative_inf", "full normal nan")
_DECODE_CORE = _values(
    "wild normal inf",
    "random ones nan",
    "full index inf",
    "boundary huge_key nan",
    "full negative nan",
    "random nan_rows nan",
    "full nan_queries inf",
    "full normal nan unmapped",
)
_FEW = _values("few normal nan", "few mixture inf unmapped", "one normal nan", "empty normal inf", "wild normal nan")
_QUANTISED = _values("random nan_rows nan", "full constant_rows inf")
_SINKS = _values(
    "random normal nan huge_sinks",
    "boundary normal inf tiny_sinks",
    "short normal nan huge_sinks",
    "random normal nan infinite_sinks",
)
_LAYER = _values("random normal nan wild_layer")

_BIAS = "query_bias key_bias value_bias"
_MLA = dict(heads=(8, 1), dim=72, value_dim=64, shared_value=True)  # attention must be given its scale


def _attention_specs() -> list[Spec]:
    op = "attention"
    dense = dict(B=2, T=33, S=33)
    cross = dict(B=3, T=9, S=40)
    specs = [
        _spec(op, f"group{h // k}", heads=(h, k), B=2, T=17, S=17, is_causal=True)
        for h, k in GROUPS
    ]
    specs += [
        _spec(op, "plain", tags="core vmap", **dense),
        _spec(op, "plain_float32", dtype="float32", **dense),
        _spec(op, "plain_float16", dtype="float16", dim=128, **dense),
        _spec(op, "causal", tags="core", is_causal=True, dtype="float32", **dense),
        _spec(op, "causal_bfloat16", is_causal=True, dim=128, B=1, T=70, S=70),
        _spec(op, "lengths", "query_seq_lengths key_value_seq_lengths", tags="core vmap", **cross),
        # Blocks of keys that every query within its length sees whole, beside queries past it that see none.
        _spec(op, "lengths_long", "query_seq_lengths", B=2, T=20, S=300),
        _spec(
            op, "causal_lengths", "query_seq_lengths key_value_seq_lengths", is_causal=True, dtype="float16", **dense
        ),
        _spec(op, "causal_offset", "query_offset", is_causal=True, tags="core", **cross),
        _spec(op, "causal_offset_static", is_causal=True, query_offset=31, **cross),
        _spec(op, "window_causal", is_causal=True, local_window_size=(7, 0), dtype="float16", **dense),
        _spec(op, "window_both", local_window_size=(5, 3), **dense),
        _spec(op, "window_int", local_window_size=4, dtype="float32", **dense),
        _spec(op, "window_left", "query_offset key_value_seq_lengths", local_window_size=(6, None), **cross),
        _spec(op, "window_right", "query_offset", local_window_size=(-1, 2), is_causal=True, **cross),
        _spec(op, "window_zero", local_window_size=(0, 0), **dense),
        _spec(op, "window_traced", "local_window_size query_offset", tags="traced_window core", **cross),
        _spec(op, "segments", "segment_ids", is_causal=True, dim=128, **dense),
        _spec(op, "segments_pair", "segment_ids key_value_seq_lengths", dtype="float32", **cross),
        _spec(op, "soft_cap", logits_soft_cap=1.5, dtype="float32", **dense),
        _spec(op, "sinks", "sinks query_seq_lengths key_value_seq_lengths", tags="sinks", is_causal=True, **dense),
        _spec(op, "alibi", "alibi_slopes", is_causal=True, dtype="float16", **dense),
        _spec(op, "alibi_both", "alibi_slopes query_offset", dim=256, **cross),
        _spec(op, "bias", "bias_bh", dtype="float32", **dense),
        _spec(op, "bias_broadcast", "bias_1h", is_causal=True, **dense),
        _spec(op, "mask", "mask_b1", **dense),
        _spec(op, "mask_heads", "mask_1h key_value_seq_lengths", is_causal=True, dtype="float32", **dense),
        _spec(op, "bias_mask", "bias_b1 mask_bh query_seq_lengths", logits_soft_cap=3.0, **cross),
        _spec(op, "value_dim", dim=80, value_dim=48, **cross),
        _spec(op, "value_dim_wide", dim=96, value_dim=128, dtype="float16", is_causal=True, **dense),
        _spec(op, "dim112", dim=112, heads=(6, 2), **cross),
        _spec(op, "dim192", "query_offset key_value_seq_lengths", dim=192, value_dim=128, is_causal=True, **cross),
        _spec(op, "dim192_long", dim=192, value_dim=128, dtype="float16", B=1, T=200, S=300),
        _spec(op, "dim40", dim=40, heads=(3, 3), dtype="float32", is_causal=True, **dense),
        _spec(op, "scale_zero", scale=0.0, is_causal=True, **dense),
        _spec(op, "scale_negative", scale=-0.3, **cross),
        _spec(op, "out_float32", hints=dict(out_dtype="float32"), is_causal=True, **dense),
        _spec(
            op,
            "everything",
            "query_seq_lengths key_value_seq_lengths segment_ids query_offset sinks alibi_slopes",
            is_causal=True,
            local_window_size=(20, 4),
            logits_soft_cap=8.0,
            scale=0.2,
            tags="sinks",
            **cross,
        ),
        _spec(op, "dim_odd", dim=20, value_dim=7, is_causal=True, B=2, T=9, S=9),
        _spec(op, "single", B=1, T=1, S=1, is_causal=True),
        _spec(op, "no_keys", B=2, T=5, S=0),
        _spec(op, "no_queries", B=2, T=0, S=5),
        _spec(op, "no_batch", B=0, T=3, S=3),
        _spec(op, "long", B=1, T=3, S=300, dim=32, dtype="float32"),
    ]
    return specs


def _ragged_specs() -> list[Spec]:
    op = "ragged_attention"
    sizes = dict(T=40, S=90, B=5)
    return [
        *(
            _spec(op, f"group{h // k}", heads=(h, k), T=24, S=60, B=3)
            for h, k in GROUPS[2::2]
        ),
        _spec(op, "plain", tags="core vmap", **sizes),
        _spec(op, "plain_float32", dtype="float32", tags="core", **sizes),
        _spec(op, "full", is_causal=False, dtype="float16", tags="core", dim=256, **sizes),
        _spec(op, "window", local_window_size=(6, 0), **sizes),
        _spec(op, "window_full", local_window_size=(6, 3), is_causal=False, **sizes),
        _spec(
            op, "window_traced", "local_window_size", is_causal=False, dtype="float32", tags="traced_window", **sizes
        ),
        _spec(op, "soft_cap_sinks", "sinks", logits_soft_cap=2.0, tags="sinks", **sizes),
        _spec(op, "alibi", "alibi_slopes", scale=0.1, **sizes),
        _spec(op, "value_dim", dim=96, value_dim=32, dtype="float16", **sizes),
        _spec(op, "dim192", "sinks", dim=192, value_dim=128, tags="core sinks", **sizes),
        _spec(op, "dim128", dim=128, hints=dict(max_q_len=1), **sizes),
        _spec(op, "scale_zero_float32_out", scale=0.0, hints=dict(out_dtype="float32"), **sizes),
        _spec(op, "no_batch", T=7, S=9, B=0),
        _spec(op, "no_rows", T=0, S=9, B=2),
        _spec(op, "no_keys", T=7, S=0, B=2),
        _spec(op, "many_sequences", T=40, S=80, B=40),
        _spec(op, "one_long", T=100, S=300, B=1),
    ]


def _paged_specs() -> list[Spec]:
    op = "paged_attention"
    specs = [_spec(op, f"group{h // k}", heads=(h, k), B=3, T=20, M=5) for h, k in GROUPS]
    specs += [
        _spec(op, "plain", tags="core vmap", **{}),
        _spec(op, "plain_float32", dtype="float32", tags="core"),
        _spec(op, "plain_float16", dtype="float16", dim=128),
        _spec(op, "full", is_causal=False, tags="core", dim=256),
        *(
            _spec(op, f"page{P}", P=P, M=M, B=3, T=20)
            for P, M in ((8, 20), (64, 3), (128, 2), (256, 1))
        ),
        _spec(op, "int8", kv_dtype="int8", tags="core quantised vmap"),
        _spec(op, "int8_float16", kv_dtype="int8", dtype="float16", dim=128, P=32, M=4, tags="quantised"),
        _spec(op, "int8_float32", kv_dtype="int8", dtype="float32", tags="quantised"),
        _spec(op, "int4", kv_dtype="int4", dim=128, tags="core quantised"),
        _spec(op, "int4_dim80", kv_dtype="int4", dim=80, dtype="float16", tags="quantised"),
        _spec(op, "int4_dim112", kv_dtype="int4", dim=112, value_dim=64, P=8, M=10, tags="quantised"),
        _spec(op, "fp8", kv_dtype="float8_e4m3fn", dim=128, tags="core quantised"),
        _spec(op, "fp8_float16", kv_dtype="float8_e4m3fn", dtype="float16", dim=96, tags="quantised"),
        _spec(op, "value_dim", dim=96, value_dim=64),
        _spec(op, "window", local_window_size=(18, 0)),
        _spec(op, "window_zero", local_window_size=(0, 0), is_causal=False),
        _spec(op, "window_both_full", local_window_size=(9, 4), is_causal=False, dtype="float32"),
        _spec(op, "window_int8", local_window_size=(33, None), kv_dtype="int8", dim=256, tags="quantised"),
        _spec(op, "window_traced", "local_window_size", is_causal=False, tags="traced_window core"),
        _spec(op, "soft_cap", logits_soft_cap=1.0),
        _spec(op, "sinks", "sinks", tags="sinks core", dim=128),
        _spec(op, "sinks_window", "sinks", local_window_size=(5, 0), tags="sinks", P=8, M=8),
        _spec(op, "alibi", "alibi_slopes", dtype="float16"),
        _spec(op, "alibi_full", "alibi_slopes", is_causal=False, dtype="float32"),
        _spec(op, "scale_negative", scale=-0.2),
        _spec(op, "scale_zero", scale=0.0, is_causal=False),
        _spec(op, "layer", L=3, tags="layer vmap"),
        _spec(op, "layer_int4", L=2, kv_dtype="int4", tags="layer quantised"),
        _spec(op, "layer_fp8", L=2, kv_dtype="float8_e4m3fn", tags="layer quantised"),
        _spec(op, "dim_odd", dim=20, value_dim=12, kv_dtype="int8", tags="quantised"),
        _spec(op, "many_sequences", B=40, T=40, M=2, P=8),
        # Few query rows on long contexts: implementations cut the keys of a tile in parts.
        _spec(op, "long_chunk", B=2, T=100, M=24, P=64, dtype="float16", dim=128),
        _spec(op, "few_on_long_int8", "sinks", B=2, T=60, M=24, P=64, kv_dtype="int8", local_window_size=(900, 0)),
        _spec(op, "cp2", cp_size=2, hints=dict(out_dtype="float32"), tags="cp"),
        _spec(op, "cp3_window", cp_size=3, local_window_size=(30, 0), hints=dict(out_dtype="float32"), tags="cp", P=8),
        _spec(
            op, "cp8_int8", cp_size=8, kv_dtype="int8", P=8, M=3, hints=dict(out_dtype="float32"), tags="cp quantised"
        ),
        _spec(op, "cp8", cp_size=8, P=8, M=3, dtype="float32", tags="cp"),
        _spec(op, "invariant", hints=dict(batch_invariant=True, max_q_len=1)),
        _spec(op, "mla", scale=0.125, **_MLA),
        _spec(op, "mla_int8", kv_dtype="int8", tags="quantised", scale=0.125, **_MLA),
        _spec(op, "mla_int4", kv_dtype="int4", scale=0.125, tags="quantised", **_MLA),
        _spec(op, "tree", "tree_mask", Q=6),
        _spec(op, "tree_window", "tree_mask", Q=4, local_window_size=(11, 0), dtype="float32"),
        _spec(op, "prefix", prefix=3),
        _spec(op, "prefix_everything", "sinks alibi_slopes", prefix=2, local_window_size=(40, 0), tags="sinks"),
        _spec(
            op,
            "everything",
            "sinks alibi_slopes",
            L=2,
            kv_dtype="int8",
            local_window_size=(25, 2),
            logits_soft_cap=5.0,
            scale=0.3,
            tags="sinks quantised",
            hints=dict(max_q_len=3),
        ),
        _spec(op, "no_batch", B=0, T=3, M=2),
        _spec(op, "no_batch_invariant", B=0, T=3, M=2, hints=dict(batch_invariant=True)),
        _spec(op, "no_rows", B=2, T=0, M=2),
        _spec(op, "no_pages", B=2, T=4, M=0),
    ]
    return specs


def _decode_specs() -> list[Spec]:
    op = "paged_decode"
    specs = [_spec(op, f"group{h // k}", heads=(h, k), B=4) for h, k in GROUPS]
    specs += [
        _spec(op, "plain", tags="core vmap"),
        _spec(op, "plain_float32", dtype="float32", P=8, M=30),
        _spec(op, "float16_dim128", dtype="float16", dim=128),
        _spec(op, "three_tokens", Q=3, tags="core"),
        _spec(op, "three_tokens_full", Q=3, is_causal=False, dim=256),
        _spec(op, "int8", kv_dtype="int8", tags="core quantised", dim=128),
        _spec(op, "int4", kv_dtype="int4", tags="quantised", dtype="float16", dim=128),
        _spec(op, "fp8", kv_dtype="float8_e4m3fn", tags="quantised", Q=2, dim=128),
        _spec(op, "window", local_window_size=(17, 0), P=8, M=12, dim=128),
        _spec(op, "window_sinks", "sinks", local_window_size=(0, 0), tags="sinks"),
        _spec(op, "window_traced", "local_window_size", tags="traced_window", Q=2),
        _spec(op, "soft_cap_alibi", "alibi_slopes", logits_soft_cap=2.0),
        _spec(op, "value_dim", dim=112, value_dim=80, heads=(6, 2)),
        _spec(op, "dim192", dim=192, value_dim=128, Q=2),
        _spec(op, "layer_int8", L=2, kv_dtype="int8", tags="layer quantised", dim=256),
        _spec(op, "cp2_int4", cp_size=2, kv_dtype="int4", hints=dict(out_dtype="float32"), tags="cp quantised"),
        _spec(op, "mla", scale=0.125, **_MLA),
        _spec(op, "tree", "tree_mask", Q=5),
        _spec(op, "tree_int4_16_rows", "tree_mask", Q=2, heads=(16, 2), dim=128, kv_dtype="int4"),
        _spec(op, "cp2_int4_16_rows", cp_size=2, heads=(32, 2), dim=128, kv_dtype="int4", B=2, tags="cp"),
        _spec(op, "prefix", prefix=2, Q=2),
        _spec(op, "page256", P=256, M=1, B=2),
        _spec(op, "invariant", hints=dict(batch_invariant=True)),
    ]
    return specs


def ropes() -> dict[str, RopeConfig]:
    """One configuration a kind, pairing, partial block and section scheme."""
    long = dict(short_factor=tuple(1 + 0.1 * j for j in range(16)), long_factor=tuple(2 + 0.5 * j for j in range(16)))
    return dict(
        half=RopeConfig(dim=64),
        interleaved=RopeConfig(dim=64, pairing="interleaved"),
        partial=RopeConfig(dim=24, base=500.0),
        offset=RopeConfig(dim=16, offset=48, pairing="interleaved"),
        linear=RopeConfig(kind="linear", dim=64, factor=4.0),
        dynamic=RopeConfig(kind="dynamic", dim=64, factor=2.0, original_max_position=64),
        dynamic_offset=RopeConfig(
            kind="dynamic", dim=32, offset=32, pairing="interleaved", factor=2.0, original_max_position=64
        ),
        yarn=RopeConfig(kind="yarn", dim=64, factor=8.0, original_max_position=4096),
        yarn_smooth=RopeConfig(
            kind="yarn",
            dim=64,
            factor=8.0,
            original_max_position=4096,
            truncate=False,
            attention_factor=0.75,
            beta_fast=16.0,
            beta_slow=2.0,
            pairing="interleaved",
        ),
        llama3=RopeConfig(kind="llama3", dim=64, base=5e5, factor=8.0, original_max_position=8192),
        longrope=RopeConfig(kind="longrope", dim=32, factor=4.0, original_max_position=4096, **long),
        longrope_long=RopeConfig(kind="longrope", dim=32, factor=4.0, original_max_position=4096, long=True, **long),
        sections=RopeConfig(dim=64, sections=(8, 12, 12)),
        sections_interleaved=RopeConfig(dim=64, sections=(12, 10, 10), sections_interleaved=True),
    )


def _append_specs() -> list[Spec]:
    op = "append_kv"
    specs = [
        _spec(op, "plain", tags="core vmap"),
        _spec(op, "plain_float32", dtype="float32", P=8, M=12),
        _spec(op, "float16", dtype="float16", dim=80, value_dim=112),
        _spec(op, "int8", kv_dtype="int8", tags="core quantised vmap"),
        _spec(op, "int8_float16", kv_dtype="int8", dtype="float16", dim=128, tags="core quantised"),
        _spec(op, "int8_float32", kv_dtype="int8", dtype="float32", tags="core quantised"),
        _spec(op, "int4", kv_dtype="int4", tags="core quantised"),
        _spec(op, "int4_float16", kv_dtype="int4", dtype="float16", dim=80, value_dim=112, tags="core quantised"),
        _spec(op, "int4_float32", kv_dtype="int4", dtype="float32", tags="quantised"),
        _spec(op, "fp8", kv_dtype="float8_e4m3fn", tags="core quantised"),
        _spec(op, "fp8_float16", kv_dtype="float8_e4m3fn", dtype="float16", tags="quantised"),
        _spec(op, "bias", "key_bias value_bias"),
        _spec(op, "bias_int8", "key_bias value_bias", kv_dtype="int8", heads=(3, 3), tags="quantised"),
        _spec(op, "read_only", "read_only_pages", P=8, M=10),
        _spec(op, "layer_int8", L=3, kv_dtype="int8", tags="layer quantised"),
        _spec(op, "cp2", "read_only_pages", cp_size=2, P=8, tags="cp"),
        _spec(op, "cp3_int4", cp_size=3, kv_dtype="int4", tags="cp quantised"),
        _spec(op, "mla", **_MLA),
        _spec(op, "mla_int8", kv_dtype="int8", tags="quantised", **_MLA),
        _spec(op, "mla_int4", kv_dtype="int4", tags="quantised", **_MLA),
        _spec(op, "mla_fp8", kv_dtype="float8_e4m3fn", tags="quantised", **_MLA),
        _spec(op, "page256", P=256, M=1, B=2, dim=32),
        _spec(op, "no_rows", B=2, T=0, M=2),
        _spec(op, "no_pages", B=2, T=4, M=0),
    ]
    for name, rope in ropes().items():
        arrays = "rope_base positions" if rope.kind == "dynamic" else "positions"
        dtype = "float32" if rope.pairing == "half" else "bfloat16"
        specs.append(_spec(op, f"rope_{name}", arrays, rope=rope, dtype=dtype, dim=64, heads=(2, 2), tags="rope"))
    specs += [
        _spec(op, "rope_own_position", "key_bias", rope=RopeConfig(dim=64), dtype="float32", tags="rope"),
        _spec(op, "rope_int8", "key_bias positions", rope=RopeConfig(dim=64), kv_dtype="int8", tags="rope quantised"),
        _spec(op, "rope_int4", rope=RopeConfig(dim=32), kv_dtype="int4", dtype="float16", tags="rope quantised"),
        _spec(op, "rope_fp8", rope=RopeConfig(dim=64), kv_dtype="float8_e4m3fn", tags="rope quantised"),
        _spec(op, "rope_cp2", rope=RopeConfig(dim=64), cp_size=2, dtype="float32", tags="rope cp"),
    ]
    return specs


def _step_specs() -> list[Spec]:
    op = "paged_attention_step"
    half, inter = RopeConfig(dim=64), RopeConfig(dim=64, pairing="interleaved")
    configs = ropes()
    specs = [
        _spec(op, f"group{h // k}", _BIAS, heads=(h, k), B=3, T=20, M=4) for h, k in GROUPS
    ]
    specs += [
        _spec(op, "plain", tags="core vmap"),
        _spec(op, "plain_float32", dtype="float32"),
        _spec(op, "rope", rope=half, tags="core rope"),
        _spec(op, "rope_float32", _BIAS, rope=half, dtype="float32", tags="rope"),
        _spec(op, "rope_float16", rope=inter, dtype="float16", tags="rope"),
        _spec(op, "rope_partial", rope=configs["partial"], dtype="float32", tags="rope"),
        _spec(op, "rope_positions", "positions", rope=half, tags="rope"),
        _spec(op, "rope_dynamic", "rope_base", rope=configs["dynamic"], dtype="float32", tags="rope"),
        _spec(op, "rope_yarn", rope=configs["yarn"], dtype="float32", tags="rope"),
        _spec(op, "rope_sections", "positions", rope=configs["sections_interleaved"], dtype="float32", tags="rope"),
        _spec(
            op,
            "int8_everything",
            f"{_BIAS} sinks",
            rope=half,
            kv_dtype="int8",
            logits_soft_cap=9.0,
            tags="rope sinks quantised",
        ),
        _spec(op, "int8", kv_dtype="int8", tags="quantised core"),
        _spec(op, "int4", rope=inter, kv_dtype="int4", tags="rope quantised"),
        _spec(op, "fp8", rope=half, kv_dtype="float8_e4m3fn", tags="rope quantised"),
        _spec(op, "logn", logn=24, dtype="float32"),
        _spec(op, "logn_zero_based", logn=24, logn_zero_based=True, dtype="float32", is_causal=False),
        _spec(op, "logn_positions", "positions", logn=1000),
        _spec(op, "window_sinks", "sinks", rope=half, local_window_size=(12, 0), tags="rope sinks"),
        _spec(op, "alibi", "alibi_slopes query_bias", scale=0.3),
        _spec(op, "read_only", "read_only_pages", P=8, M=10),
        _spec(
            op,
            "layer_int8",
            "local_window_size",
            L=3,
            kv_dtype="int8",
            rope=half,
            tags="layer rope quantised traced_window",
        ),
        _spec(op, "cp2", rope=half, cp_size=2, hints=dict(out_dtype="float32"), tags="rope cp"),
        _spec(op, "value_dim", _BIAS, dim=80, value_dim=112, heads=(5, 1)),
        _spec(op, "dim192", _BIAS, rope=RopeConfig(dim=64, offset=128), dim=192, value_dim=128, tags="rope"),
        _spec(op, "mla", rope=RopeConfig(dim=8, offset=64, pairing="interleaved"), tags="rope", scale=0.125, **_MLA),
        _spec(op, "mla_int8", kv_dtype="int8", scale=0.125, tags="quantised", **_MLA),
        _spec(op, "tree", "tree_mask positions", rope=half, Q=5, tags="rope"),
        _spec(op, "prefix", rope=half, prefix=2, dtype="float32", tags="rope"),
    ]
    # No more tokens than sequences: implementations may take all of it for decode, and append as they go.
    few = functools.partial(_spec, op, B=12, T=10)
    wide = RopeConfig(dim=128)
    specs += [
        few("few", rope=half, tags="few core rope"),
        few("few_plain", dim=128, dtype="float16", tags="few vmap"),
        few(
            "few_int8",
            f"{_BIAS} sinks read_only_pages",
            rope=wide,
            dim=128,
            kv_dtype="int8",
            P=8,
            M=20,
            tags="few rope sinks quantised",
        ),
        few("few_int4", "positions", rope=inter, dtype="float16", kv_dtype="int4", tags="few rope quantised"),
        few(
            "few_fp8",
            "key_bias",
            rope=RopeConfig(dim=32, offset=64),
            dim=128,
            kv_dtype="float8_e4m3fn",
            L=2,
            tags="few layer rope quantised",
        ),
        few("few_wide_group", _BIAS, heads=(32, 1), dim=256, kv_dtype="int8", tags="few quantised"),
        few("few_dim256", rope=wide, heads=(4, 4), dim=256, dtype="float16", tags="few rope"),
        few("few_window", rope=half, local_window_size=(12, 3), is_causal=False, tags="few rope"),
        few("few_cp2", "read_only_pages", rope=half, cp_size=2, hints=dict(out_dtype="float32"), tags="few rope cp"),
        few("few_cp3_int8", cp_size=3, kv_dtype="int8", P=8, hints=dict(out_dtype="float32"), tags="few cp quantised"),
        few("few_prefix", rope=half, prefix=2, tags="few rope"),
        few("few_tree", "tree_mask positions", rope=inter, Q=4, tags="few rope"),
        few("few_sections", "positions key_bias", rope=configs["sections"], tags="few rope"),
        few("few_dynamic", "rope_base", rope=configs["dynamic_offset"], tags="rope"),  # no far position: see contract 2
        few("few_logn", rope=configs["yarn"], logn=24, logn_zero_based=True, dim=128, tags="few rope"),
        _spec(op, "few_long", rope=half, B=24, T=24, heads=(4, 4), P=32, M=16, tags="few rope"),
        _spec(op, "few_alone", rope=half, B=1, T=1, heads=(8, 2), P=64, M=24, tags="few rope"),
    ]
    return specs


def _gather_specs() -> list[Spec]:
    op = "gather_kv"
    return [
        _spec(op, "bfloat16", tags="vmap"),
        _spec(op, "float32", dtype="float32", P=8, value_dim=32),
        _spec(op, "int8", kv_dtype="int8", tags="quantised"),
        _spec(op, "int8_float16", kv_dtype="int8", dtype="float16", tags="quantised"),
        _spec(op, "int4", kv_dtype="int4", dim=80, value_dim=112, tags="quantised"),
        _spec(op, "int4_float16", kv_dtype="int4", dtype="float16", tags="quantised"),
        _spec(op, "fp8", kv_dtype="float8_e4m3fn", tags="quantised"),
        _spec(op, "fp8_float16", kv_dtype="float8_e4m3fn", dtype="float16", out_dtype="float16", tags="quantised"),
        _spec(op, "layer", L=2, kv_dtype="int8", tags="layer quantised"),
        _spec(op, "mla", **_MLA),
        _spec(op, "mla_int4", kv_dtype="int4", tags="quantised", **_MLA),
    ]


def _copy_specs() -> list[Spec]:
    op = "copy_pages"
    sizes = dict(T=9, B=3, M=4, dim=32)
    return [
        _spec(op, "bfloat16", tags="vmap", **sizes),
        _spec(op, "int8", kv_dtype="int8", tags="quantised", **sizes),
        _spec(op, "int4_layer", "layer", kv_dtype="int4", L=2, tags="layer quantised", **sizes),
        _spec(op, "fp8_all_layers", kv_dtype="float8_e4m3fn", L=2, tags="quantised", **sizes),
        _spec(op, "mla_int8", kv_dtype="int8", tags="quantised", **{**_MLA, "dim": 40, "value_dim": 32}, T=9, B=3, M=4),
    ]


def _merge_specs() -> list[Spec]:
    op = "merge_partials"
    return [
        _spec(op, "float32", dtype="float32", tags="vmap"),
        _spec(op, "bfloat16", parts=2),
        _spec(op, "float16_wide", dtype="float16", parts=40, T=5),
        _spec(op, "sinks", "sinks", dtype="float32", tags="sinks"),
        _spec(op, "cast", dtype="float32", hints=dict(out_dtype="bfloat16"), parts=8),
        _spec(op, "one", parts=1, value_dim=80),
        _spec(op, "no_rows", T=0),
    ]


def _chosen(spec: Spec) -> tuple[Values, ...]:
    """The value sets that go through a spec."""
    tags, chosen = spec.tags, ()
    if spec.op == "attention":
        chosen = _DENSE + (_DENSE_CORE if "core" in tags else ())
    elif spec.op == "merge_partials":
        return _values(
            "full normal nan", "random normal nan", "short normal inf", "empty normal nan", "huge normal nan"
        ) + (_values("random normal nan huge_sinks") if "sinks" in tags else ())
    elif spec.op in ("gather_kv", "copy_pages"):
        chosen = _values("random normal nan", "boundary mixture inf", "full normal nan unmapped")
        if spec.op == "gather_kv":
            chosen += _values(
                "wild normal nan", *(["random nan_rows nan", "full outliers nan"] if "quantised" in tags else [])
            )
    elif spec.op == "paged_decode":
        chosen = _DECODE + (_DECODE_CORE if "core" in tags else ())
    else:
        chosen = _PACKED + (_PACKED_CORE if "core" in tags else ())
        if spec.op != "ragged_attention" and "core" in tags:
            chosen += _PAGED_CORE
        if "few" in tags:
            chosen += _FEW
    if "quantised" in tags and spec.op not in ("gather_kv", "copy_pages"):
        chosen += _QUANTISED
        if spec.op == "append_kv":
            chosen += _values(
                "prefill mixture nan", "prefill denormal nan", "prefill outliers nan", "prefill nan_rows inf"
            )
    if "sinks" in tags:
        chosen += _SINKS
    if "traced_window" in tags:
        chosen += tuple(dataclasses.replace(v, name=f"{v.name}-{i}", seed=i) for i in range(1, 5) for v in chosen[:3])
    if "layer" in tags and spec.op != "copy_pages":
        chosen += _LAYER
    if spec.op == "append_kv" and "positions" in spec.arrays:
        chosen += _values("mixed normal nan far_positions", "prefill normal nan")
    if "cp" in tags:
        chosen = tuple(
            dataclasses.replace(v, name=f"{v.name}-rank{r}", cp_rank=r)
            for i, v in enumerate(chosen)
            for r in {i % spec.cp_size, spec.cp_size - 1}
        )
    if spec.B == 0 or spec.T == 0 or spec.M == 0 or spec.S == 0:
        chosen = chosen[:2]
    return tuple({v.name: v for v in chosen}.values())


SPECS: tuple[Spec, ...] = tuple(
    [
        *_attention_specs(),
        *_ragged_specs(),
        *_paged_specs(),
        *_decode_specs(),
        *_append_specs(),
        *_step_specs(),
        *_gather_specs(),
        *_copy_specs(),
        *_merge_specs(),
    ]
)
CASES: tuple[Case, ...] = tuple(Case(spec, values) for spec in SPECS for values in _chosen(spec))


def find(name: str) -> Case:
    """The case of that name."""
    for case in CASES:
        if case.name == name:
            return case
    raise KeyError(name)


def random_values(rng: np.random.Generator, spec: Spec, name: str = "draw") -> Values:
    """A random value set for a spec, for tests that draw."""
    kinds = ["normal", "mixture", "ones", "index", "huge_key", "negative", "heads", "nan_rows", "nan_queries"]
    if "quantised" in spec.tags:
        kinds += ["constant_rows"]
    if spec.op == "attention":
        lens = ["full", "random", "short", "wild"]
    elif spec.op == "paged_decode":
        lens = ["random", "boundary", "short", "full", "wild"]
    elif spec.op == "merge_partials":
        lens, kinds = ["random", "short", "full", "empty", "huge"], ["normal"]
    else:
        lens = ["mixed", "random", "boundary", "short", "full", "prefill", "one", "few", "holes", "wild"]
        if "rope_base" in spec.arrays:  # its promise ends near: contract 2
            lens.remove("wild")
    extremes = ["", "", ""]
    if spec.op.startswith("paged"):
        extremes += ["unmapped"]
    if "sinks" in spec.arrays:
        extremes += ["huge_sinks", "tiny_sinks", "infinite_sinks"]
    return Values(
        name=name,
        lens=str(rng.choice(lens)),
        data=str(rng.choice(kinds)),
        poison=str(rng.choice(poison.KINDS)),
        extreme=str(rng.choice(extremes)),
        seed=int(rng.integers(2**31)),
        cp_rank=int(rng.integers(spec.cp_size)),
    )


def random_shape(rng: np.random.Generator, spec: Spec) -> Spec:
    """The spec with other sizes, for nightly tests: every draw is a new executable."""
    group = int(rng.choice([1, 2, 3, 5, 6, 7, 8, 9, 12, 16, 32]))
    kv_heads = 1 if spec.shared_value else int(rng.integers(1, max(2, 17 // group)))
    changed: dict[str, Any] = dict(
        name=f"{spec.name}-random{int(rng.integers(2**31))}",
        heads=(group * kv_heads, kv_heads),
        B=int(rng.integers(1, 8)),
        T=int(rng.integers(1, 100)),
        P=int(rng.choice([8, 16, 32, 64, 128, 256])),
        M=int(rng.integers(1, 5)),
    )
    rope = spec.options.get("rope")
    least = 64 if rope is not None else 8
    if not spec.shared_value:
        dims = np.arange(least, 264, 8)
        changed |= dict(dim=int(rng.choice(dims)), value_dim=int(rng.choice(np.arange(8, 264, 8))))
    if spec.op == "attention":
        changed["B"] = int(rng.integers(1, 4))
        same = spec.T == spec.S
        changed["S"] = changed["T"] if same else int(rng.integers(0, 300))
    if spec.op == "ragged_attention":
        changed["S"] = int(rng.integers(changed["T"], 400))
    return dataclasses.replace(spec, **changed)

"""Every primitive in plain jnp: always right, everywhere, and what the other implementations are first compared with.

Memory is O(T * S) for the dense functions; paged calls copy the pages of a sequence (or of a group of sequences) into
contiguous keys and values first. Heads come before keys throughout, since the pages are stored that way.

Which keys a row sees is an interval of key positions, `first <= s < end`, on top of which come only the segment ids,
the mask and the tree mask. Invisible keys are dropped by selection, never by multiplication, so what their slots hold
(NaN, Inf) reaches nothing.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import quant, rotation
from ..rope import RopeConfig
from ..spec import (
    INTEGER_KV_DTYPES,
    PLAN_SHAPE,
    AppendSpec,
    AttnSpec,
    CopySpec,
    GatherSpec,
    MergeSpec,
    PlanSpec,
    Spec,
    StepSpec,
    on_stacked_cache,
    written_caches,
)

Named = dict[str, Any]  # operands by name
_CACHES = ("key_cache", "value_cache", "key_params", "value_params")

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
# Packed queries are attended to in chunks of rows of one sequence. A hint below the cap is the chunk itself; without a
# hint, 16 rows waste little on decode (the copy of the keys costs more) and keep prefill a matrix product.
ROW_CHUNK, MAX_ROW_CHUNK = 16, 128
# batch_invariant: keys are folded in blocks that start at multiples of this, whatever the page size (at most 256).
KEY_BLOCK = 256
# Uniform queries take as many sequences at once as keep the copied float32 keys and values below this many bytes.
GROUP_BYTES = 1 << 24

_dot = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def supports(spec: Spec) -> str | None:
    """Why `spec` cannot run here: never."""
    return None


def run(spec: Spec, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """The results of the primitive `spec.op`, in the order of its table of results."""
    return run_operation(_OPERATIONS[spec.op], spec, *operands)


def run_operation(operation, spec: Spec, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """`operation(spec, named)`, which knows stacked caches only, on the operands of any spec."""
    named = dict(zip(spec.operands, operands, strict=True))
    if not getattr(spec, "stacked", True):  # one layer: a leading axis of 1 is free here
        named = {name: x[None] if name in _CACHES else x for name, x in named.items()}
        results = operation(on_stacked_cache(spec), named)
        written = len(written_caches(spec)) if isinstance(spec, AppendSpec | StepSpec | CopySpec) else 0
        return tuple(x[0] if i < written else x for i, x in enumerate(results))
    return operation(spec, named)


# --- positions -----------------------------------------------------------------------------------------------------


def saturating_add(a: jax.Array, b: jax.Array) -> jax.Array:
    """a + b, int32, stopped at the ends of the range instead of wrapped."""
    total = a + b
    return jnp.where(((a ^ total) & (b ^ total)) < 0, jnp.where(a < 0, INT32_MIN, INT32_MAX), total)


def saturating_subtract(a: jax.Array, b: jax.Array) -> jax.Array:
    """a - b, int32, stopped at the ends of the range instead of wrapped."""
    total = a - b
    return jnp.where(((a ^ b) & (a ^ total)) < 0, jnp.where(a < 0, INT32_MIN, INT32_MAX), total)


class Rows(NamedTuple):
    """Positions and visible keys of query rows; int32 arrays of one shape.

    Lengths may be any int32, so a position `offset + index` need not fit 32 bits. Sums saturate, offset and window
    first: they then differ from the exact value only where both lie beyond every key.
    """

    position: jax.Array
    first: jax.Array  # the keys first <= s < end are visible
    end: jax.Array


def rows(offset, index, key_first, key_end, is_causal: bool, window, alive=True) -> Rows:
    """Rows at position offset + index over keys key_first <= s < key_end.

    Args:
      offset, index, key_first, key_end: int32, broadcast against each other; index >= 0.
      window: None or (left, right), int32, broadcast like offset; -1 is unbounded.
      alive: bool, broadcast likewise; False for rows that see nothing.
    """
    offset, index = jnp.asarray(offset, jnp.int32), jnp.asarray(index, jnp.int32)
    first, end = key_first, key_end
    if is_causal:
        end = jnp.minimum(end, saturating_add(offset, index + 1))
    if window is not None:
        left, right = window
        nearest = saturating_add(saturating_subtract(offset, left), index)
        first = jnp.maximum(first, jnp.where(left == -1, INT32_MIN, nearest))
        farthest = saturating_add(saturating_add(offset, right), index + 1)
        end = jnp.minimum(end, jnp.where(right == -1, INT32_MAX, farthest))
    end = jnp.where(alive, end, INT32_MIN)
    return Rows(*jnp.broadcast_arrays(saturating_add(offset, index), jnp.asarray(first, jnp.int32), end))


def sees(r: Rows, s: jax.Array) -> jax.Array:
    """Whether rows [..., T] see the keys at positions s [..., S]: bool [..., T, S]."""
    s = s[..., None, :]
    return (s >= r.first[..., None]) & (s < r.end[..., None])


def distances(position: jax.Array, s: jax.Array) -> jax.Array:
    """|p - s| in float32 [..., T, S], for positions [..., T] and keys s [..., S]."""
    p, s = position[..., None], s[..., None, :]
    near = (p < 2**30) & (p > -(2**30))  # the int32 difference is exact there, and wraps only beyond
    exact = (jnp.where(near, p, 0) - s).astype(jnp.float32)
    return jnp.abs(jnp.where(near, exact, p.astype(jnp.float32) - s.astype(jnp.float32)))


def clamp_ranges(ranges: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """(lo, hi), int32 [B], of ranges [B, 2] with 0 <= lo <= hi <= size whatever the ranges hold."""
    lo = jnp.clip(ranges[:, 0], 0, size)
    return lo, jnp.clip(ranges[:, 1], lo, size)


def owners(lo: jax.Array, hi: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The first sequence whose [lo, hi) holds each of `size` rows, int32, and whether there is one, bool."""
    if lo.shape[0] == 0:
        return jnp.zeros(size, jnp.int32), jnp.zeros(size, bool)
    index = jnp.arange(size, dtype=jnp.int32)[:, None]
    holds = (lo <= index) & (index < hi)
    return jnp.argmax(holds, axis=1).astype(jnp.int32), jnp.any(holds, axis=1)


def pick(array: jax.Array, index: jax.Array) -> jax.Array:
    """array[index] along axis 0, index clamped; zeros from an empty axis, for rows that nobody will use."""
    if array.shape[0] == 0:
        return jnp.zeros((*index.shape, *array.shape[1:]), array.dtype)
    return array[jnp.clip(index, 0, array.shape[0] - 1)]


def window_of(named: Named) -> tuple[jax.Array, jax.Array] | None:
    """(left, right), int32 [B]."""
    window = named.get("window")
    return None if window is None else (window[:, 0], window[:, 1])


# --- softmax(q k^T) v ----------------------------------------------------------------------------------------------


class Partial(NamedTuple):
    """Attention over some of the keys, before normalisation; float32."""

    sums: jax.Array  # [B, K, G, T, Dv] sum of exp(x - top) * v
    top: jax.Array  # [B, K, G, T] largest logit, -inf without keys
    total: jax.Array  # [B, K, G, T] sum of exp(x - top)


def _partial(spec: AttnSpec, named: Named, q, k, v, visible, distance=None, bias=None) -> Partial:
    """q [B, T, H, D] over k [B, K, S, D], v [B, K, S, Dv].

    visible (bool) and bias broadcast to [B, K, G, T, S]; distance, float32 |p - s|, to [B, T, S].
    """
    kv_heads, group = spec.num_kv_heads, spec.num_q_heads // spec.num_kv_heads
    q = q.reshape(*q.shape[:2], kv_heads, group, q.shape[-1])
    x = _dot("btkgd,bksd->bkgts", q, k) * spec.scale
    if spec.logits_soft_cap is not None:
        x = spec.logits_soft_cap * jnp.tanh(x / spec.logits_soft_cap)
    if "alibi_slopes" in named:
        slopes = named["alibi_slopes"].reshape(1, kv_heads, group, 1, 1)
        x = x - slopes * distance[:, None, None]
    if bias is not None:
        x = x + bias.astype(jnp.float32)
    x = jnp.where(visible, x, -jnp.inf)
    top = jnp.max(x, axis=-1, initial=-jnp.inf)
    p = jnp.exp(x - jnp.where(top == -jnp.inf, 0.0, top)[..., None])
    v = jnp.where(jnp.any(visible, axis=(2, 3))[..., None], v, 0).astype(jnp.float32)
    sums = _dot("bkgts,bksd->bkgtd", p, v)
    # A value that some rows see and others do not may be NaN or Inf, and 0 * NaN is NaN: any such sum is recomputed.
    sums = lax.cond(jnp.all(jnp.isfinite(sums)), lambda *_: sums, _sums_with_infinities, p, v, visible)
    return Partial(sums, top, jnp.sum(p, axis=-1))


def _sums_with_infinities(p, v, visible) -> jax.Array:
    """sum over the visible s of p * v, where v may hold NaN and Inf: finite values first, then what the others do."""
    finite = jnp.isfinite(v)
    sees_key = jnp.broadcast_to(visible, p.shape).astype(jnp.float32)

    def seen(which):
        return _dot("bkgts,bksd->bkgtd", sees_key, which.astype(jnp.float32)) > 0

    sums = _dot("bkgts,bksd->bkgtd", p, jnp.where(finite, v, 0))
    for value in (jnp.inf, -jnp.inf):
        sums = sums + jnp.where(seen(v == value), value, 0.0)
    return jnp.where(seen(jnp.isnan(v)), jnp.nan, sums)


def _fold(a: Partial, b: Partial) -> Partial:
    """The partial result over the keys of both."""
    top = jnp.maximum(a.top, b.top)
    origin = jnp.where(top == -jnp.inf, 0.0, top)
    wa, wb = jnp.exp(a.top - origin), jnp.exp(b.top - origin)
    return Partial(a.sums * wa[..., None] + b.sums * wb[..., None], top, a.total * wa + b.total * wb)


def _finish(partial: Partial, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """(out [B, T, H, Dv], lse [B, T, H]), float32, with the sinks [H] in the denominator."""
    sums, top, total = partial
    empty = total == 0
    if sinks is not None:
        sinks = sinks.reshape(1, *top.shape[1:3], 1)
        lifted = jnp.maximum(top, sinks)
        origin = jnp.where(lifted == -jnp.inf, 0.0, lifted)
        weight = jnp.exp(top - origin)
        sums, top, total = sums * weight[..., None], lifted, total * weight + jnp.exp(sinks - origin)
    out = jnp.where(empty[..., None], 0.0, sums / jnp.where(empty, 1.0, total)[..., None])
    lse = jnp.where(top == -jnp.inf, 0.0, top) + jnp.log(total)
    lse = jnp.where(empty, -jnp.inf if sinks is None else sinks, lse)  # whatever the sink is: an infinite one too
    batch, kv_heads, group, count = lse.shape
    out = out.transpose(0, 3, 1, 2, 4).reshape(batch, count, kv_heads * group, out.shape[-1])
    return out, lse.transpose(0, 3, 1, 2).reshape(batch, count, kv_heads * group)


# --- dense and packed attention ------------------------------------------------------------------------------------


def dense_rows(spec: AttnSpec, named: Named) -> Rows:
    """Rows [B, T] of `attention`."""
    batch, count = named["query"].shape[:2]
    size = named["key"].shape[1]
    index = jnp.arange(count, dtype=jnp.int32)
    per_sequence = functools.partial(jnp.full, (batch, 1), dtype=jnp.int32)
    column = {name: named[name][:, None] for name in ("query_offset", "query_lens", "kv_lens") if name in named}
    window = window_of(named)
    return rows(
        offset=column.get("query_offset", per_sequence(0)),
        index=index[None],
        key_first=per_sequence(0),
        key_end=jnp.minimum(column.get("kv_lens", per_sequence(size)), size),
        is_causal=spec.is_causal,
        window=None if window is None else (window[0][:, None], window[1][:, None]),
        alive=index[None] < column.get("query_lens", per_sequence(count)),
    )


def ragged_rows(spec: AttnSpec, named: Named) -> Rows:
    """Rows [1, T] of `ragged_attention`; key positions are indices into the packed keys.

    The query at row t of a sequence stands at p = kv_len - q_len + (t - q_lo); shifted by the sequence's first key
    that is kv_hi - q_hi + t, which fits 32 bits.
    """
    count, size = named["query"].shape[0], named["key"].shape[0]
    lo, hi = clamp_ranges(named["q_ranges"], count)
    kv_lo, kv_hi = clamp_ranges(named["kv_ranges"], size)
    sequence, owned = owners(lo, hi, count)
    window = window_of(named)
    result = rows(
        offset=pick(kv_hi - hi, sequence),
        index=jnp.arange(count, dtype=jnp.int32),
        key_first=pick(kv_lo, sequence),
        key_end=pick(kv_hi, sequence),
        is_causal=spec.is_causal,
        window=None if window is None else tuple(pick(side, sequence) for side in window),
        alive=owned,
    )
    return Rows(*(x[None] for x in result))


def per_head(x: jax.Array, spec: AttnSpec) -> jax.Array:
    """[1|B, 1|H, 1|T, 1|S] as [1|B, 1|K, 1|G, 1|T, 1|S]."""
    split = (1, 1) if x.shape[1] == 1 else (spec.num_kv_heads, spec.num_q_heads // spec.num_kv_heads)
    return x.reshape(x.shape[0], *split, *x.shape[2:])


def _attention(spec: AttnSpec, named: Named) -> tuple[jax.Array, ...]:
    r = dense_rows(spec, named)
    s = jnp.arange(named["key"].shape[1], dtype=jnp.int32)[None]
    visible = sees(r, s)
    if "segment_ids_q" in named:
        visible &= named["segment_ids_q"][:, :, None] == named["segment_ids_kv"][:, None, :]
    visible = visible[:, None, None]
    if "mask" in named:
        visible &= per_head(named["mask"], spec)
    partial = _partial(
        spec,
        named,
        named["query"],
        named["key"].swapaxes(1, 2),
        named["value"].swapaxes(1, 2),
        visible,
        distances(r.position, s) if "alibi_slopes" in named else None,
        per_head(named["bias"], spec) if "bias" in named else None,
    )
    out, lse = _finish(partial, named.get("sinks"))
    if "query_lens" in named:  # padding, unlike a row that sees nothing, has no sink either
        inside = jnp.arange(lse.shape[1], dtype=jnp.int32) < named["query_lens"][:, None]
        lse = jnp.where(inside[..., None], lse, -jnp.inf)
    return out.astype(spec.out_dtype), lse


def _ragged_attention(spec: AttnSpec, named: Named) -> tuple[jax.Array, ...]:
    r = ragged_rows(spec, named)
    s = jnp.arange(named["key"].shape[0], dtype=jnp.int32)[None]
    partial = _partial(
        spec,
        named,
        named["query"][None],
        named["key"].swapaxes(0, 1)[None],
        named["value"].swapaxes(0, 1)[None],
        sees(r, s)[:, None, None],
        distances(r.position, s) if "alibi_slopes" in named else None,
    )
    out, lse = _finish(partial, named.get("sinks"))
    count = named["query"].shape[0]
    _, owned = owners(*clamp_ranges(named["q_ranges"], count), count)
    return out[0].astype(spec.out_dtype), jnp.where(owned[:, None], lse[0], -jnp.inf)


# --- pages ---------------------------------------------------------------------------------------------------------


def _pages(pool: jax.Array, layer: jax.Array, page: jax.Array) -> jax.Array:
    """pool[layer, page] of pool [L, N, ...], with indices clamped.

    The CPU backend gathers bfloat16 and fp8 as float32. Tied to the page ids, which differ from sequence to sequence,
    the conversion stays in the loop over them (and is fused with the gather); else the whole pool is converted first.
    """
    num_layers, num_pages = pool.shape[:2]
    pool, layer, page = lax.optimization_barrier((pool, layer, page))
    return pool.at[jnp.clip(layer, 0, num_layers - 1), jnp.clip(page, 0, num_pages - 1)].get(mode="promise_in_bounds")


def _mapped(pool: jax.Array, layer: jax.Array, page: jax.Array) -> jax.Array:
    """Whether (layer, page) names a page of pool [L, N, ...]."""
    return (layer >= 0) & (layer < pool.shape[0]) & (page >= 0) & (page < pool.shape[1])


def _read(spec: AttnSpec | GatherSpec, named: Named, layer, table, dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys [B, K, M*P, D] and values [B, K, M*P, Dv] in dtype of the pages table [B, M] of layer [B], decoded.

    The third result says which of the [B, M*P] slots lie on mapped pages; the others hold anything.
    """
    layer = layer[:, None]

    def contiguous(name):
        pool, params = named[f"{name}_cache"], named.get(f"{name}_params")
        if pool.shape[1] == 0:
            rows_shape = (*table.shape, *pool.shape[2:-1], spec.head_dim if name == "key" else spec.value_dim)
            pages = jnp.zeros(rows_shape, dtype)
        else:
            if params is not None:
                if spec.kv_dtype in INTEGER_KV_DTYPES:
                    params = _pages(params, layer, table)
                else:  # float32 [L, K], one scale a head
                    params = params[jnp.clip(layer, 0, params.shape[0] - 1)][..., None, None]
            pages = quant.decode(_pages(pool, layer, table), params, spec.kv_dtype, dtype)
        batch, columns, heads, page_size, width = pages.shape
        return pages.swapaxes(1, 2).reshape(batch, heads, columns * page_size, width)

    key = contiguous("key")
    value = key[..., : spec.value_dim] if spec.shared_value else contiguous("value")
    mapped = _mapped(named["key_cache"], layer, table)
    return key, value, jnp.repeat(mapped, spec.page_size, axis=1)


class _Keys(NamedTuple):
    """The keys of B sequences, before any is read."""

    layer: jax.Array  # [B]
    table: jax.Array  # [B, M]
    position: jax.Array  # [B, M*P], of a sequence's own coordinate: its first own token is 0, a shared prefix negative
    exists: jax.Array  # [B, M*P] bool: not past the prefix, and of a context-parallel rank that exists
    end: jax.Array  # [B] own keys s < end exist


def _keys(spec: AttnSpec, named: Named, pages_multiple: int = 1) -> _Keys:
    """The prefix pages of all sequences, then their own; each part padded to a multiple of `pages_multiple` columns."""
    page_size = spec.page_size
    batch, own = named["page_table"].shape
    limit = min(own * page_size * spec.cp_size, INT32_MAX)

    def padded(table):
        return jnp.pad(table, ((0, 0), (0, -table.shape[1] % pages_multiple)), constant_values=-1)

    table = padded(named["page_table"])
    position = jnp.arange(table.shape[1] * page_size, dtype=jnp.int32)[None] * spec.cp_size
    exists = jnp.ones((batch, position.shape[1]), bool)
    if "cp_rank" in named:  # a rank that does not exist holds no token
        rank = named["cp_rank"][:, None]
        position, exists = position + rank, exists & (rank >= 0) & (rank < spec.cp_size)
    position = jnp.broadcast_to(position, exists.shape)
    if "prefix_pages" in named:
        prefix = padded(named["prefix_pages"][None])
        length = jnp.clip(named["prefix_len"][0], 0, named["prefix_pages"].shape[0] * page_size)
        slot = jnp.arange(prefix.shape[1] * page_size, dtype=jnp.int32)
        before = jnp.broadcast_to(slot - named["prefix_len"][0], (batch, slot.shape[0]))
        position = jnp.concatenate([before, position], axis=1)
        exists = jnp.concatenate([jnp.broadcast_to(slot < length, before.shape), exists], axis=1)
        table = jnp.concatenate([jnp.broadcast_to(prefix, (batch, prefix.shape[1])), table], axis=1)
    end = jnp.clip(named["kv_lens"], 0, limit)
    return _Keys(named["layer"], table, position, exists, end)


# --- paged attention -----------------------------------------------------------------------------------------------


def _over_pages(spec: AttnSpec, named: Named, q, keys: _Keys, offset, index, alive, window, tree) -> Partial:
    """Queries q [B, T, H, D] at positions offset [B] + index [B, T] over `keys`.

    alive: bool [B, T]; window: (left, right) [B] or None; tree: tree_mask rows [B, T, Q] or None.
    """
    key, value, mapped = _read(spec, named, keys.layer, keys.table, q.dtype)
    r = rows(
        offset=offset[:, None],
        index=index,
        key_first=INT32_MIN,
        key_end=keys.end[:, None],
        is_causal=spec.is_causal and tree is None,
        window=None if window is None else (window[0][:, None], window[1][:, None]),
        alive=alive,
    )
    visible = sees(r, keys.position) & (keys.exists & mapped)[:, None]
    if tree is not None:
        new = saturating_subtract(keys.position, offset[:, None])  # index among the new tokens; negative: history
        inside = (new >= 0) & (new < tree.shape[-1])
        columns = jnp.where(inside, new, 0)[:, None]
        allowed = jnp.take_along_axis(tree, columns, axis=2) if tree.shape[-1] else jnp.zeros_like(visible)
        visible &= (new < 0)[:, None] | (inside[:, None] & allowed)
    distance = distances(r.position, keys.position) if "alibi_slopes" in named else None
    return _partial(spec, named, q, key, value, visible[:, None, None], distance)


def _uniform_attention(spec: AttnSpec, named: Named) -> tuple[jax.Array, jax.Array]:
    """query [B, Q, H, D]: sequences in groups, each a batched product over its copied pages."""
    query = named["query"]
    batch, count = query.shape[:2]
    keys, window = _keys(spec, named), window_of(named)
    index = jnp.arange(count, dtype=jnp.int32)[None]
    tree = named["tree_mask"].reshape(batch, count, -1) if "tree_mask" in named else None

    def group(xs):
        q, keys, kv_len, window, tree = xs
        offset = saturating_subtract(kv_len, jnp.int32(count))
        partial = _over_pages(spec, named, q, keys, offset, index, True, window, tree)
        return _finish(partial, named.get("sinks"))

    xs = (query, keys, named["kv_lens"], window, tree)
    bytes_each = 4 * keys.position.shape[1] * spec.num_kv_heads * (spec.head_dim + spec.value_dim)
    size = max(GROUP_BYTES // max(bytes_each, 1), 1)
    if size >= batch:
        return group(xs)
    return _map_groups(group, xs, batch, size)


def _map_groups(function, xs, batch: int, size: int):
    """function over consecutive groups of at most `size` entries of the leading axis of all arrays of xs."""
    size = -(-batch // -(-batch // size))  # even groups: the last is not much smaller than the others
    whole = batch // size * size
    parts = [lax.map(function, jax.tree.map(lambda x: x[:whole].reshape(-1, size, *x.shape[1:]), xs))]
    parts = [jax.tree.map(lambda y: y.reshape(whole, *y.shape[2:]), parts[0])]
    if whole < batch:
        parts.append(function(jax.tree.map(lambda x: x[whole:], xs)))
    return jax.tree.map(lambda *ys: jnp.concatenate(ys), *parts)


def _packed_attention(spec: AttnSpec, named: Named) -> tuple[jax.Array, jax.Array]:
    """query [T, H, D]: one sequence after another, its rows in chunks.

    batch_invariant: one row at a time, its keys in blocks of a fixed size folded in order, so that every operation has
    the same shapes whatever else is in the call.
    """
    query = named["query"]
    count, heads, _ = query.shape
    lo, hi = clamp_ranges(named["q_ranges"], count)
    block_pages = KEY_BLOCK // spec.page_size
    chunk = min(max(spec.max_q_len or ROW_CHUNK, 1), MAX_ROW_CHUNK, count)
    if spec.batch_invariant:
        chunk = 1
        keys = _keys(spec, named, block_pages)
    else:
        keys = _keys(spec, named)
    sinks, window = named.get("sinks"), window_of(named)

    def sequence(carry, xs):
        keys, kv_len, lo, hi, window = xs
        # A batch of one from here on; offset saturates for the wildest lengths only, see `rows`.
        keys = jax.tree.map(lambda x: x[None], keys)
        window = jax.tree.map(lambda x: x[None], window)
        offset = saturating_subtract(kv_len, hi - lo)[None]

        def chunk_of_rows(i, carry):
            out, lse = carry
            index = i * chunk + jnp.arange(chunk, dtype=jnp.int32)
            row = lo + index
            alive = row < hi
            where = jnp.minimum(row, count - 1)
            tree = named["tree_mask"][where][None] if "tree_mask" in named else None
            attend = functools.partial(
                _over_pages,
                spec,
                named,
                query[where][None],
                offset=offset,
                index=index[None],
                alive=alive[None],
                window=window,
                tree=tree,
            )
            partial = _in_blocks(spec, attend, keys) if spec.batch_invariant else attend(keys)
            rows_out, rows_lse = _finish(partial, sinks)
            target = jnp.where(alive, row, count)  # out of range: dropped
            out = out.at[target].set(rows_out[0], mode="drop")
            return out, lse.at[target].set(rows_lse[0], mode="drop")

        chunks = (hi - lo + chunk - 1) // chunk
        return lax.fori_loop(0, chunks, chunk_of_rows, carry), None

    # float32 until the end: a bfloat16 scatter on CPU converts the whole array there and back.
    out = jnp.zeros((count, heads, spec.value_dim), jnp.float32)
    lse = jnp.full((count, heads), -jnp.inf, jnp.float32)
    (out, lse), _ = lax.scan(sequence, (out, lse), (keys, named["kv_lens"], lo, hi, window))
    return out, lse


def _in_blocks(spec: AttnSpec, attend, keys: _Keys) -> Partial:
    """`attend` over the keys of one sequence in blocks of KEY_BLOCK, folded in order."""
    columns = KEY_BLOCK // spec.page_size

    def block(i):
        def part(x, width):
            return lax.dynamic_slice_in_dim(x, i * width, width, axis=1)

        return attend(
            keys._replace(
                table=part(keys.table, columns),
                position=part(keys.position, KEY_BLOCK),
                exists=part(keys.exists, KEY_BLOCK),
            )
        )

    # The blocks before the last key that exists; one block past it would change nothing (its weight is 0).
    used = keys.exists & (keys.position < keys.end[:, None])
    last = jnp.max(jnp.where(used, jnp.arange(used.shape[1], dtype=jnp.int32) + 1, 0))
    shapes = jax.eval_shape(block, 0)
    start = Partial(jnp.zeros_like(shapes.sums), jnp.full_like(shapes.top, -jnp.inf), jnp.zeros_like(shapes.total))
    blocks = (last + KEY_BLOCK - 1) // KEY_BLOCK
    return lax.fori_loop(0, blocks, lambda i, partial: _fold(partial, block(i)), start)


def _paged_attention(spec: AttnSpec, named: Named) -> tuple[jax.Array, ...]:
    query = named["query"]
    lse_shape = query.shape[:-1]
    prefix = named["prefix_pages"].shape[0] if "prefix_pages" in named else 0
    if math.prod(lse_shape) == 0 or named["page_table"].shape[0] == 0:
        out, lse = jnp.zeros((*lse_shape, spec.value_dim)), jnp.full(lse_shape, -jnp.inf, jnp.float32)
    elif named["page_table"].shape[1] + prefix == 0 and not spec.packed:
        out = jnp.zeros((*lse_shape, spec.value_dim))
        lse = jnp.broadcast_to(named.get("sinks", -jnp.inf), lse_shape).astype(jnp.float32)
    elif spec.packed:
        out, lse = _packed_attention(spec, named)
    elif spec.batch_invariant:
        out, lse = _packed_attention(spec, _as_packed(named))
        out, lse = out.reshape(*lse_shape, spec.value_dim), lse.reshape(lse_shape)
    else:
        out, lse = _uniform_attention(spec, named)
    return out.astype(spec.out_dtype), lse


def _as_packed(named: Named) -> Named:
    """Operands of a packed call for those of a uniform one."""
    batch, count = named["query"].shape[:2]
    lo = jnp.arange(batch, dtype=jnp.int32) * count
    query = named["query"].reshape(batch * count, *named["query"].shape[2:])
    return {**named, "query": query, "q_ranges": jnp.stack([lo, lo + count], axis=1)}


# --- RoPE and prologue ---------------------------------------------------------------------------------------------


def _rotation(rope: RopeConfig, named: Named, position, sequence) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), float32 [T, dim / 2]; position int32 [T] or [T, 3]; sequence int32 [T], for bases of dynamic RoPE."""
    if "rope_turns" in named:
        turns = named["rope_turns"][:, 0], named["rope_turns"][:, 1]
    else:
        turns = rotation.dynamic_turns(pick(named["rope_base"], sequence), rope.dim)
    if rope.sections and position.ndim == 1:
        position = jnp.repeat(position[:, None], 3, axis=1)
    return rotation.cos_sin(rope, position, turns)


class _Tokens(NamedTuple):
    """The new tokens [T] of a call, int32 unless said."""

    sequence: jax.Array
    owned: jax.Array  # bool: belongs to a sequence
    position: jax.Array  # of the sequence's own tokens; meaningless where not owned
    turn: jax.Array  # [T] or [T, 3], for RoPE and logn


def _tokens(named: Named, count: int) -> _Tokens:
    lo, hi = clamp_ranges(named["q_ranges"], count)
    sequence, owned = owners(lo, hi, count)
    # p = kv_len - (hi - row): only a kv_len near INT32_MIN could wrap, and nothing is written or seen at p < 0.
    behind = pick(hi, sequence) - jnp.arange(count, dtype=jnp.int32)
    position = saturating_subtract(pick(named["kv_lens"], sequence), behind)
    turn = position
    if "prefix_len" in named:
        turn = saturating_add(position, named["prefix_len"][0])
    return _Tokens(sequence, owned, position, named.get("positions", turn))


def _prologue(x, bias, rope: RopeConfig | None, turned, factor=None) -> jax.Array:
    """Tokens x [T, heads, D] through bias, RoPE and a factor [T] in float32, rounded once to x's dtype."""
    if bias is None and rope is None and factor is None:
        return x
    y = x.astype(jnp.float32)
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    if rope is not None:
        y = rotation.rotate(y, rope, *turned)
    if factor is not None:
        y = y * factor[:, None, None]
    # A GPU's arithmetic makes NaN of other bits than a CPU's, and stored rows have the same bits everywhere.
    nan = np.full((), np.nan, x.dtype).view(f"u{x.dtype.itemsize}")
    bits = jnp.where(jnp.isnan(y), nan, _unsigned(quant.round_to(y, x.dtype).astype(x.dtype)))
    return lax.bitcast_convert_type(bits, x.dtype)


def _logn(spec: StepSpec, turn: jax.Array) -> jax.Array:
    """The query factor log(n) / log(m) where n > m, else 1; n = p + 1, or p when zero-based; float32 [T]."""
    p = turn if turn.ndim == 1 else turn[:, 0]
    shift = 0 if spec.logn_zero_based else 1
    n = jnp.maximum(p.astype(jnp.float32) + shift, 1.0)
    return jnp.where(p > spec.logn - shift, jnp.log(n) / np.float32(math.log(spec.logn)), 1.0)


# --- writes to the pools -------------------------------------------------------------------------------------------


def _unsigned(x: jax.Array) -> jax.Array:
    """The bits of x."""
    return lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize])


def _scatter(pool: jax.Array, updates: jax.Array, layer: jax.Array, page: jax.Array, *slot: jax.Array) -> jax.Array:
    """pool [L, N, K, P, X] with pages (layer, page) [n], or their slots `slot` [n], set to updates.

    In place when the pool is donated. Writes to indices past the end are dropped. updates: [n, K, P, X] or [n, K, X].
    """

    def write(pool, updates, layer, page, *slot):
        at = (layer, page, slice(None), *slot) if slot else (layer, page)
        return pool.at[at].set(updates, mode="drop")

    def write_bits(pool, updates, *at):
        return lax.bitcast_convert_type(write(_unsigned(pool), _unsigned(updates), *at), pool.dtype)

    if pool.dtype not in (jnp.bfloat16, jnp.float8_e4m3fn):
        return write(pool, updates, layer, page, *slot)
    # XLA's CPU backend scatters neither dtype: it converts the whole pool to float32 and back. Two passes over the
    # bits are the cheapest that is left, and keep NaN payloads.
    return lax.platform_dependent(pool, updates, layer, page, *slot, cpu=write_bits, default=write)


def _write_tokens(spec: AppendSpec, named: Named, tokens: _Tokens, key: jax.Array, value: jax.Array | None) -> Named:
    """The written caches, by name: key [T, K, D] and value [T, K, Dv] after their prologue, encoded and stored."""
    num_layers, num_pages, _, page_size, _ = named["key_cache"].shape
    table = named["page_table"]
    p = tokens.position
    stored = tokens.owned & (p >= 0)
    local = p // spec.cp_size
    if "cp_rank" in named:
        stored &= p - local * spec.cp_size == pick(named["cp_rank"], tokens.sequence)
    column = local // page_size
    stored &= column < table.shape[1]
    if "read_only_pages" in named:
        stored &= column >= pick(named["read_only_pages"], tokens.sequence)
    layer = pick(named["layer"], tokens.sequence)
    page = _table_entry(table, tokens.sequence, column)
    stored &= _mapped(named["key_cache"], layer, page)
    at = (jnp.where(stored, layer, 0), jnp.where(stored, page, num_pages), jnp.where(stored, local % page_size, 0))

    written = {}
    for name, x in (("key", key), ("value", value)):
        if x is None:
            continue
        params = named.get(f"{name}_params")
        scale = None
        if spec.kv_dtype == "float8_e4m3fn":
            scale = params[jnp.clip(layer, 0, num_layers - 1)][..., None]  # [T, K, 1]
        data, row_params = quant.encode(x, spec.kv_dtype, scale)
        written[f"{name}_cache"] = _scatter(named[f"{name}_cache"], data, *at)
        if row_params is not None:
            written[f"{name}_params"] = _scatter(params, row_params, *at)
    return written


def _table_entry(table: jax.Array, sequence: jax.Array, column: jax.Array) -> jax.Array:
    """table[sequence, column], indices clamped; -1 from an empty table."""
    if table.size == 0:
        return jnp.full(sequence.shape, -1, jnp.int32)
    return table[jnp.clip(sequence, 0, table.shape[0] - 1), jnp.clip(column, 0, table.shape[1] - 1)]


def _append_tokens(spec: AppendSpec, named: Named, tokens: _Tokens, turned) -> Named:
    """Prologue and storage of the new keys and values."""
    key = _prologue(named["key"], named.get("key_bias"), spec.rope, turned)
    value = None
    if not spec.shared_value:
        value = _prologue(named["value"], named.get("value_bias"), None, None)
    return _write_tokens(spec, named, tokens, key, value)


def _append_kv(spec: AppendSpec, named: Named) -> tuple[jax.Array, ...]:
    tokens = _tokens(named, named["key"].shape[0])
    turned = None if spec.rope is None else _rotation(spec.rope, named, tokens.turn, tokens.sequence)
    written = _append_tokens(spec, named, tokens, turned)
    return tuple(written[name] for name in written_caches(spec))


def paged_attention_step(spec: StepSpec, named: Named, attend=_paged_attention) -> tuple[jax.Array, ...]:
    """The fused step; `attend` is its attention, over what was stored."""
    append = spec.append
    tokens = _tokens(named, named["query"].shape[0])
    turned = None if append.rope is None else _rotation(append.rope, named, tokens.turn, tokens.sequence)
    written = _append_tokens(append, named, tokens, turned)
    factor = None if spec.logn is None else _logn(spec, tokens.turn)
    query = _prologue(named["query"], named.get("query_bias"), append.rope, turned, factor)
    out, lse = attend(spec.attn, {**named, **written, "query": query})
    return (*(written[name] for name in written_caches(spec)), out, lse)


# --- gather, copy, merge -------------------------------------------------------------------------------------------


def _gather_kv(spec: GatherSpec, named: Named) -> tuple[jax.Array, ...]:
    table = named["page_table"]
    if spec.kv_dtype in INTEGER_KV_DTYPES:
        dtype = named["key_params"].dtype
    else:
        dtype = spec.out_dtype if spec.kv_dtype == "float8_e4m3fn" else spec.kv_dtype
    key, value, mapped = _read(spec, named, named["layer"], table, dtype)
    s = jnp.arange(mapped.shape[1], dtype=jnp.int32)
    present = (mapped & (s < named["kv_lens"][:, None]))[:, None, :, None]
    return tuple(jnp.where(present, x, 0).swapaxes(1, 2).astype(spec.out_dtype) for x in (key, value))


def _copy_pages(spec: CopySpec, named: Named) -> tuple[jax.Array, ...]:
    layer, source, destination = named["layer"], named["source"], named["destination"]
    pool = named[spec.caches[0]]
    if pool.shape[1] == 0:
        return tuple(named[name] for name in spec.caches)
    copied = _mapped(pool, layer, source) & _mapped(pool, layer, destination)
    at = (jnp.where(copied, layer, 0), jnp.where(copied, destination, pool.shape[1]))
    return tuple(_scatter(named[name], _pages(named[name], layer, source), *at) for name in spec.caches)


def _merge_partials(spec: MergeSpec, named: Named) -> tuple[jax.Array, ...]:
    outs, lses, sinks = named["outs"].astype(jnp.float32), named["lses"], named.get("sinks")
    top = jnp.max(lses, axis=0, initial=-jnp.inf)
    if sinks is not None:
        top = jnp.maximum(top, sinks)
    origin = jnp.where(top == -jnp.inf, 0.0, top)
    weights = jnp.exp(lses - origin)
    total = jnp.sum(weights, axis=0)
    if sinks is not None:
        total = total + jnp.exp(sinks - origin)
    share = weights / jnp.where(total == 0, 1.0, total)
    out = jnp.sum(share[..., None] * jnp.where(lses[..., None] == -jnp.inf, 0.0, outs), axis=0)
    return out.astype(spec.out_dtype), origin + jnp.log(total)


def _make_plan(spec: PlanSpec, named: Named):
    return (jnp.zeros(PLAN_SHAPE, jnp.int32),)  # nothing here reads one


_OPERATIONS = {
    "attention": _attention,
    "ragged_attention": _ragged_attention,
    "paged_attention": _paged_attention,
    "append_kv": _append_kv,
    "paged_attention_step": paged_attention_step,
    "gather_kv": _gather_kv,
    "copy_pages": _copy_pages,
    "make_plan": _make_plan,
    "merge_partials": _merge_partials,
}

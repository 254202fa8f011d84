"""The backward pass of `attention` and `ragged_attention`: plain jnp, memory linear in T and S.

Probabilities are recomputed from the saved lse, one block of queries by keys at a time, so that no [T, S] array exists
(but for those the caller made: bias and mask). With `ds = p * (dout . v - dout . out + dlse)`:

    dv = p^T dout        dq = scale * ds' k        dk = scale * ds'^T q        ds' = ds * (1 - tanh^2) under a soft cap

All sums are float32, in a fixed order; each result is rounded once. What a row does not see is selected away, never
multiplied by zero: a NaN in a row that sees nothing, or in another sequence, reaches no gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from ..backends import xla
from ..spec import AttnSpec

# Elements of one block's [B, H, queries, keys] arrays, about ten of which are alive at once: 16 MB each.
BLOCK_ELEMENTS = 1 << 22
MIN_BLOCK, MAX_BLOCK = 16, 512
DIFFERENTIABLE = ("query", "key", "value", "bias", "alibi_slopes", "sinks")

_dot = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def differentiable(primitive: Primitive) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """(spec, *operands) -> (out, lse) of an attention primitive, with gradients in its floating operands."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def bind(spec, *operands):
        out, lse = primitive.bind(*operands, spec=spec)
        return out, lse

    def forward(spec, *operands):
        out, lse = bind(spec, *operands)
        return (out, lse), (operands, out, lse)

    def transpose(spec, residuals, cotangents):
        operands, out, lse = residuals
        grads = backward(spec, dict(zip(spec.operands, operands)), out, lse, *cotangents)
        return tuple(grads.get(name) for name in spec.operands)

    bind.defvjp(forward, transpose)
    return lambda spec, *operands: bind(spec, *_alike(operands))


def _alike(operands: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The operands, all varying over the mesh axes that any of them varies over under shard_map.

    Applied above a custom_vjp: its cotangents then vary alike, and that of an operand that was the same on every device
    is summed over the devices by the transpose of this cast.
    """
    varying = frozenset().union(*(jax.typeof(x).manual_axis_type.varying for x in operands))

    def cast(x):
        missing = varying - jax.typeof(x).manual_axis_type.varying
        return lax.pcast(x, tuple(missing), to="varying") if missing else x

    return tuple(cast(x) for x in operands)


def backward(
    spec: AttnSpec,
    operands: dict[str, jax.Array],
    out: jax.Array,
    lse: jax.Array,
    dout: jax.Array,
    dlse: jax.Array,
) -> dict[str, jax.Array]:
    """Cotangents of the floating operands, by name, in their dtypes.

    Args:
      spec: of op attention or ragged_attention.
      operands: the primitive's, by name, after `alike`.
      out, lse: its results. dout, dlse: their cotangents.
    """
    local = functools.partial(_dense if spec.op == "attention" else _ragged, spec)
    mesh = jax.typeof(operands["query"]).sharding.mesh
    if jax.sharding.AxisType.Explicit in mesh.axis_types:  # shardings in types: the compiler places what is in between
        placed = {name: jax.typeof(operands[name]).sharding.spec for name in DIFFERENTIABLE if name in operands}
        local = jax.sharding.auto_axes(local, out_sharding=placed)
    return local(operands, out, lse, dout, dlse)


def _dense(spec, operands, out, lse, dout, dlse):
    return _backward(spec, operands, xla.dense_rows(spec, operands), out, lse, dout, dlse)


def _ragged(spec, operands, out, lse, dout, dlse):
    lifted = {**operands, **{name: operands[name][None] for name in ("query", "key", "value")}}
    rows = xla.ragged_rows(spec, operands)
    grads = _backward(spec, lifted, rows, *(x[None] for x in (out, lse, dout, dlse)))
    return {**grads, **{name: grads[name][0] for name in ("query", "key", "value")}}


class _Queries(NamedTuple):
    """What the blocks of queries are cut from: blocks on axis 0."""

    q: jax.Array  # [n, B, K, G, Tc, D]
    dout: jax.Array  # [n, B, K, G, Tc, Dv] float32
    lse: jax.Array  # [n, B, K, G, Tc], 0 where it was -inf
    shift: jax.Array  # [n, B, K, G, Tc]: dlse - dout . out
    rows: xla.Rows  # [n, B, Tc]
    segment: jax.Array | None  # [n, B, Tc]


class _Keys(NamedTuple):
    """What the blocks of keys are cut from: blocks on axis 0."""

    k: jax.Array  # [m, B, K, Sc, D]
    v: jax.Array  # [m, B, K, Sc, Dv]
    segment: jax.Array | None  # [m, B, Sc]
    index: jax.Array  # [m]


class _Grads(NamedTuple):
    """Running sums, float32; None for operands that are absent."""

    q: jax.Array  # [n, B, K, G, Tc, D]
    slopes: jax.Array | None  # [K, G]
    bias: jax.Array | None  # like the bias, padded to whole blocks


def _backward(spec: AttnSpec, operands, rows: xla.Rows, out, lse, dout, dlse) -> dict[str, jax.Array]:
    query, key, value = (operands[name] for name in ("query", "key", "value"))
    batch, T, heads, _ = query.shape
    S, kv_heads = key.shape[1:3]
    if query.size == 0 or key.size == 0 or value.size == 0:
        return {**_zero_gradients(operands), **_sink_gradient(operands, out, lse, dout, dlse)}
    block = _block_size(batch * heads)
    Tc, Sc = min(block, T), min(block, S)

    def split(x, size, axis):  # [..., T, ...] -> [n, ..., size, ...]
        pad = -x.shape[axis] % size
        x = jnp.pad(x, [(0, pad if a == axis else 0) for a in range(x.ndim)])
        x = x.reshape(*x.shape[:axis], x.shape[axis] // size, size, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    def by_head(x):  # [B, T, H, ...] -> [B, K, G, T, ...]
        return jnp.moveaxis(x.reshape(batch, T, kv_heads, heads // kv_heads, *x.shape[3:]), 1, 3)

    dead = rows.end == xla.INT32_MIN
    rows = xla.Rows(rows.position, rows.first, jnp.where(dead, 0, rows.end))  # padding is 0 too, and sees nothing
    rows = rows._replace(first=jnp.maximum(rows.first, 0))
    queries = _Queries(
        q=split(by_head(query), Tc, 3),
        dout=split(by_head(dout.astype(jnp.float32)), Tc, 3),
        lse=split(by_head(jnp.where(lse == -jnp.inf, 0.0, lse)), Tc, 3),
        shift=split(by_head(dlse - _dout_dot_out(out, dout)), Tc, 3),
        rows=jax.tree.map(lambda x: split(x, Tc, 1), rows),
        segment=split(operands["segment_ids_q"], Tc, 1) if "segment_ids_q" in operands else None,
    )
    keys = _Keys(
        k=split(key.swapaxes(1, 2), Sc, 2),
        v=split(value.swapaxes(1, 2), Sc, 2),
        segment=split(operands["segment_ids_kv"], Sc, 1) if "segment_ids_kv" in operands else None,
        index=jnp.arange(-(-S // Sc), dtype=jnp.int32),
    )

    def padded(name):
        if name not in operands:
            return None
        x = xla.per_head(operands[name], spec)
        pads = [(0, -x.shape[axis] % size if x.shape[axis] > 1 else 0) for axis, size in ((3, Tc), (4, Sc))]
        return jnp.pad(x, [(0, 0)] * 3 + pads)

    mask, bias = padded("mask"), padded("bias")
    slopes = operands.get("alibi_slopes")

    def key_block(grads, keys):
        def query_block(i, carry):
            grads, dk, dv = carry
            at = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), queries)

            def cut(x):
                return None if x is None else _cut(x, i * Tc, keys.index * Sc, Tc, Sc)

            def add(grads, dk, dv):
                one = _block(spec, at, keys, keys.index * Sc, slopes, cut(mask), cut(bias))
                grads = _Grads(
                    q=lax.dynamic_update_index_in_dim(grads.q, grads.q[i] + one.q, i, 0),
                    slopes=None if slopes is None else grads.slopes + one.slopes,
                    bias=None if bias is None else _add_cut(grads.bias, one.bias, i * Tc, keys.index * Sc),
                )
                return grads, dk + one.k, dv + one.v

            reached = jnp.maximum(at.rows.first, keys.index * Sc) < jnp.minimum(at.rows.end, (keys.index + 1) * Sc)
            return lax.cond(jnp.any(reached), add, lambda *unchanged: unchanged, grads, dk, dv)

        zeros = jnp.zeros_like(keys.k, jnp.float32), jnp.zeros_like(keys.v, jnp.float32)
        grads, dk, dv = lax.fori_loop(0, queries.q.shape[0], query_block, (grads, *zeros))
        return grads, (dk, dv)

    grads = _Grads(
        q=jnp.zeros_like(queries.q, jnp.float32),
        slopes=None if slopes is None else jnp.zeros_like(slopes).reshape(kv_heads, heads // kv_heads),
        bias=None if bias is None else jnp.zeros_like(bias, jnp.float32),
    )
    grads, (dk, dv) = lax.scan(key_block, grads, keys)

    def joined(x, axis, size):  # the inverse of split, in [B, size, heads, D]
        x = jnp.moveaxis(x, 0, axis)
        x = x.reshape(*x.shape[:axis], -1, x.shape[-1])
        x = lax.slice_in_dim(x, 0, size, axis=axis)
        x = jnp.moveaxis(x, axis, 1)
        return x.reshape(batch, size, -1, x.shape[-1])

    result = {
        "query": joined(grads.q, 3, T).astype(query.dtype),
        "key": joined(dk, 2, S).astype(key.dtype),
        "value": joined(dv, 2, S).astype(value.dtype),
    }
    if bias is not None:
        shape = operands["bias"].shape
        unpadded = grads.bias[:, :, :, : shape[2], : shape[3]]
        result["bias"] = unpadded.reshape(shape).astype(operands["bias"].dtype)
    if slopes is not None:
        result["alibi_slopes"] = grads.slopes.reshape(heads)
    return {**result, **_sink_gradient(operands, out, lse, dout, dlse)}


def _block_size(heads: int) -> int:
    """The power of two whose square is at most BLOCK_ELEMENTS / heads, within bounds (B * H = 64: 256)."""
    size = MIN_BLOCK
    while size < MAX_BLOCK and 4 * size * size * heads <= BLOCK_ELEMENTS:
        size *= 2
    return size


class _Block(NamedTuple):
    """One block's contributions, float32."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    slopes: jax.Array | None
    bias: jax.Array | None  # like the cut of the bias


def _block(spec: AttnSpec, at: _Queries, keys: _Keys, first_key, slopes, mask, bias) -> _Block:
    """Gradients of one block of queries through one block of keys."""
    s = (first_key + jnp.arange(keys.k.shape[2], dtype=jnp.int32))[None]
    visible = xla.sees(at.rows, s)
    if at.segment is not None:
        visible &= at.segment[:, :, None] == keys.segment[:, None, :]
    visible = visible[:, None, None]
    if mask is not None:
        visible &= mask
    visible = jnp.broadcast_to(visible, (*at.lse.shape, s.shape[1]))

    # Logits and probabilities, as in the forward pass
    q, k, v = (x.astype(jnp.float32) for x in (at.q, keys.k, keys.v))
    x = _dot("bkgtd,bksd->bkgts", q, k) * spec.scale
    if spec.logits_soft_cap is not None:
        bent = jnp.tanh(x / spec.logits_soft_cap)
        x = spec.logits_soft_cap * bent
    if slopes is not None:
        distance = xla.distances(at.rows.position, s)[:, None, None]
        x = x - slopes.reshape(1, *at.lse.shape[1:3], 1, 1) * distance
    if bias is not None:
        x = x + bias.astype(jnp.float32)
    p = jnp.where(visible, jnp.exp(x - at.lse[..., None]), 0.0)

    # Through the softmax to the logits
    dp = _dot("bkgtd,bksd->bkgts", at.dout, v)
    ds = jnp.where(visible, p * (dp + at.shift[..., None]), 0.0)
    dx = ds if spec.logits_soft_cap is None else jnp.where(visible, ds * (1.0 - bent * bent), 0.0)

    # Through the products; where a NaN or Inf made one of them non-finite, again with what is invisible left out
    row_sees, key_seen = jnp.any(visible, axis=-1)[..., None], jnp.any(visible, axis=(2, 3))[..., None]
    q, dout, k = jnp.where(row_sees, q, 0.0), jnp.where(row_sees, at.dout, 0.0), jnp.where(key_seen, k, 0.0)

    def products(dot):
        dq = dot("bkgts,bksd->bkgtd", dx, k) * spec.scale
        dk = dot("bkgts,bkgtd->bksd", dx, q) * spec.scale
        return dq, dk, dot("bkgts,bkgtd->bksd", p, dout)

    fast = products(_dot)
    finite = functools.reduce(jnp.logical_and, (jnp.all(jnp.isfinite(g)) for g in fast))
    dq, dk, dv = lax.cond(finite, lambda: fast, lambda: products(functools.partial(_dot_visible, visible)))
    return _Block(
        q=dq,
        k=dk,
        v=dv,
        slopes=None if slopes is None else -jnp.sum(ds * distance, axis=(0, 3, 4)),
        bias=None if bias is None else _sum_to(ds, bias.shape),
    )


def _dot_visible(visible, equation, weights, x) -> jax.Array:
    """The product of weights, zero where not visible, with x, whose NaN and Inf count only where visible."""
    finite = jnp.isfinite(x)
    poisoned = _dot(equation, visible.astype(jnp.float32), (~finite).astype(jnp.float32)) > 0
    return jnp.where(poisoned, jnp.nan, _dot(equation, weights, jnp.where(finite, x, 0.0)))


def _cut(x, t: Any, s: Any, Tc: int, Sc: int) -> jax.Array:
    """Block (t, s) of x [.., 1|T, 1|S]."""
    if x.shape[3] > 1:
        x = lax.dynamic_slice_in_dim(x, t, Tc, axis=3)
    return lax.dynamic_slice_in_dim(x, s, Sc, axis=4) if x.shape[4] > 1 else x


def _add_cut(x, block, t: Any, s: Any) -> jax.Array:
    """x with `block` added at the place that `_cut` reads."""
    start = (0, 0, 0, t if x.shape[3] > 1 else 0, s if x.shape[4] > 1 else 0)
    start = tuple(jnp.asarray(i, jnp.int32) for i in start)  # one type, also where jax_enable_x64 widens loop indices
    old = lax.dynamic_slice(x, start, block.shape)
    return lax.dynamic_update_slice(x, old + block, start)


def _sum_to(x, shape) -> jax.Array:
    """x summed over the axes that are 1 in shape."""
    axes = tuple(a for a in range(x.ndim) if shape[a] == 1)
    return jnp.sum(x, axis=axes, keepdims=True)


def _dout_dot_out(out, dout) -> jax.Array:
    """dout . out [B, T, H]; where out is zero (rows that see nothing), whatever dout holds."""
    out = out.astype(jnp.float32)
    return jnp.sum(jnp.where(out == 0, 0.0, out * dout.astype(jnp.float32)), axis=-1)


def _sink_gradient(operands, out, lse, dout, dlse) -> dict[str, jax.Array]:
    """A sink has a share exp(sink - lse) of each row's denominator, and the value 0."""
    if "sinks" not in operands:
        return {}
    absent = lse == -jnp.inf  # padding: no denominator
    share = jnp.exp(operands["sinks"] - jnp.where(absent, 0.0, lse))
    per_row = jnp.where(absent, 0.0, share * (dlse - _dout_dot_out(out, dout)))
    return {"sinks": jnp.sum(per_row, axis=(0, 1))}


def _zero_gradients(operands) -> dict[str, jax.Array]:
    return {name: jnp.zeros_like(operands[name]) for name in DIFFERENTIABLE if name in operands}

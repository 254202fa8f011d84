"""The public functions: check and canonicalise the arguments, build the static spec, bind the primitive.

Letters: B sequences, T packed query tokens, S key/value tokens, H query heads, K kv heads (H a multiple of K),
D query/key head dim, Dv value head dim, N pages of P tokens in the pool, M page-table columns, L layers.
"E" is the query's dtype: bfloat16, float16, and on `cpu` and `xla` float32.

Common keywords of the attention functions:
  scale: factor on the logits, static, any finite number; default 1 / sqrt(D).
  local_window_size: (left, right) keys before and after a query that it sees besides itself; an int n is (n, n); -1 or
    None on a side is unbounded; a traced int32[2] is allowed. A Hugging Face window of W keys is (W - 1, 0).
  logits_soft_cap: c > 0 gives `c * tanh(logits / c)`.
  sinks: [H] float, natural-log units, added to the softmax denominator once.
  alibi_slopes: [H] float, `logits -= slope * |p - s|` after the soft cap.
  return_residual: also return the natural log of the softmax denominator, float32.
  out_dtype: E (default) or float32.
  implementation: "cuda", "cpu", "pallas", "xla" (or "cuda:sm80" to force a kernel family in the phases of the call that
    it has kernels for). Default: the first that has a kernel, by platform; the environment variable
    JAX_TURBOATTN_IMPLEMENTATION forces one for a process.

Errors, at trace time: ValueError or TypeError when arguments disagree, NotImplementedError when the named
implementation has no kernel for a legal call. Rows that see no key are zeros with a residual of -inf (or the sink).
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from . import backends, checks, primitives
from .cache import PagedKVCache, check_cache
from .rope import RopeConfig
from .spec import (
    PLAN_SHAPE,
    QUERY_DTYPES,
    AppendSpec,
    AttnSpec,
    CopySpec,
    GatherSpec,
    MergeSpec,
    PlanSpec,
    StepSpec,
    with_plan,
    written_caches,
)

Window = Any  # None | int | (int | None, int | None) | int32[2]


# --- shared canonicalisation ---------------------------------------------------------------------------------------


def _implementation(function: str, implementation: str | None) -> str | None:
    source = "implementation"
    if implementation is None:
        implementation = backends.default_implementation()
        source = backends.ENVIRONMENT_VARIABLE
    if implementation is not None:
        checks.one_of(function, source, implementation, backends.NAMES)
    return implementation


def _bind(function: str, primitive, spec, operands: dict[str, Any]):
    """Binds `primitive` (a Primitive, or a differentiable function over one) to the operands that are present."""
    if spec.implementation is not None:
        backends.require(spec.implementation, spec)
    present = [operands[name] for name in spec.operands]
    if hasattr(primitive, "bind"):
        return primitive.bind(*present, spec=spec)
    return primitive(spec, *present)


def _query_dtype(function: str, name: str, query) -> jnp.dtype:
    if str(query.dtype) not in QUERY_DTYPES:
        raise checks.type_error(function, name, f"have one of the dtypes {', '.join(QUERY_DTYPES)}", query.dtype)
    return jnp.dtype(query.dtype)


def _out_dtype(function: str, out_dtype: Any, dtype: jnp.dtype) -> str:
    if out_dtype is None:
        return dtype.name
    name = checks.dtype_of(function, "out_dtype", out_dtype).name
    checks.one_of(function, "out_dtype", name, tuple(dict.fromkeys((dtype.name, "float32"))))
    return name


def _window(function: str, window: Window, batch: int) -> jax.Array | None:
    """int32 [B, 2] with -1 for an unbounded side, or None when both sides are."""
    name = "local_window_size"
    if window is None:
        return None
    if isinstance(window, (int, np.integer)) and not isinstance(window, bool):
        window = (window, window)
    if isinstance(window, (tuple, list)):
        if len(window) != 2:
            raise checks.value_error(function, name, "be an int or a pair (left, right)", window)
        sides = [-1 if side is None else side for side in window]
        if all(isinstance(side, (int, np.integer)) and not isinstance(side, bool) for side in sides):
            if min(sides) < -1:
                raise checks.value_error(function, name, "have sides >= 0, or -1 or None for unbounded", tuple(window))
            if max(sides) > 2**31 - 1:
                raise checks.value_error(function, name, "fit int32", tuple(window))
            if sides == [-1, -1]:
                return None
            window = np.array(sides, np.int32)
        else:
            raise checks.type_error(function, name, "hold Python ints; pass a traced window as an int32[2] array", window)
    window = checks.Dims(function).index(name, window, "2")
    return jnp.broadcast_to(window, (batch, 2))


def _heads_vector(dims: checks.Dims, name: str, x: Any) -> jax.Array | None:
    return None if x is None else dims.floating(name, x, "H", jnp.float32)


def _attention_statics(function, head_dim, *, scale, is_causal, logits_soft_cap):
    scale = 1.0 / math.sqrt(head_dim) if scale is None else checks.static_float(function, "scale", scale)
    if logits_soft_cap is not None:
        logits_soft_cap = checks.static_float(function, "logits_soft_cap", logits_soft_cap)
        if logits_soft_cap <= 0:
            raise checks.value_error(function, "logits_soft_cap", "be > 0, or None for no cap", logits_soft_cap)
        # x / cap and its inverse must be normal float32 numbers: XLA flushes the others to zero.
        if not 2.0**-100 <= logits_soft_cap <= 2.0**100:
            raise checks.value_error(function, "logits_soft_cap", "be from 2**-100 to 2**100", logits_soft_cap)
    is_causal = checks.static_bool(function, "is_causal", is_causal)
    return dict(scale=scale, is_causal=is_causal, logits_soft_cap=logits_soft_cap)


def _max_q_len(function: str, max_q_len: Any) -> int | None:
    return None if max_q_len is None else checks.static_int(function, "max_q_len", max_q_len, 0)


def _present(operands: dict[str, Any]) -> dict[str, Any]:
    return {name: x for name, x in operands.items() if x is not None}


def _ranges(offsets: jax.Array) -> jax.Array:
    return jnp.stack([offsets[:-1], offsets[1:]], axis=-1)


def _with_residual(function, out, lse, return_residual):
    return (out, lse) if checks.static_bool(function, "return_residual", return_residual) else out


# --- dense and packed attention ------------------------------------------------------------------------------------


def attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    *,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
    query_offset: int | jax.Array | None = None,
    scale: float | None = None,
    local_window_size: Window = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    return_residual: bool = False,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Dense attention with `jax.nn.dot_product_attention`'s names and order. Differentiable.

    Query i of a sequence stands at position `i + query_offset`, key s at s.

    Args:
      query: [B, T, H, D]. Also [T, H, D], and then key and value without B too.
      key: [B, S, K, D], query's dtype.
      value: [B, S, K, Dv], query's dtype.
      bias: broadcastable to [B, H, T, S], added after the soft cap. xla only.
      mask: bool, broadcastable to [B, H, T, S], True = keep. xla only.
      is_causal: keys s <= position only.
      query_seq_lengths: int32 [B]; rows past it are zeros with residual -inf.
      key_value_seq_lengths: int32 [B]; keys past it are not seen.
      segment_ids: int32 [B, T] when T == S, or a pair [B, T], [B, S]: equal ids see each other.
      query_offset: int or int32 [B]; default 0. Must be given when T != S and is_causal, a window or ALiBi is used.
      Others: see the module.
    Returns:
      [B, T, H, Dv], with `return_residual` also float32 [B, T, H].
    Source: the formula of scaled dot-product attention as jax.nn states it; the online softmax is Milakov and
      Gimelshein's, the tiling FlashAttention's.
    """
    name = "attention"
    query, key, value = (checks.as_array(name, n, x) for n, x in (("query", query), ("key", key), ("value", value)))
    unbatched = query.ndim == 3
    if unbatched:
        query, key, value = (jnp.asarray(x)[None] for x in (query, key, value))
    dims = checks.Dims(name)
    dtype = _query_dtype(name, "query", query)
    dims.check("query", query, "B T H D")
    dims.check("key", key, "B S K D")
    dims.check("value", value, "B S K Dv")
    for n, x in (("key", key), ("value", value)):
        checks.same_dtype(name, n, x, dtype, "query")
    dims.divides("K", "H")
    dims.positive("D")
    B, T, S = dims["B"], dims["T"], dims["S"]

    statics = _attention_statics(name, dims["D"], scale=scale, is_causal=is_causal, logits_soft_cap=logits_soft_cap)
    window = _window(name, local_window_size, B)
    if query_offset is None:
        if T != S and (statics["is_causal"] or window is not None or alibi_slopes is not None):
            rule = "be given when is_causal, local_window_size or alibi_slopes meets T != S"
            hint = f"pass 0 to align the first tokens, or S - T = {S - T} to align the last"
            raise checks.value_error(name, "query_offset", rule, f"None with T = {T}, S = {S}", hint)
    elif isinstance(query_offset, (int, np.integer)) and not isinstance(query_offset, bool):
        query_offset = jnp.full((B,), checks.fits_int32(name, "query_offset", query_offset), jnp.int32)
    else:
        query_offset = dims.index("query_offset", query_offset, "B")
    segments_q = segments_kv = None
    if segment_ids is not None:
        if isinstance(segment_ids, (tuple, list)):
            if len(segment_ids) != 2:
                raise checks.value_error(name, "segment_ids", "be an array or a pair of arrays", f"{len(segment_ids)} items")
            segments_q, segments_kv = segment_ids
        elif T == S:
            segments_q = segments_kv = segment_ids
        else:
            rule = "be a pair [B, T], [B, S] when T != S"
            raise checks.value_error(name, "segment_ids", rule, f"one array with T = {T}, S = {S}")
        axes = ("T", "S") if unbatched else ("B T", "B S")
        segments_q = dims.index("segment_ids", segments_q, axes[0]).reshape(B, T)
        segments_kv = dims.index("segment_ids", segments_kv, axes[1]).reshape(B, S)

    def broadcastable(n, x):
        shape = (1,) * (4 - x.ndim) + tuple(x.shape)
        full = (B, dims["H"], T, S)
        if x.ndim > 4 or any(have not in (1, want) for have, want in zip(shape, full)):
            raise checks.value_error(name, n, f"be broadcastable to (B, H, T, S) = {full}", tuple(x.shape))
        return jnp.asarray(x).reshape(shape)

    if bias is not None:
        bias = checks.as_array(name, "bias", bias)
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise checks.type_error(name, "bias", "have a floating dtype", bias.dtype)
        bias = broadcastable("bias", bias)
    if mask is not None:
        mask = checks.as_array(name, "mask", mask)
        if mask.dtype != jnp.bool_:
            raise checks.type_error(name, "mask", "have dtype bool", mask.dtype)
        mask = broadcastable("mask", mask)

    lengths = {}
    for n, x in (("query_seq_lengths", query_seq_lengths), ("key_value_seq_lengths", key_value_seq_lengths)):
        lengths[n] = None if x is None else dims.index(n, x, "B")
    operands = _present(
        dict(
            query=jnp.asarray(query),
            key=jnp.asarray(key),
            value=jnp.asarray(value),
            bias=bias,
            mask=mask,
            query_lens=lengths["query_seq_lengths"],
            kv_lens=lengths["key_value_seq_lengths"],
            query_offset=query_offset,
            segment_ids_q=segments_q,
            segment_ids_kv=segments_kv,
            window=window,
            sinks=_heads_vector(dims, "sinks", sinks),
            alibi_slopes=_heads_vector(dims, "alibi_slopes", alibi_slopes),
        )
    )
    spec = AttnSpec(
        op="attention",
        operands=tuple(operands),
        dtype=dtype.name,
        out_dtype=_out_dtype(name, out_dtype, dtype),
        num_q_heads=dims["H"],
        num_kv_heads=dims["K"],
        head_dim=dims["D"],
        value_dim=dims["Dv"],
        implementation=_implementation(name, implementation),
        **statics,
    )
    out, lse = _bind(name, primitives.attention, spec, operands)
    if unbatched:
        out, lse = out[0], lse[0]
    return _with_residual(name, out, lse, return_residual)


def ragged_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    q_offsets: jax.Array,
    kv_offsets: jax.Array,
    *,
    is_causal: bool = True,
    max_q_len: int | None = None,
    scale: float | None = None,
    local_window_size: Window = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    return_residual: bool = False,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention of packed sequences of different lengths, keys packed too. Differentiable.

    Sequence b owns query rows `q_offsets[b]:q_offsets[b + 1]` and key rows `kv_offsets[b]:kv_offsets[b + 1]`; its query
    i stands at position `kv_len - q_len + i`, so that the last tokens align.

    Args:
      query: [T, H, D].
      key: [S, K, D], query's dtype.
      value: [S, K, Dv], query's dtype.
      q_offsets, kv_offsets: int32 [B + 1].
      is_causal: keys at or before the query's position only.
      max_q_len: a hint, the longest query sequence; a wrong one costs speed only.
      Others: see the module.
    Returns:
      [T, H, Dv], with `return_residual` also float32 [T, H]. Rows that belong to no sequence are zeros.
    """
    name = "ragged_attention"
    query, key, value = (checks.as_array(name, n, x) for n, x in (("query", query), ("key", key), ("value", value)))
    dims = checks.Dims(name)
    dtype = _query_dtype(name, "query", query)
    dims.check("query", query, "T H D")
    dims.check("key", key, "S K D")
    dims.check("value", value, "S K Dv")
    for n, x in (("key", key), ("value", value)):
        checks.same_dtype(name, n, x, dtype, "query")
    dims.divides("K", "H")
    dims.positive("D")
    q_offsets = dims.index("q_offsets", q_offsets, "B+1")
    kv_offsets = dims.index("kv_offsets", kv_offsets, "B+1")
    _require_offsets(name, "q_offsets", dims)
    batch = dims["B+1"] - 1
    operands = _present(
        dict(
            query=jnp.asarray(query),
            key=jnp.asarray(key),
            value=jnp.asarray(value),
            q_ranges=_ranges(q_offsets),
            kv_ranges=_ranges(kv_offsets),
            window=_window(name, local_window_size, batch),
            sinks=_heads_vector(dims, "sinks", sinks),
            alibi_slopes=_heads_vector(dims, "alibi_slopes", alibi_slopes),
        )
    )
    spec = AttnSpec(
        op="ragged_attention",
        operands=tuple(operands),
        dtype=dtype.name,
        out_dtype=_out_dtype(name, out_dtype, dtype),
        num_q_heads=dims["H"],
        num_kv_heads=dims["K"],
        head_dim=dims["D"],
        value_dim=dims["Dv"],
        max_q_len=_max_q_len(name, max_q_len),
        implementation=_implementation(name, implementation),
        **_attention_statics(name, dims["D"], scale=scale, is_causal=is_causal, logits_soft_cap=logits_soft_cap),
    )
    out, lse = _bind(name, primitives.ragged_attention, spec, operands)
    return _with_residual(name, out, lse, return_residual)


def _require_offsets(function: str, name: str, dims: checks.Dims) -> None:
    if dims["B+1"] < 1:
        raise checks.value_error(function, name, "have at least one element (B + 1)", 0)


# --- paged attention -----------------------------------------------------------------------------------------------


def _with_arrays(cache: PagedKVCache, written: dict[str, jax.Array]) -> PagedKVCache:
    fields = dict(key_cache="key", value_cache="value", key_params="key_params", value_params="value_params")
    return dataclasses.replace(cache, **{fields[n]: x for n, x in written.items()})


def _int32_scalar(function: str, name: str, x: Any) -> jax.Array:
    """A traced or Python int32 scalar."""
    if isinstance(x, (int, np.integer)) and not isinstance(x, (bool, np.bool_)):
        x = np.int32(checks.fits_int32(function, name, x))
    return checks.Dims(function).index(name, x, "")


def _layer(function: str, layer: Any, batch: int) -> jax.Array:
    """int32 [B]. Per sequence inside the primitives, so that vmap over caches can fold into layers."""
    layer = jnp.zeros((), jnp.int32) if layer is None else _int32_scalar(function, "layer", layer)
    return jnp.broadcast_to(layer, (batch,))


def _context_parallel(function: str, cp_rank: Any, cp_size: Any, batch: int, sinks: Any):
    """(cp_rank int32 [B] or None, cp_size)."""
    cp_size = checks.fits_int32(function, "cp_size", checks.static_int(function, "cp_size", cp_size, 1))
    if cp_size == 1:  # a traced rank comes from the axis_index of a mesh axis of size 1, and is 0
        if isinstance(cp_rank, (int, np.integer)) and cp_rank != 0:
            raise checks.value_error(function, "cp_rank", "be 0 when cp_size is 1", cp_rank)
        return None, 1
    if sinks is not None:
        hint = "give them to merge_partials, which adds them once"
        raise checks.value_error(function, "sinks", f"be None with cp_size = {cp_size}", "an array", hint)
    if isinstance(cp_rank, (int, np.integer)) and not 0 <= cp_rank < cp_size:
        raise checks.value_error(function, "cp_rank", f"be from 0 to {cp_size - 1}", cp_rank)
    return jnp.broadcast_to(_int32_scalar(function, "cp_rank", cp_rank), (batch,)), cp_size


def _tables(dims: checks.Dims, page_table, kv_lens, q_offsets=None):
    page_table = dims.index("page_table", page_table, "B M")
    kv_lens = dims.index("kv_lens", kv_lens, "B")
    if q_offsets is None:
        return page_table, kv_lens, None
    dims.bind("B+1", dims["B"] + 1, "page_table.shape[0] + 1")
    return page_table, kv_lens, dims.index("q_offsets", q_offsets, "B+1")


def _shared_prefix(function: str, shared_prefix: Any, cp_size: int):
    if shared_prefix is None:
        return None, None
    if cp_size > 1:  # every rank would count the whole prefix, and no merge could take it back
        hint = "attend to the prefix in a call of its own and merge_partials"
        raise checks.value_error(function, "shared_prefix", f"be None with cp_size = {cp_size}", "a prefix", hint)
    if not (isinstance(shared_prefix, (tuple, list)) and len(shared_prefix) == 2):
        raise checks.type_error(function, "shared_prefix", "be a pair (page_ids int32[n], length)", type(shared_prefix).__name__)
    pages, length = shared_prefix
    pages = checks.Dims(function).index("shared_prefix[0]", pages, "n")
    return pages, _int32_scalar(function, "shared_prefix[1]", length).reshape(1)


def _tree_mask(function: str, rows: int, tree_mask: Any, is_causal: bool):
    if tree_mask is None:
        return None
    if not is_causal:
        raise checks.value_error(function, "tree_mask", "come with is_causal=True", "is_causal=False")
    tree_mask = checks.as_array(function, "tree_mask", tree_mask)
    if tree_mask.dtype != jnp.bool_:
        raise checks.type_error(function, "tree_mask", "have dtype bool", tree_mask.dtype)
    tokens = checks.Dims(function)
    tokens.bind("tokens", rows, "the query: one row a new token")
    tokens.check("tree_mask", tree_mask, "tokens Q")
    return jnp.asarray(tree_mask)


def _paged_spec(function, op, operands, dims, cache, dtype, *, scale, is_causal, logits_soft_cap, out_dtype, **fields):
    if cache.shared_value and scale is None:
        hint = "1 / sqrt(qk_nope_dim + qk_rope_dim) of the model"
        raise checks.value_error(function, "scale", "be given for a shared_value cache", None, hint)
    statics = _attention_statics(function, dims["D"], scale=scale, is_causal=is_causal, logits_soft_cap=logits_soft_cap)
    return AttnSpec(
        op=op,
        operands=tuple(operands),
        dtype=dtype.name,
        out_dtype=_out_dtype(function, out_dtype, dtype),
        num_q_heads=dims["H"],
        num_kv_heads=dims["K"],
        head_dim=dims["D"],
        value_dim=cache.value_dim,
        kv_dtype=cache.dtype,
        page_size=cache.page_size,
        stacked=cache.stacked,
        shared_value=cache.shared_value,
        **statics,
        **fields,
    )


def _cache_dims(function: str, cache: PagedKVCache, query_axes: str, query: Any, layer: Any):
    """Checks cache and query against each other; (dims, query's dtype)."""
    query = checks.as_array(function, "query", query)
    dtype = _query_dtype(function, "query", query)
    check_cache(function, cache, dtype, layer)
    dims = checks.Dims(function)
    dims.bind("K", cache.num_kv_heads, "cache.key.shape[-3]")
    dims.bind("D", cache.head_dim, "cache.head_dim")
    dims.check("query", query, query_axes)
    dims.divides("K", "H")
    return dims, dtype, jnp.asarray(query)


def _paged_call(
    name,
    query,
    query_axes,
    cache,
    page_table,
    kv_lens,
    q_offsets,
    *,
    is_causal,
    layer,
    max_q_len,
    batch_invariant,
    cp_rank,
    cp_size,
    shared_prefix,
    tree_mask,
    scale,
    local_window_size,
    logits_soft_cap,
    sinks,
    alibi_slopes,
    out_dtype,
    implementation,
) -> tuple[AttnSpec, dict[str, Any]]:
    """The checked spec and operands of paged_attention and paged_decode."""
    dims, dtype, query = _cache_dims(name, cache, query_axes, query, layer)
    page_table, kv_lens, q_offsets = _tables(dims, page_table, kv_lens, q_offsets)
    B = dims["B"]
    cp_rank, cp_size = _context_parallel(name, cp_rank, cp_size, B, sinks)
    prefix_pages, prefix_len = _shared_prefix(name, shared_prefix, cp_size)
    operands = _present(
        dict(
            query=query,
            **cache.arrays,
            layer=_layer(name, layer, B),
            page_table=page_table,
            kv_lens=kv_lens,
            q_ranges=None if q_offsets is None else _ranges(q_offsets),
            cp_rank=cp_rank,
            window=_window(name, local_window_size, B),
            sinks=_heads_vector(dims, "sinks", sinks),
            alibi_slopes=_heads_vector(dims, "alibi_slopes", alibi_slopes),
            tree_mask=_tree_mask(name, math.prod(query.shape[:-2]), tree_mask, is_causal),
            prefix_pages=prefix_pages,
            prefix_len=prefix_len,
        )
    )
    spec = _paged_spec(
        name,
        "paged_attention",
        operands,
        dims,
        cache,
        dtype,
        scale=scale,
        is_causal=is_causal,
        logits_soft_cap=logits_soft_cap,
        out_dtype=out_dtype,
        cp_size=cp_size,
        batch_invariant=checks.static_bool(name, "batch_invariant", batch_invariant),
        max_q_len=_max_q_len(name, max_q_len),
        implementation=_implementation(name, implementation),
    )
    return spec, operands


def paged_attention(
    query: jax.Array,
    cache: PagedKVCache,
    page_table: jax.Array,
    kv_lens: jax.Array,
    q_offsets: jax.Array,
    *,
    is_causal: bool = True,
    layer: Any = None,
    max_q_len: int | None = None,
    plan: "Plan | None" = None,
    batch_invariant: bool = False,
    cp_rank: Any = 0,
    cp_size: int = 1,
    shared_prefix: tuple[jax.Array, Any] | None = None,
    tree_mask: jax.Array | None = None,
    scale: float | None = None,
    local_window_size: Window = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    return_residual: bool = False,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention over a paged cache: any mix of prefill, prefill chunks and decode in one call. Not differentiable.

    Sequence b owns query rows `q_offsets[b]:q_offsets[b + 1]`; its query i stands at position
    `kv_lens[b] - q_len + i`, and its key s lies in page `page_table[b, s // P]`, slot `s % P`.

    Args:
      query: [T, H, D].
      cache: the pool, already holding the new tokens (see `append_kv`).
      page_table: int32 [B, M] page ids. Ids outside 0 .. N-1 are unmapped: no key there.
      kv_lens: int32 [B], tokens of each sequence, the new ones included.
      q_offsets: int32 [B + 1].
      is_causal: keys at or before the query's position only.
      layer: int32 scalar (may be traced), for a stacked cache. One outside it has no keys: zeros come out.
      max_q_len: a hint, the most new tokens of a sequence; a wrong one costs speed only.
      plan: from `make_plan` with the same keywords, sizes, lengths and offsets; ValueError where keywords or sizes
        differ. Speed only, unless lengths or offsets are others: then numbers may be wrong, and a step may store fewer
        of its tokens, but never elsewhere.
      batch_invariant: the bits of a sequence's rows do not depend on the rest of the batch or on padded sizes.
      cp_rank, cp_size: context parallelism: token s lives on rank s % cp_size at local index s // cp_size; page_table is
        the rank's own, lengths are global. Take partial results with out_dtype=float32 and return_residual=True.
      shared_prefix: (page_ids int32 [n], length): keys common to all sequences, before their own. Not with cp_size > 1.
      tree_mask: bool [T, Q]: row r sees its sequence's new token j iff `tree_mask[r, j]`, and all tokens before those.
      Others: see the module.
    Returns:
      [T, H, Dv], with `return_residual` also float32 [T, H]. Rows that belong to no sequence are zeros.
    """
    name = "paged_attention"
    q_offsets = checks.as_array(name, "q_offsets", q_offsets)
    spec, operands = _paged_call(
        name,
        query,
        "T H D",
        cache,
        page_table,
        kv_lens,
        q_offsets,
        is_causal=is_causal,
        layer=layer,
        max_q_len=max_q_len,
        batch_invariant=batch_invariant,
        cp_rank=cp_rank,
        cp_size=cp_size,
        shared_prefix=shared_prefix,
        tree_mask=tree_mask,
        scale=scale,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        out_dtype=out_dtype,
        implementation=implementation,
    )
    spec, operands = _planned(name, plan, spec, operands)
    out, lse = _bind(name, primitives.paged_attention_p, spec, operands)
    return _with_residual(name, out, lse, return_residual)


def paged_decode(
    query: jax.Array,
    cache: PagedKVCache,
    page_table: jax.Array,
    kv_lens: jax.Array,
    *,
    is_causal: bool = True,
    layer: Any = None,
    plan: "Plan | None" = None,
    batch_invariant: bool = False,
    cp_rank: Any = 0,
    cp_size: int = 1,
    shared_prefix: tuple[jax.Array, Any] | None = None,
    tree_mask: jax.Array | None = None,
    scale: float | None = None,
    local_window_size: Window = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    return_residual: bool = False,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Decode: the same small number of new tokens for each sequence. Not differentiable.

    Args:
      query: [B, H, D], or [B, Q, H, D] for Q new tokens a sequence (the last Q of its kv_len).
      tree_mask: bool, one row a new token: [B * Q, any], row `b * Q + i`.
      Others: as in `paged_attention`.
    Returns:
      query's shape with Dv, with `return_residual` also float32 without the last axis.
    """
    name = "paged_decode"
    query = _decode_query(name, query)
    single = query.ndim == 3
    spec, operands = _paged_call(
        name,
        query[:, None] if single else query,
        "B Q H D",
        cache,
        page_table,
        kv_lens,
        None,
        is_causal=is_causal,
        layer=layer,
        max_q_len=None,
        batch_invariant=batch_invariant,
        cp_rank=cp_rank,
        cp_size=cp_size,
        shared_prefix=shared_prefix,
        tree_mask=tree_mask,
        scale=scale,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        out_dtype=out_dtype,
        implementation=implementation,
    )
    spec, operands = _planned(name, plan, spec, operands)
    out, lse = _bind(name, primitives.paged_attention_p, spec, operands)
    if single:
        out, lse = out[:, 0], lse[:, 0]
    return _with_residual(name, out, lse, return_residual)


def _decode_query(function: str, query: Any) -> jax.Array:
    query = checks.as_array(function, "query", query)
    if query.ndim not in (3, 4):
        raise checks.value_error(function, "query", "have axes (B, H, D) or (B, Q, H, D)", tuple(query.shape))
    return jnp.asarray(query)


# --- append and the fused step -------------------------------------------------------------------------------------


def _append_parts(
    function,
    dims,
    cache,
    dtype,
    key,
    value,
    batch,
    *,
    key_bias,
    value_bias,
    rope,
    rope_base,
    positions,
    read_only_pages,
    logn_uses_positions=False,
):
    """Checks what append and the fused step share; the operands of the prologue."""
    key = checks.as_array(function, "key", key)
    checks.same_dtype(function, "key", key, dtype, "query" if "H" in dims.sizes else "the cache")
    dims.check("key", key, "T K D")
    if cache.shared_value:
        for n, x in (("value", value), ("value_bias", value_bias)):
            if x is not None:
                raise checks.value_error(function, n, "be None for a shared_value cache", "an array")
    else:
        if value is None:
            raise checks.value_error(function, "value", "be given", None)
        value = checks.as_array(function, "value", value)
        checks.same_dtype(function, "value", value, dtype, "key")
        dims.bind("Dv", cache.value_dim, "cache.value_dim")
        dims.check("value", value, "T K Dv")
        value = jnp.asarray(value)
    if rope is not None and not isinstance(rope, RopeConfig):
        raise checks.type_error(function, "rope", "be a RopeConfig", type(rope).__name__)
    if rope is not None and rope.offset + rope.dim > dims["D"]:
        rule = f"rotate columns of the head: offset + dim <= D = {dims['D']}"
        raise checks.value_error(function, "rope", rule, f"{rope.offset} + {rope.dim}")
    dynamic = rope is not None and rope.kind == "dynamic"
    if dynamic and rope_base is None:
        hint = "RopeConfig.ntk_base gives one sequence's"
        raise checks.value_error(function, "rope_base", "be given for rope kind 'dynamic'", None, hint)
    if rope_base is not None:
        if not dynamic:
            got = "no rope" if rope is None else f"kind {rope.kind!r}"
            raise checks.value_error(function, "rope_base", "come with rope kind 'dynamic'", got)
        rope_base = dims.floating("rope_base", rope_base, "B", jnp.float32)
    if positions is not None:
        positions = checks.as_array(function, "positions", positions)
        if rope is None and not logn_uses_positions:
            raise checks.value_error(function, "positions", "come with rope", "rope=None")
        if rope is not None and rope.sections:
            if positions.ndim == 1:
                positions = jnp.repeat(jnp.asarray(positions)[:, None], 3, axis=1)
            positions = dims.index("positions", positions, "T 3")
        else:
            positions = dims.index("positions", positions, "T")
    if rope is not None and rope.sections and positions is None:
        raise checks.value_error(function, "positions", "be given (int32 [T, 3]) for a rope with sections", None)
    return dict(
        key=jnp.asarray(key),
        value=value,
        key_bias=None if key_bias is None else dims.floating("key_bias", key_bias, "K D", jnp.float32),
        value_bias=None if value_bias is None else dims.floating("value_bias", value_bias, "K Dv", jnp.float32),
        rope_turns=None if rope is None or dynamic else jnp.asarray(rope.turns()),
        rope_base=rope_base,
        positions=positions,
        read_only_pages=None if read_only_pages is None else dims.index("read_only_pages", read_only_pages, "B"),
    )


def append_kv(
    cache: PagedKVCache,
    key: jax.Array,
    value: jax.Array | None,
    page_table: jax.Array,
    kv_lens: jax.Array,
    q_offsets: jax.Array,
    *,
    layer: Any = None,
    key_bias: jax.Array | None = None,
    value_bias: jax.Array | None = None,
    rope: RopeConfig | None = None,
    rope_base: jax.Array | None = None,
    positions: jax.Array | None = None,
    read_only_pages: jax.Array | None = None,
    cp_rank: Any = 0,
    cp_size: int = 1,
    implementation: str | None = None,
) -> PagedKVCache:
    """Stores new keys and values: bias, RoPE, rounding to E, encoding, all in float32 until the rounding.

    Donate the cache to the surrounding jit and it is written in place; otherwise XLA copies it first.

    Args:
      cache: the pool.
      key: [T, K, D], the dtype E of the cache's queries.
      value: [T, K, Dv], key's dtype; None for a shared_value cache.
      page_table: int32 [B, M]. Writes to unmapped pages, to positions below 0 or past M * P are dropped.
      kv_lens: int32 [B], tokens of each sequence after this append.
      q_offsets: int32 [B + 1]: sequence b's new tokens are rows `q_offsets[b]:q_offsets[b + 1]`.
      layer: int32 scalar (may be traced), for a stacked cache. Outside it nothing is written.
      key_bias: [K, D] float; value_bias: [K, Dv] float.
      rope: rotates the keys at their positions.
      rope_base: float32 [B], the base of each sequence, for rope kind "dynamic".
      positions: int32 [T] (or [T, 3] with multimodal sections), instead of the tokens' own positions, for RoPE only.
      read_only_pages: int32 [B], leading pages of each sequence that are never written.
      cp_rank, cp_size: see `paged_attention`; a rank stores its own tokens only.
    Returns:
      The cache with the tokens in it.
    """
    name = "append_kv"
    key = checks.as_array(name, "key", key)
    dtype = _query_dtype(name, "key", key)
    check_cache(name, cache, dtype, layer)
    dims = checks.Dims(name)
    dims.bind("K", cache.num_kv_heads, "cache.key.shape[-3]")
    dims.bind("D", cache.head_dim, "cache.head_dim")
    dims.check("key", key, "T K D")
    page_table, kv_lens, q_offsets = _tables(dims, page_table, kv_lens, q_offsets)
    B = dims["B"]
    cp_rank, cp_size = _context_parallel(name, cp_rank, cp_size, B, None)
    parts = _append_parts(
        name,
        dims,
        cache,
        dtype,
        key,
        value,
        B,
        key_bias=key_bias,
        value_bias=value_bias,
        rope=rope,
        rope_base=rope_base,
        positions=positions,
        read_only_pages=read_only_pages,
    )
    operands = _present(
        dict(
            **cache.arrays,
            key=parts.pop("key"),
            value=parts.pop("value"),
            layer=_layer(name, layer, B),
            page_table=page_table,
            kv_lens=kv_lens,
            q_ranges=_ranges(q_offsets),
            cp_rank=cp_rank,
            **parts,
        )
    )
    spec = AppendSpec(
        operands=tuple(operands),
        dtype=dtype.name,
        kv_dtype=cache.dtype,
        num_kv_heads=dims["K"],
        head_dim=dims["D"],
        value_dim=cache.value_dim,
        page_size=cache.page_size,
        stacked=cache.stacked,
        shared_value=cache.shared_value,
        cp_size=cp_size,
        rope=rope,
        implementation=_implementation(name, implementation),
    )
    written = _bind(name, primitives.append_kv_p, spec, operands)
    return _with_arrays(cache, dict(zip(written_caches(spec), written)))


def paged_attention_step(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array | None,
    cache: PagedKVCache,
    page_table: jax.Array,
    kv_lens: jax.Array,
    q_offsets: jax.Array,
    *,
    query_bias: jax.Array | None = None,
    key_bias: jax.Array | None = None,
    value_bias: jax.Array | None = None,
    rope: RopeConfig | None = None,
    rope_base: jax.Array | None = None,
    positions: jax.Array | None = None,
    logn: int | None = None,
    logn_zero_based: bool = False,
    read_only_pages: jax.Array | None = None,
    is_causal: bool = True,
    layer: Any = None,
    max_q_len: int | None = None,
    plan: "Plan | None" = None,
    batch_invariant: bool = False,
    cp_rank: Any = 0,
    cp_size: int = 1,
    shared_prefix: tuple[jax.Array, Any] | None = None,
    tree_mask: jax.Array | None = None,
    scale: float | None = None,
    local_window_size: Window = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    return_residual: bool = False,
    out_dtype: Any = None,
    implementation: str | None = None,
):
    """One attention layer's step: bias, RoPE and logn on the new tokens, append to the cache, attention. Not differentiable.

    Args:
      query: [T, H, D]; key: [T, K, D]; value: [T, K, Dv] (None for a shared_value cache): the raw projections.
      cache, page_table, kv_lens, q_offsets: as in `append_kv`; kv_lens count the new tokens. Pages that a sequence
        appends to are its own: what another one reads there in the same call may be new or old.
      query_bias: [H, D]; key_bias: [K, D]; value_bias: [K, Dv], added in float32 before RoPE.
      logn: trained length m in tokens: queries at position p are scaled by log(p + 1) / log(m) where p + 1 > m.
      logn_zero_based: p instead of p + 1.
      positions: replace the tokens' own positions for RoPE and logn, never for the mask or the slot.
      Others: as in `append_kv` and `paged_attention`.
    Returns:
      (out [T, H, Dv], cache), with `return_residual` ((out, lse float32 [T, H]), cache).
    """
    name = "paged_attention_step"
    dims, dtype, query = _cache_dims(name, cache, "T H D", query, layer)
    page_table, kv_lens, q_offsets = _tables(dims, page_table, kv_lens, q_offsets)
    B = dims["B"]
    cp_rank, cp_size = _context_parallel(name, cp_rank, cp_size, B, sinks)
    prefix_pages, prefix_len = _shared_prefix(name, shared_prefix, cp_size)
    if logn is not None:
        logn = checks.fits_int32(name, "logn", checks.static_int(name, "logn", logn, 2))
    elif logn_zero_based:
        raise checks.value_error(name, "logn_zero_based", "come with logn", "logn=None")
    parts = _append_parts(
        name,
        dims,
        cache,
        dtype,
        key,
        value,
        B,
        key_bias=key_bias,
        value_bias=value_bias,
        rope=rope,
        rope_base=rope_base,
        positions=positions,
        read_only_pages=read_only_pages,
        logn_uses_positions=logn is not None,
    )
    operands = _present(
        dict(
            **cache.arrays,
            query=query,
            key=parts.pop("key"),
            value=parts.pop("value"),
            layer=_layer(name, layer, B),
            page_table=page_table,
            kv_lens=kv_lens,
            q_ranges=_ranges(q_offsets),
            cp_rank=cp_rank,
            query_bias=None if query_bias is None else dims.floating("query_bias", query_bias, "H D", jnp.float32),
            **parts,
            window=_window(name, local_window_size, B),
            sinks=_heads_vector(dims, "sinks", sinks),
            alibi_slopes=_heads_vector(dims, "alibi_slopes", alibi_slopes),
            tree_mask=_tree_mask(name, query.shape[0], tree_mask, is_causal),
            prefix_pages=prefix_pages,
            prefix_len=prefix_len,
        )
    )
    attention_only = set("query window sinks alibi_slopes tree_mask prefix_pages prefix_len".split())
    append_only = set("key value key_bias value_bias rope_turns rope_base positions read_only_pages".split())
    implementation = _implementation(name, implementation)
    attn = _paged_spec(
        name,
        "paged_attention",
        ["query", *(n for n in operands if n not in append_only | {"query", "query_bias"})],
        dims,
        cache,
        dtype,
        scale=scale,
        is_causal=is_causal,
        logits_soft_cap=logits_soft_cap,
        out_dtype=out_dtype,
        cp_size=cp_size,
        batch_invariant=checks.static_bool(name, "batch_invariant", batch_invariant),
        max_q_len=_max_q_len(name, max_q_len),
        implementation=implementation,
    )
    append = AppendSpec(
        operands=tuple(n for n in operands if n not in attention_only | {"query_bias"}),
        dtype=dtype.name,
        kv_dtype=cache.dtype,
        num_kv_heads=dims["K"],
        head_dim=dims["D"],
        value_dim=cache.value_dim,
        page_size=cache.page_size,
        stacked=cache.stacked,
        shared_value=cache.shared_value,
        cp_size=cp_size,
        rope=rope,
        implementation=implementation,
    )
    spec = StepSpec(
        operands=tuple(operands),
        attn=attn,
        append=append,
        logn=logn,
        logn_zero_based=checks.static_bool(name, "logn_zero_based", logn_zero_based),
    )
    spec, operands = _planned(name, plan, spec, operands)
    *written, out, lse = _bind(name, primitives.paged_attention_step_p, spec, operands)
    return _with_residual(name, out, lse, return_residual), _with_arrays(cache, dict(zip(written_caches(spec), written)))


# --- pages in and out ----------------------------------------------------------------------------------------------


def gather_kv(
    cache: PagedKVCache,
    page_table: jax.Array,
    kv_lens: jax.Array,
    *,
    layer: Any = None,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Contiguous, dequantised keys and values of each sequence.

    Args:
      cache, page_table, kv_lens, layer: as in `paged_attention`.
      out_dtype: for an fp8 cache, the dtype E of the result (default bfloat16); other caches decode to their own E.
    Returns:
      key [B, M * P, K, D] and value [B, M * P, K, Dv]; zeros past kv_len and where no page is mapped.
    """
    name = "gather_kv"
    check_cache(name, cache, None, layer)
    if cache.dtype == "float8_e4m3fn":
        dtype = checks.dtype_of(name, "out_dtype", jnp.bfloat16 if out_dtype is None else out_dtype)
        checks.one_of(name, "out_dtype", dtype.name, QUERY_DTYPES)
    else:
        dtype = jnp.dtype(cache.key.dtype if cache.key_params is None else cache.key_params.dtype)
        asked = dtype if out_dtype is None else checks.dtype_of(name, "out_dtype", out_dtype)
        if asked != dtype:
            raise checks.value_error(name, "out_dtype", f"be {dtype.name} for this cache", asked.name)
    dims = checks.Dims(name)
    page_table, kv_lens, _ = _tables(dims, page_table, kv_lens)
    operands = dict(
        **cache.arrays, layer=_layer(name, layer, dims["B"]), page_table=page_table, kv_lens=kv_lens
    )
    spec = GatherSpec(
        operands=tuple(operands),
        kv_dtype=cache.dtype,
        out_dtype=dtype.name,
        num_kv_heads=cache.num_kv_heads,
        head_dim=cache.head_dim,
        value_dim=cache.value_dim,
        page_size=cache.page_size,
        stacked=cache.stacked,
        shared_value=cache.shared_value,
        implementation=_implementation(name, implementation),
    )
    key, value = _bind(name, primitives.gather_kv_p, spec, operands)
    return key, value


def copy_pages(
    cache: PagedKVCache,
    source: jax.Array,
    destination: jax.Array,
    *,
    layer: Any = None,
    implementation: str | None = None,
) -> PagedKVCache:
    """Copies pages `source[i]` to `destination[i]` inside the pool, in place: the copy of copy-on-write.

    All sources are read before any destination is written. A pair with an id outside 0 .. N-1 is dropped; when a
    destination comes twice, which copy it holds is unspecified.

    Args:
      cache: the pool.
      source, destination: int32 [n] page ids.
      layer: int32 scalar for a stacked cache; None copies the pages of every layer.
    Returns:
      The cache.
    """
    name = "copy_pages"
    every_layer = isinstance(cache, PagedKVCache) and cache.stacked and layer is None
    check_cache(name, cache, None, 0 if every_layer else layer)
    dims = checks.Dims(name)
    source = dims.index("source", source, "n")
    destination = dims.index("destination", destination, "n")
    layers = _layer(name, layer, dims["n"])
    if every_layer:
        count = cache.num_layers
        layers = jnp.repeat(jnp.arange(count, dtype=jnp.int32), dims["n"])
        source, destination = jnp.tile(source, count), jnp.tile(destination, count)
    arrays = cache.arrays
    if cache.dtype == "float8_e4m3fn":  # one scale a head: no page owns it
        arrays = {n: x for n, x in arrays.items() if n.endswith("_cache")}
    operands = dict(**arrays, layer=layers, source=source, destination=destination)
    spec = CopySpec(
        operands=tuple(operands),
        caches=tuple(arrays),
        kv_dtype=cache.dtype,
        num_kv_heads=cache.num_kv_heads,
        stacked=cache.stacked,
        implementation=_implementation(name, implementation),
    )
    written = _bind(name, primitives.copy_pages_p, spec, operands)
    return _with_arrays(cache, dict(zip(written_caches(spec), written)))


def merge_partials(
    outs: Any,
    lses: Any,
    *,
    sinks: jax.Array | None = None,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Merges R partial results that cover disjoint keys and were taken without sinks.

    Args:
      outs: [R, ..., H, Dv], or a list of R arrays [..., H, Dv].
      lses: float32 [R, ..., H], or a list; -inf marks an empty partial, whatever its `outs` hold.
      sinks: [H] float, added to the merged denominator once.
      out_dtype: of the result: the partials' dtype (default), or another floating dtype.
    Returns:
      out [..., H, Dv] and lse float32 [..., H].
    """
    name = "merge_partials"

    def stack(n, x):
        if isinstance(x, (list, tuple)):
            if not x:
                raise checks.value_error(name, n, "hold at least one partial", "none")
            shapes = {tuple(checks.as_array(name, n, a).shape) for a in x}
            if len(shapes) > 1:
                raise checks.value_error(name, n, "hold arrays of one shape", sorted(shapes))
            return jnp.stack([jnp.asarray(a) for a in x])
        return jnp.asarray(checks.as_array(name, n, x))

    outs, lses = stack("outs", outs), stack("lses", lses)
    if outs.ndim < 3:
        raise checks.value_error(name, "outs", "have axes (R, ..., H, Dv)", tuple(outs.shape))
    dtype = _query_dtype(name, "outs", outs)
    if lses.dtype != jnp.float32:
        raise checks.type_error(name, "lses", "have dtype float32", lses.dtype)
    if lses.shape != outs.shape[:-1]:
        raise checks.value_error(name, "lses", f"have outs' shape without Dv, {outs.shape[:-1]}", tuple(lses.shape))
    out_name = dtype.name if out_dtype is None else checks.dtype_of(name, "out_dtype", out_dtype).name
    checks.one_of(name, "out_dtype", out_name, QUERY_DTYPES)
    R, *rows, H, Dv = outs.shape
    dims = checks.Dims(name)
    dims.bind("H", H, "outs.shape[-2]")
    T = math.prod(rows)
    operands = _present(
        dict(outs=outs.reshape(R, T, H, Dv), lses=lses.reshape(R, T, H), sinks=_heads_vector(dims, "sinks", sinks))
    )
    spec = MergeSpec(
        operands=tuple(operands),
        dtype=dtype.name,
        out_dtype=out_name,
        num_q_heads=H,
        value_dim=Dv,
        implementation=_implementation(name, implementation),
    )
    out, lse = _bind(name, primitives.merge_partials_p, spec, operands)
    return out.reshape(*rows, H, Dv), lse.reshape(*rows, H)


# --- plans ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Plan:
    """A step's schedule, computed on the device by `make_plan`. Opaque; tagged with the calls that it is for."""

    data: jax.Array
    spec: PlanSpec


jax.tree_util.register_dataclass(Plan, data_fields=["data"], meta_fields=["spec"])


def _plan_spec(spec: AttnSpec, operands: dict[str, Any]) -> PlanSpec:
    batch, max_pages = operands["page_table"].shape
    return PlanSpec(
        operands=tuple(name for name in ("kv_lens", "q_ranges") if name in operands),
        attn=spec,
        batch=batch,
        num_tokens=math.prod(operands["query"].shape[:-2]),
        max_pages=max_pages,
    )


def _planned(function: str, plan: Any, spec: AttnSpec | StepSpec, operands: dict[str, Any]):
    """The call with its plan, if it has one."""
    if plan is None:
        return spec, operands
    if not isinstance(plan, Plan):
        raise checks.type_error(function, "plan", "come from make_plan", type(plan).__name__)
    have, want = plan.spec, _plan_spec(spec.attn if isinstance(spec, StepSpec) else spec, operands)
    for a, b, names in (
        (have.attn, want.attn, [field.name for field in dataclasses.fields(AttnSpec)]),
        (have, want, ["batch", "num_tokens", "max_pages"]),
    ):
        for name in names:
            its, own = getattr(a, name), getattr(b, name)
            if its != own:
                if name == "operands":  # what they do not share
                    its, own = (sorted(set(x) - set(y)) for x, y in ((its, own), (own, its)))
                rule = f"be made for this call's spec: {name} = {own!r}"
                hint = "call make_plan with the same keywords, and arrays of the same shapes"
                raise checks.value_error(function, "plan", rule, f"{its!r}", hint)
    data = checks.Dims(function).index("plan.data", plan.data, "{} {}".format(*PLAN_SHAPE))
    return with_plan(spec), operands | {"plan": data}


def make_plan(
    query: jax.Array,
    cache: PagedKVCache,
    page_table: jax.Array,
    kv_lens: jax.Array,
    q_offsets: jax.Array | None,
    *,
    is_causal: bool = True,
    layer: Any = None,
    max_q_len: int | None = None,
    batch_invariant: bool = False,
    cp_rank: Any = 0,
    cp_size: int = 1,
    shared_prefix: tuple[jax.Array, Any] | None = None,
    tree_mask: jax.Array | None = None,
    scale: float | None = None,
    local_window_size: Window = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    alibi_slopes: jax.Array | None = None,
    out_dtype: Any = None,
    implementation: str | None = None,
) -> Plan:
    """The schedule of a step, computed once on the device and passed to the calls of all layers of the same spec.

    Arguments are those of `paged_attention` (and of the attention of `paged_attention_step`), or with `q_offsets=None`
    of `paged_decode`. Only lengths and offsets are read: of query and cache the shapes and dtypes matter.

    A plan changes speed only, as long as lengths and offsets are those it was made of. On `cuda` the blocks of a
    decode kernel read from it where to start, which each call else finds out for itself. Calls that gain nothing take
    a plan too, and do not read it: those of `cpu`, `pallas` and `xla`, prefill, one short sequence, `batch_invariant`,
    a window, a shared prefix, context parallelism, and those that `vmap` or sharding make of others.
    """
    name = "make_plan"
    packed = q_offsets is not None
    if packed:
        q_offsets = checks.as_array(name, "q_offsets", q_offsets)
    else:
        query = _decode_query(name, query)
        query = query[:, None] if query.ndim == 3 else query
        max_q_len = None  # Q says it
    spec, operands = _paged_call(
        name,
        query,
        "T H D" if packed else "B Q H D",
        cache,
        page_table,
        kv_lens,
        q_offsets,
        is_causal=is_causal,
        layer=layer,
        max_q_len=max_q_len,
        batch_invariant=batch_invariant,
        cp_rank=cp_rank,
        cp_size=cp_size,
        shared_prefix=shared_prefix,
        tree_mask=tree_mask,
        scale=scale,
        local_window_size=local_window_size,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        out_dtype=out_dtype,
        implementation=implementation,
    )
    plan_spec = _plan_spec(spec, operands)
    (data,) = _bind(name, primitives.make_plan_p, plan_spec, operands)
    return Plan(data, plan_spec)

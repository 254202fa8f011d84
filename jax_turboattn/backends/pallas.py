"""Paged attention as one Pallas kernel: the fallback on GPUs for which our CUDA module was not built.

Pallas lowers it through Triton on CUDA. On the CPU it runs in Pallas' interpret mode, which is slow and meant for tests.

A program takes one tile of query rows of one sequence and one kv head, and walks the sequence's keys in order, a block
at a time, with an online softmax. A row is a (token, query head of the group) pair, so that decode reads each page once
for all the heads that share it. Everything about a sequence that the kernel reads is computed in jnp before the call
(`_sequences`). A row's bits depend on its own sequence alone, which is what batch_invariant asks for.

Masked loads and stores leave memory alone wherever a key, a page or a row does not exist; no index is clamped for them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import types
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import quant
from ..spec import AttnSpec, PlanSpec, Spec, StepSpec
from . import xla

Named = dict[str, Any]

# Positions and row counts stay within this, so that a position plus the index of a row fits 32 bits.
BOUND = 2**30
LOG2_E = math.log2(math.e)
MAX_HEAD_DIM = 256


# --- what runs here ------------------------------------------------------------------------------------------------


@functools.cache
def load() -> tuple[Any, Any, str | None]:
    """(jax.experimental.pallas, its Triton part, None), or the reason why they cannot be imported.

    JAX has announced that the Triton part will go.
    """
    try:
        from jax.experimental import pallas
        from jax.experimental.pallas import triton
    except ImportError as error:
        return None, None, f"this jax ({jax.__version__}) has no Pallas for Triton: {error}"
    return pallas, triton, None


def supports(spec: Spec) -> str | None:
    """None when the kernel takes `spec`, else the reason why not."""
    reason = load()[2]
    if reason is not None:
        return reason
    attn = spec.attn if isinstance(spec, StepSpec | PlanSpec) else spec
    if not isinstance(attn, AttnSpec) or attn.op != "paged_attention":
        return f"the Pallas kernel serves paged_attention, paged_decode and paged_attention_step, not {spec.op}"
    if attn.dtype == "float32":
        return "the Pallas kernel multiplies bfloat16 or float16, not float32"
    if attn.kv_dtype not in (attn.dtype, "int8"):
        return f"the Pallas kernel reads bfloat16, float16 and int8 caches, not {attn.kv_dtype}"
    if attn.shared_value:
        return "the Pallas kernel does not serve shared_value (MLA)"
    if attn.cp_size > 1:
        return "the Pallas kernel does not serve context parallelism (cp_size > 1)"
    for operand, argument in (("alibi_slopes",) * 2, ("tree_mask",) * 2, ("prefix_pages", "shared_prefix")):
        if operand in attn.operands:
            return f"the Pallas kernel does not serve {argument}"
    if max(attn.head_dim, attn.value_dim) > MAX_HEAD_DIM:
        return f"the Pallas kernel serves head dims up to {MAX_HEAD_DIM}, got {attn.head_dim} and {attn.value_dim}"
    return None


def refuses_sizes(spec: Spec, shapes: dict[str, tuple[int, ...]]) -> str | None:
    """None when the kernel can address arrays of these shapes, else the reason why not."""
    if isinstance(spec, PlanSpec):
        return None
    attn = spec.attn if isinstance(spec, StepSpec) else spec
    tokens = shapes["page_table"][1] * attn.page_size
    rows = math.prod(shapes["query"][:-2]) * _padded_group(attn)
    if max(tokens, rows) > BOUND:
        return f"the Pallas kernel serves up to 2^30 keys a sequence and 2^30 query rows, got {tokens} and {rows}"
    for name in ("key_cache", "value_cache"):
        # Pallas addresses arrays of up to 2^32 bytes with signed 32-bit offsets, counted in elements; larger ones
        # with 64 bits.
        size = math.prod(shapes[name])
        if attn.kv_dtype == "int8" and 2**31 < size <= 2**32:
            return f"Pallas cannot address an int8 pool of more than 2^31 and up to 2^32 elements, got {size}"
    return None


def run(spec: Spec, platform: str, *operands: jax.Array) -> tuple[jax.Array, ...]:
    """The results of the primitive `spec.op`; on platform "cpu" in interpret mode."""
    if isinstance(spec, PlanSpec):
        return xla.run(spec, *operands)
    attend = functools.partial(_paged_attention, interpret=platform == "cpu")
    if isinstance(spec, StepSpec):  # prologue and append are plain jnp: attention is what takes the time
        return xla.run_operation(functools.partial(xla.paged_attention_step, attend=attend), spec, *operands)
    return xla.run_operation(attend, spec, *operands)


def target_mesh() -> jax.sharding.AbstractMesh:
    """The mesh under which to lower: no axes, since this is one device's program, and a GPU as its device.

    Pallas wants to know the GPU, for fp8 casts that we do not have. On a host without one, any name will do.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None and jax.default_backend() != "gpu":
        device = jax.sharding.AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="gpu")
    return jax.sharding.AbstractMesh((), (), abstract_device=device)


@contextlib.contextmanager
def quiet():
    """Context of a lowering: silences what JAX says of Pallas' Triton lowering, and nothing else."""
    with warnings.catch_warnings():
        message = "The Pallas Triton backend is deprecated"
        warnings.filterwarnings("ignore", message=message, category=DeprecationWarning)
        yield


# --- tiles ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Tile:
    """What one program works on."""

    rows: int  # query rows, (token, head of the group) pairs; a power of two, at least 16 (tl.dot)
    keys: int  # keys a step
    num_warps: int
    num_stages: int


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def _padded(dim: int) -> int:
    """A head dim as a matrix product of Triton's wants it."""
    return _power_of_two(max(dim, 16))


def _padded_group(spec: AttnSpec) -> int:
    """Query heads a kv head, padded to a power of two: Triton's tensors have such shapes only."""
    return _power_of_two(spec.num_q_heads // spec.num_kv_heads)


def _short_tile(spec: AttnSpec, rows: int) -> Tile:
    """For sequences of few rows, bound by memory: as many loads in flight as two or three programs an SM can hold."""
    wide = max(spec.head_dim, spec.value_dim) > 128
    return Tile(rows, keys=32 if wide else 64, num_warps=4, num_stages=3)


def _long_tile(spec: AttnSpec) -> Tile:
    """For prefill, bound by matrix products and the softmax."""
    dim = max(spec.head_dim, spec.value_dim)
    return Tile(64 if dim > 128 else 128, 32 if dim > 128 else 64, num_warps=4 if dim <= 64 else 8, num_stages=2)


# --- what the kernel reads of a sequence ---------------------------------------------------------------------------

_LO, _HI, _FIRST, _END, _KV_END, _LAYER = range(6)


def _sequences(spec: AttnSpec, named: Named, lo: jax.Array, hi: jax.Array) -> jax.Array:
    """int32 [B, 6]: rows lo <= row < hi of the query; token i sees the keys first + i <= s < min(end + i, kv_end).

    Lengths and windows may be any int32: sums saturate, offset and window first, as in `xla.rows`, and are then cut to
    +-BOUND, which lies beyond every key even after i is added.
    """
    kv_lens, layer = named["kv_lens"], named["layer"]
    num_layers, num_pages = named["key_cache"].shape[:2]
    offset = xla.saturating_subtract(kv_lens, hi - lo)
    first, end = jnp.full_like(lo, -BOUND), jnp.full_like(lo, BOUND)
    if spec.is_causal:
        end = xla.saturating_add(offset, jnp.ones_like(lo))
    if "window" in named:
        left, right = xla.window_of(named)
        first = jnp.where(left == -1, first, xla.saturating_subtract(offset, left))
        farthest = xla.saturating_add(xla.saturating_add(offset, right), jnp.ones_like(lo))
        end = jnp.where(right == -1, end, jnp.minimum(end, farthest))
    first, end = (jnp.clip(x, -BOUND, BOUND) for x in (first, end))
    kv_end = jnp.clip(kv_lens, 0, named["page_table"].shape[1] * spec.page_size)
    mapped = (layer >= 0) & (layer < num_layers) & (num_pages > 0)
    return jnp.stack([lo, hi, first, end, jnp.where(mapped, kv_end, 0), jnp.where(mapped, layer, 0)], axis=1)


# --- the kernel ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Call:
    """The static half of a kernel."""

    spec: AttnSpec
    tile: Tile
    operands: tuple[str, ...]
    num_pages: int
    batch: int
    tiles: int  # uniform queries: tiles a sequence
    grid: int  # programs a kv head
    interpret: bool


def _kernel(call: _Call, *refs) -> None:
    """One program: (tile of rows, kv head)."""
    pl = load()[0]
    ref = types.SimpleNamespace(**dict(zip((*call.operands, "out", "lse"), refs, strict=True)))
    tile, kv_head = pl.program_id(0), pl.program_id(1)
    if "tile_ends" not in call.operands:
        _attend(call, ref, lax.div(tile, call.tiles), lax.rem(tile, call.tiles), kv_head)
        return

    # Packed queries: tile_ends [B] counts the tiles of the sequences up to each. There are at most `grid` of them,
    # unless the ranges of the sequences overlap.
    ends = ref.tile_ends[...]

    def item(i, _):
        index = tile + i * call.grid
        sequence = jnp.sum(jnp.where(ends <= index, 1, 0))
        before = jnp.max(jnp.where(ends <= index, ends, 0))
        _attend(call, ref, sequence, index - before, kv_head)
        return _

    count = ref.tile_ends[call.batch - 1]
    lax.fori_loop(0, lax.div(jnp.maximum(count - tile, 0) + (call.grid - 1), call.grid), item, 0)


def _attend(call: _Call, ref, sequence, tile, kv_head) -> None:
    """Tile number `tile` of the rows of one sequence."""
    _, triton, _ = load()
    spec, size = call.spec, call.tile
    group, padded_group = spec.num_q_heads // spec.num_kv_heads, _padded_group(spec)
    dtype = jnp.dtype(spec.dtype)
    lo, hi, first, end, kv_end, layer = (ref.sequences[sequence, i] for i in range(6))

    # The rows. Token and head of a row that does not exist may be anything: it is neither read nor written.
    row = tile * size.rows + lax.iota(jnp.int32, size.rows)
    token, member = lax.div(row, padded_group), lax.rem(row, padded_group)
    head = kv_head * group + member
    alive = (lo + token < hi) & (member < group)
    row_end = jnp.where(alive, jnp.minimum(end + token, kv_end), -BOUND)
    row_first = first + token
    q = _read(ref.query, (lo + token, head), spec.head_dim, alive)

    # The keys that the tile sees, in blocks that start at multiples of the block's size.
    token_first = lax.div(tile * size.rows, padded_group)
    token_last = jnp.minimum(lax.div(tile * size.rows + (size.rows - 1), padded_group), hi - lo - 1)
    keys_first = jnp.maximum(first + token_first, 0)
    keys_end = jnp.minimum(end + token_last, kv_end)

    def keys(start, count):
        """Where keys start <= s < start + count lie in the pools, which of them exist, and which rows see which."""
        position = start + lax.iota(jnp.int32, count)
        exists = (position >= keys_first) & (position < keys_end)
        if count <= spec.page_size:  # all on one page
            page = ref.page_table[sequence, lax.div(start, spec.page_size)]
            slot = lax.rem(start, spec.page_size) + lax.iota(jnp.int32, count)
        else:
            column, slot = lax.div(position, spec.page_size), lax.rem(position, spec.page_size)
            page = triton.load(ref.page_table.at[jnp.full_like(column, sequence), column], mask=exists, other=-1)
        exists &= (page >= 0) & (page < call.num_pages)
        visible = exists[None] & (position[None] < row_end[:, None])
        if "window" in spec.operands:
            visible &= position[None] >= row_first[:, None]
        return (layer, page, kv_head, slot), exists, visible

    def step(i, carry, finite_values):
        """Folds block i into (top, total, sums)."""
        top, total, sums = carry
        where, exists, visible = keys(i * size.keys, size.keys)
        key = _read_cache(call, ref, "key", where, exists)
        value = _read_cache(call, ref, "value", where, exists)
        x = _dot(q, key, transposed=True) * spec.scale
        if spec.logits_soft_cap is not None:
            x = spec.logits_soft_cap * jnp.tanh(x / spec.logits_soft_cap)
        x = jnp.where(visible, x, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(x, axis=1))
        origin = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        p = jnp.exp2((x - origin[:, None]) * LOG2_E)
        shrink = jnp.exp2((top - origin) * LOG2_E)
        if finite_values:
            value = jnp.where(jnp.abs(value.astype(jnp.float32)) < jnp.inf, value, jnp.zeros_like(value))
        sums = sums * shrink[:, None] + _dot(p.astype(dtype), value)
        return new_top, total * shrink + jnp.sum(p, axis=1), sums

    def walk(finite_values):
        start = (
            jnp.full(size.rows, -jnp.inf, jnp.float32),
            jnp.zeros(size.rows, jnp.float32),
            jnp.zeros((size.rows, _padded(spec.value_dim)), jnp.float32),
        )
        blocks = lax.div(keys_first, size.keys), lax.div(keys_end + size.keys - 1, size.keys)
        return lax.fori_loop(*blocks, functools.partial(step, finite_values=finite_values), start)

    def add_infinities(s, sums):
        """What the value of key s does to the rows that see it, if it is NaN or Inf."""
        where, exists, visible = keys(s, 1)
        value = _read_cache(call, ref, "value", where, exists).astype(jnp.float32)
        return sums + jnp.where(visible & ~(jnp.abs(value) < jnp.inf), value, 0.0)

    top, total, sums = walk(finite_values=False)
    # Values that no row of the tile sees were read as zeros. One that some rows see and others do not may be NaN or
    # Inf, and 0 * NaN is NaN: where any sum is not finite, the tile is done again without such values, which are then
    # added where they are seen. One by one: a block of them takes registers that the loop above would miss.
    broken = jnp.max(jnp.where(jnp.abs(sums) < jnp.inf, 0, 1))
    sums = lax.cond(
        broken > 0,
        lambda sums: lax.fori_loop(keys_first, keys_end, add_infinities, walk(finite_values=True)[2]),
        lambda sums: sums,
        sums,
    )

    # As in `xla._finish`.
    empty = total == 0
    bare = jnp.full_like(top, -jnp.inf)
    if "sinks" in call.operands:
        sinks = bare = triton.load(ref.sinks.at[head], mask=alive, other=0.0)
        lifted = jnp.maximum(top, sinks)
        origin = jnp.where(lifted == -jnp.inf, 0.0, lifted)
        weight = jnp.exp2((top - origin) * LOG2_E)
        sums, top = sums * weight[:, None], lifted
        total = total * weight + jnp.exp2((sinks - origin) * LOG2_E)
    out = jnp.where(empty[:, None], 0.0, sums / jnp.where(empty, 1.0, total)[:, None])
    lse = jnp.where(empty, bare, jnp.where(top == -jnp.inf, 0.0, top) + jnp.log(total))
    triton.store(ref.lse.at[lo + token, head], lse, mask=alive)
    at, mask = _rows_at((lo + token, head), spec.value_dim, alive)
    triton.store(ref.out.at[at], out.astype(spec.out_dtype), mask=mask)


def _rows_at(where: tuple[Any, ...], dim: int, exists: jax.Array) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """The index of rows [n, dim padded to what Triton takes] of an array at `where` (scalars, [n]), and its mask."""
    padded = _padded(dim)
    shape = (exists.shape[0], padded)
    column = lax.broadcasted_iota(jnp.int32, shape, 1)
    index = tuple(jnp.broadcast_to(x[:, None] if jnp.ndim(x) else x, shape) for x in where)
    mask = jnp.broadcast_to(exists[:, None], shape)
    return (*index, column), mask if dim == padded else mask & (column < dim)


def _read(array, where: tuple[Any, ...], dim: int, exists: jax.Array) -> jax.Array:
    """Rows [n, padded dim] at `where`, zeros where they do not exist and past `dim`."""
    at, mask = _rows_at(where, dim, exists)
    return load()[1].load(array.at[at], mask=mask, other=jnp.zeros((), array.dtype))


def _read_cache(call: _Call, ref, name: str, where: tuple[Any, ...], exists: jax.Array) -> jax.Array:
    """Keys or values [n, padded dim] in E, zeros where they do not exist."""
    dim = call.spec.head_dim if name == "key" else call.spec.value_dim
    rows = _read(getattr(ref, f"{name}_cache"), where, dim, exists)
    params = getattr(ref, f"{name}_params", None)
    if params is None:
        return rows
    triton = load()[1]
    dtype = jnp.dtype(call.spec.dtype)
    index = tuple(jnp.broadcast_to(x, exists.shape) for x in where)
    scale, zero = (
        triton.load(params.at[(*index, jnp.full_like(index[0], i))], mask=exists, other=jnp.zeros((), params.dtype))
        for i in range(2)
    )
    scale, zero = scale.astype(jnp.float32), zero.astype(jnp.float32)
    # Only code * scale can leave E's range, and upwards: the scale is not negative. It may not where the row is finite.
    finite = (jnp.abs(scale) < jnp.inf) & (jnp.abs(zero) < jnp.inf)
    most = jnp.where(finite, float(jnp.finfo(dtype).max), jnp.inf)[:, None]
    x = rows.astype(jnp.float32) * scale[:, None] + zero[:, None]
    x = jnp.where(x > most, most, x)
    if call.interpret:  # XLA would drop a rounding that is undone at once
        x = quant.round_to(x, dtype)
    return jnp.where(lax.broadcasted_iota(jnp.int32, x.shape, 1) < dim, x, 0.0).astype(dtype)


def _dot(a: jax.Array, b: jax.Array, transposed: bool = False) -> jax.Array:
    """a @ b, or a @ b.T, accumulated in float32."""
    contracted = ((1,), (1 if transposed else 0,))
    return lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=jnp.float32)


# --- the calls -----------------------------------------------------------------------------------------------------


def _paged_attention(spec: AttnSpec, named: Named, interpret: bool) -> tuple[jax.Array, ...]:
    query, table = named["query"], named["page_table"]
    lse_shape, batch = query.shape[:-1], table.shape[0]
    if math.prod(lse_shape) == 0 or batch == 0:
        out = jnp.zeros((*lse_shape, spec.value_dim), spec.out_dtype)
        return out, jnp.full(lse_shape, -jnp.inf, jnp.float32)
    if spec.packed:
        count = query.shape[0]
        lo, hi = xla.clamp_ranges(named["q_ranges"], count)
    else:
        count = batch * query.shape[1]
        lo = jnp.arange(batch, dtype=jnp.int32) * query.shape[1]
        hi = lo + query.shape[1]
    operands = {
        "query": query.reshape(count, *query.shape[-2:]),
        "sequences": _sequences(spec, named, lo, hi),
        "page_table": table if table.shape[1] else jnp.full((batch, 1), -1, jnp.int32),
    }
    for name in ("key_cache", "value_cache", "key_params", "value_params"):
        if name in named:
            pool = named[name]  # without pages, no key exists: one that is never read stands in for them
            operands[name] = pool if pool.shape[1] else jnp.zeros((1, 1, *pool.shape[2:]), pool.dtype)
    if "sinks" in named:
        operands["sinks"] = named["sinks"]
    call = functools.partial(_call, spec, operands, interpret=interpret)
    group = _padded_group(spec)
    if not spec.packed:
        rows = query.shape[1] * group
        long = _long_tile(spec)
        tile = long if rows >= long.rows else _short_tile(spec, _power_of_two(max(rows, 16)))
        tiles = -(-rows // tile.rows)
        out, lse = call(tile, grid=batch * tiles, tiles=tiles)
        return out.reshape(*lse_shape, spec.value_dim), lse.reshape(lse_shape)

    # Two passes: the sequences of few rows (decode), which one small tile holds, then the others (prefill).
    short, long = _short_tile(spec, min(max(group, 16), 64)), _long_tile(spec)
    rows = (hi - lo) * group
    is_short = rows <= short.rows
    out = jnp.zeros((count, spec.num_q_heads, spec.value_dim), spec.out_dtype), jnp.full(lse_shape, -jnp.inf)
    one = jnp.where(is_short & (rows > 0), 1, 0)
    out = call(short, grid=min(batch, count), tile_counts=one, initial=out)
    if count * group > short.rows:
        several = jnp.where(is_short, 0, (rows + (long.rows - 1)) // long.rows)
        most = count * group // long.rows + min(batch, count * group // (short.rows + 1))
        out = call(long, grid=most, tile_counts=several, initial=out)
    return out


def _call(spec, operands, tile, *, grid, interpret, tiles=0, tile_counts=None, initial=None) -> tuple[jax.Array, ...]:
    """One launch. Packed calls write over `initial` what the tiles, counted by sequence, hold."""
    pl, triton, _ = load()
    count, heads, _ = operands["query"].shape
    batch = operands["sequences"].shape[0]
    aliases = {}
    if tile_counts is not None:
        ends = jnp.cumsum(tile_counts, dtype=jnp.int32)
        pad = _power_of_two(batch) - batch
        ends = jnp.pad(ends, (0, pad), constant_values=xla.INT32_MAX)
        operands = operands | {"tile_ends": ends, "initial_out": initial[0], "initial_lse": initial[1]}
        aliases = {len(operands) - 2: 0, len(operands) - 1: 1}
    num_pages = operands["key_cache"].shape[1]
    call = _Call(spec, tile, tuple(operands), num_pages, batch, tiles, grid, interpret)
    return pl.pallas_call(
        functools.partial(_kernel, call),
        grid=(grid, spec.num_kv_heads),
        out_shape=[
            jax.ShapeDtypeStruct((count, heads, spec.value_dim), spec.out_dtype),
            jax.ShapeDtypeStruct((count, heads), jnp.float32),
        ],
        input_output_aliases=aliases,
        compiler_params=triton.CompilerParams(num_warps=tile.num_warps, num_stages=tile.num_stages),
        interpret=interpret,
        name="turboattn_paged_attention",
    )(*operands.values())

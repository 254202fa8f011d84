"""Who is timed, and how each is called: our implementations, and what else can be called from JAX.

`works(case)` yields (peer's name, function that makes its Work) for every peer that a case has; making it raises Absent
or NotImplementedError with the reason when the peer cannot run it here. All peers of a case read the same random keys
and values.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import math
import pathlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import grid
import jax
import jax.numpy as jnp
import numpy as np
from timing import Work

import jax_turboattn as ta

OURS = ("cuda", "pallas")
NAMES = (
    *OURS,
    "cuda:sm80",
    "cuda dense",
    "xla",
    "cudnn",
    "cudnn dense",
    "fa3",
    *(f"fa3 {n} splits" for n in (1, 4, 16)),
    "torch fa2",
    "flashinfer fa2",
    "flashinfer fa3",
)
CUDA_CALL = r'custom_call_target="turboattn_'
PALLAS_CALL = r'custom_call_target="[^"]*(?:triton|mosaic)'
CUDNN_CALL = r'custom_call_target="__cudnn'
FA3_CALL = r'custom_call_target="flash_mha_fwd"'
GATHER = r" gather\("
ROTATED_BYTES = 400 << 20  # below this, several sets of keys and values take turns: L2 caches hold 50 or 60 MB
MAX_SETS = 16


class Absent(Exception):
    """Why a peer is not timed."""


def pattern(implementation: str) -> str:
    """What a call of ours looks like in the optimised HLO."""
    found = {"cuda": CUDA_CALL, "cpu": CUDA_CALL, "pallas": PALLAS_CALL, "xla": GATHER}
    return found[implementation.partition(":")[0]]


def random(seed: int, shape: tuple[int, ...], dtype=jnp.bfloat16) -> jax.Array:
    """N(0, 1) on the device. The generator of XLA: it compiles fast and needs no memory beside the result."""
    return _normal(jax.random.key(seed, impl="rbg"), shape, jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _normal(key, shape, dtype):
    if dtype == jnp.uint8:
        return jax.random.bits(key, shape, jnp.uint8)
    if dtype.itemsize == 1:  # fp8
        return jax.random.normal(key, shape, jnp.bfloat16).astype(dtype)
    return jax.random.normal(key, shape, dtype)


# ---- pages


@dataclasses.dataclass
class Pages:
    """A pool for all sets of a paged case: random contents, shuffled tables."""

    cache: ta.PagedKVCache
    tables: list[jax.Array]  # one a set
    lens: jax.Array

    def dense(self, table: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Keys and values [B, S, K, D] of one set's tables, contiguous."""
        return _contiguous(self.cache.key, table), _contiguous(self.cache.value, table)

    def tokens_first(self) -> tuple[jax.Array, jax.Array]:
        """The pool as [N, P, K, D], the layout of FlashAttention-3's pages."""
        return _tokens_first(self.cache.key), _tokens_first(self.cache.value)


@jax.jit
def _contiguous(pool, table):
    x = jnp.moveaxis(pool[table], 2, 3)  # [B, M, P, K, D]
    return x.reshape(x.shape[0], -1, *x.shape[3:])


@jax.jit
def _tokens_first(pool):
    return jnp.swapaxes(pool, 1, 2)


def pages(lens: tuple[int, ...], kv_heads: int, head_dim: int, page_size: int, kv_dtype: str) -> Pages:
    """Random pages; as many sets as keep them out of the L2 cache."""
    shape = jax.eval_shape(lambda: ta.PagedKVCache.create(1, kv_heads, head_dim, page_size=page_size, dtype=kv_dtype))
    counts = [-(-n // page_size) for n in lens]
    sets = rotated_sets(shape.nbytes_per_token * sum(lens))
    num_pages = sets * sum(counts)
    rng = np.random.default_rng(0)
    ids = rng.permutation(num_pages).astype(np.int32)
    tables = []
    for i in range(sets):
        table = np.full((len(lens), max(counts)), -1, np.int32)  # beyond a sequence's end: unmapped
        first = i * sum(counts)
        for b, count in enumerate(counts):
            table[b, :count] = ids[first : first + count]
            first += count
        tables.append(jnp.asarray(table))

    def fill(seed, array):
        if array is None:
            return None
        if array.shape[0] != 1 or array.ndim < 4:  # fp8: one scale a head
            return jnp.ones(array.shape, array.dtype)
        if array.shape[-1] == 2:  # (scale, zero): decoded values of about N(0, 1)'s size
            scale = 0.02 if kv_dtype == "int8" else 0.35
            pair = jnp.array([scale, -2.6], array.dtype)
            return jnp.broadcast_to(pair, (num_pages, *array.shape[1:])) * (
                1 + 0.01 * random(seed, (num_pages, 1, 1, 1))
            )
        return random(seed, (num_pages, *array.shape[1:]), array.dtype)

    names = ("key", "value", "key_params", "value_params")
    arrays = {n: fill(i, getattr(shape, n)) for i, n in enumerate(names)}
    return Pages(dataclasses.replace(shape, **arrays), tables, jnp.array(lens, jnp.int32))


def rotated_sets(nbytes: float) -> int:
    """How many sets of so many bytes take turns."""
    return max(1, min(MAX_SETS, math.ceil(ROTATED_BYTES / nbytes)))


# ---- decode


def decode_works(case: grid.Decode) -> Iterator[tuple[str, Callable[[], Work]]]:
    (H, K), D, B = case.heads, case.head_dim, len(case.lens)
    data = pages(case.lens, K, D, case.page_size, case.kv_dtype)
    query = random(100, (B, H, D))

    def ours(implementation):
        options = dict(batch_invariant=case.batch_invariant, implementation=implementation)
        if case.planned:
            options["plan"] = ta.make_plan(
                query, data.cache, data.tables[0], data.lens, None, implementation=implementation
            )

        def call(query, cache, table):
            return ta.paged_decode(query, cache, table, data.lens, **options)

        def moving(carry, cache, table):  # the gather of the same pages twice would be done once: tie it to the query
            query, zero = carry
            out = call(query, cache, table + zero)
            return out, (out[0, 0, 0] > 1e30).astype(jnp.int32)

        if implementation == "xla":
            return Work(moving, (query, jnp.int32(0)), data.cache, tuple(data.tables), GATHER)
        return Work(call, query, data.cache, tuple(data.tables), pattern(implementation))

    def step(implementation):
        rope = ta.RopeConfig(dim=D)
        key, value = random(101, (B, K, D)), random(102, (B, K, D))
        offsets = jnp.arange(B + 1, dtype=jnp.int32)

        def call(carry, new, table):
            query, cache = carry
            return ta.paged_attention_step(
                query, *new, cache, table, data.lens, offsets, rope=rope, max_q_len=1, implementation=implementation
            )

        carry = jax.tree.map(jnp.copy, (query, data.cache))  # donated: the other implementations need theirs
        return Work(call, carry, (key, value), tuple(data.tables), pattern(implementation), donate=True)

    def cudnn():
        if case.kv_dtype != "bfloat16" or case.ragged:
            raise Absent("a dense bfloat16 cache of one length only")

        def call(query, _, item):
            return jax.nn.dot_product_attention(query[:, None], *item, implementation="cudnn")[:, 0]

        return Work(call, query, (), tuple(map(data.dense, data.tables)), CUDNN_CALL)

    def fa3(splits):
        module = flash_attn3(D, case.kv_dtype)

        def call(query, pool, table):
            return module.flash_mha_with_kvcache(
                query[:, None], *pool, cache_seqlens=data.lens, page_table=table, num_splits=splits
            )[:, 0]

        tables = tuple(jnp.maximum(t, 0) for t in data.tables)
        return Work(call, query, data.tokens_first(), tables, FA3_CALL)

    for name in OURS:
        yield name, functools.partial(step if case.fused else ours, name)
    if case.ours_alone:
        return
    yield "cudnn dense", cudnn
    for splits in (1, 4, 16):
        yield f"fa3 {splits} splits", functools.partial(fa3, splits)
    if not case.ragged:  # it gathers B times the longest
        yield "xla", functools.partial(ours, "xla")


def flash_attn3(head_dim: int, kv_dtype: str = "bfloat16"):
    """The FlashAttention-3 binding, if it is installed and can do this."""
    if head_dim != 128 or kv_dtype != "bfloat16":
        raise Absent("its wheel has head dim 128 and 16-bit caches only")
    try:
        return importlib.import_module("flash_attn3_jax")
    except ImportError as error:
        raise Absent(f"flash_attn3_jax: {error}") from error


# ---- prefill


def prefill_works(case: grid.Prefill) -> Iterator[tuple[str, Callable[[], Work]]]:
    (H, K), D = case.heads, case.head_dim
    query, key, value = (random(i, (case.batch, case.length, heads, D)) for i, heads in enumerate((H, K, K)))

    def work(attend, seen):
        return Work(lambda query, kv, _: attend(query, *kv), query, (key, value), ((),), seen)

    def ours(implementation):
        attend = functools.partial(ta.attention, is_causal=case.is_causal, implementation=implementation)
        return work(attend, pattern(implementation))

    def cudnn():
        attend = functools.partial(jax.nn.dot_product_attention, is_causal=case.is_causal, implementation="cudnn")
        return work(attend, CUDNN_CALL)

    def fa3():
        return work(functools.partial(flash_attn3(D).flash_mha, is_causal=case.is_causal), FA3_CALL)

    for name in ("cuda", "cuda:sm80"):
        yield name, functools.partial(ours, name)
    yield "cudnn", cudnn
    yield "fa3", fa3


def packed(case: grid.Packed) -> tuple[Pages, jax.Array, Callable[[str], Work]]:
    """The pages and queries of a packed case, and what makes our calls of them."""
    (H, K), D = case.heads, case.head_dim
    new, before = map(np.array, zip(*case.sequences))
    data = pages(tuple(map(int, new + before)), K, D, case.page_size, case.kv_dtype)
    query = random(100, (int(new.sum()), H, D))
    offsets = jnp.array([0, *np.cumsum(new)], jnp.int32)

    def ours(implementation):
        def call(query, cache, table):
            return ta.paged_attention(
                query, cache, table, data.lens, offsets, max_q_len=int(new.max()), implementation=implementation
            )

        return Work(call, query, data.cache, tuple(data.tables), pattern(implementation))

    return data, query, ours


def mixed_works(case: grid.Mixed) -> Iterator[tuple[str, Callable[[], Work]]]:
    _, _, ours = packed(case)
    for name in (*OURS, "cuda:sm80"):
        yield name, functools.partial(ours, name)


def chunked_works(case: grid.Chunked) -> Iterator[tuple[str, Callable[[], Work]]]:
    (H, _), D, B, new = case.heads, case.head_dim, case.batch, case.new
    data, query, ours = packed(case)

    def dense():
        if case.kv_dtype != "bfloat16":
            raise Absent("bfloat16 only")

        def call(query, _, item):
            x = query.reshape(B, new, H, D)
            out = ta.attention(x, *item, is_causal=True, query_offset=case.history, implementation="cuda")
            return out.reshape(query.shape)

        return Work(call, query, (), tuple(map(data.dense, data.tables)), CUDA_CALL)

    def fa3():
        module = flash_attn3(D, case.kv_dtype)

        def call(query, pool, table):
            x = query.reshape(B, new, H, D)
            out = module.flash_mha_with_kvcache(
                x, *pool, cache_seqlens=data.lens, page_table=table, is_causal=True, num_splits=1
            )
            return out.reshape(query.shape)

        return Work(call, query, data.tokens_first(), tuple(data.tables), FA3_CALL)

    for name in (*OURS, "cuda:sm80"):
        yield name, functools.partial(ours, name)
    yield "cuda dense", dense
    yield "fa3", fa3


# ---- append


def append_works(case: grid.Append) -> Iterator[tuple[str, Callable[[], Work]]]:
    B, new = case.sequences, case.tokens // case.sequences
    shape = (B * new, case.kv_heads, case.head_dim)
    offsets = jnp.arange(B + 1, dtype=jnp.int32) * new
    rope = ta.RopeConfig(dim=case.head_dim)

    def ours(implementation):
        data = pages((new,) * B, case.kv_heads, case.head_dim, case.page_size, case.kv_dtype)

        def call(cache, _, item):
            return ta.append_kv(cache, *item, data.lens, offsets, rope=rope, implementation=implementation)

        items = tuple((random(2 * i, shape), random(2 * i + 1, shape), table) for i, table in enumerate(data.tables))

        seen = r"scatter" if implementation == "xla" else pattern(implementation)
        return Work(call, data.cache, (), items, seen, donate=True)

    yield "cuda", functools.partial(ours, "cuda")
    yield "xla", functools.partial(ours, "xla")


WORKS = dict(decode=decode_works, prefill=prefill_works, chunked=chunked_works, mixed=mixed_works, append=append_works)


def works(case) -> Iterator[tuple[str, Callable[[], Work]]]:
    return WORKS[case.kind](case)


# ---- how much work a case is


def amount(case) -> tuple[float, str]:
    """(TB or TFLOP of a case, its unit a second): K and V read once, visible pairs, or bytes read and written."""
    if case.kind == "prefill":
        pairs = case.length * (case.length + 1) / 2 if case.is_causal else case.length**2
        return 4 * case.batch * case.heads[0] * case.head_dim * pairs / 1e12, "TFLOP/s"
    if case.kind in ("chunked", "mixed"):
        pairs = sum(new * before + new * (new + 1) / 2 for new, before in case.sequences)
        return 4 * case.heads[0] * case.head_dim * pairs / 1e12, "TFLOP/s"
    kv_heads = case.kv_heads if case.kind == "append" else case.heads[1]
    cache = jax.eval_shape(
        lambda: ta.PagedKVCache.create(1, kv_heads, case.head_dim, page_size=case.page_size, dtype=case.kv_dtype)
    )
    if case.kind == "append":
        return case.tokens * (4 * kv_heads * case.head_dim + cache.nbytes_per_token) / 1e12, "TB/s"
    return sum(case.lens) * cache.nbytes_per_token / 1e12, "TB/s"


def memory(case) -> float:
    """Bytes that the largest peer of a case needs, roughly: ours, a second layout of K and V, and the queries."""
    if case.kind == "prefill":
        return 2 * case.batch * case.length * case.head_dim * (3 * case.heads[0] + 2 * case.heads[1])
    if case.kind == "append":
        return 3e12 * amount(case)[0]
    one = sum(map(sum, case.sequences)) * 4 * case.heads[1] * case.head_dim
    return 3 * max(one, min(MAX_SETS * one, ROTATED_BYTES))


# ---- outside references: not callable from JAX


OUTSIDE = {
    "prefill": ("torch fa2",),
    "decode": ("flashinfer fa2",),
    # fa3 is FlashInfer's choice here; fa2 splits long sequences. PyTorch has no pages and reads plain arrays.
    "chunked": ("torch fa2", "flashinfer fa2", "flashinfer fa3"),
    "mixed": ("flashinfer fa2", "flashinfer fa3"),
}


def outside(case) -> tuple[str, ...]:
    """The outside references of a case."""
    return () if getattr(case, "ours_alone", False) else OUTSIDE.get(case.kind, ())


def outside_us(entries: list[tuple[Any, str]], seconds: float) -> list[float | str]:
    """Microseconds on the device of each (case, outside reference), or why not: a process with its own memory."""
    found = []
    for case, peer in entries:
        try:
            found.append(_torch_shape(case, peer))
        except Absent as reason:
            found.append(str(reason))
    shapes = [shape for shape in found if isinstance(shape, dict)]
    script = pathlib.Path(__file__).with_name("torch_peer.py")
    command = [sys.executable, str(script), json.dumps(shapes)]
    results: list[float | str] = []
    if shapes:
        try:
            done = subprocess.run(command, capture_output=True, timeout=seconds, check=False)
            output, reason = done.stdout, (done.stderr.decode().strip().splitlines() or ["no output"])[-1][:200]
        except subprocess.TimeoutExpired as error:
            output, reason = error.stdout or b"", f"took more than {seconds:.0f} s"
        results += map(json.loads, output.splitlines())
        results += [reason] * (len(shapes) - len(results))
    measured = iter(results)
    return [next(measured) if isinstance(shape, dict) else shape for shape in found]


def _torch_shape(case, peer: str) -> dict:
    """A case as torch_peer.py reads it."""
    package, backend = peer.split()
    if importlib.util.find_spec(package) is None:
        raise Absent(f"{package} is not installed")
    shape = dict(kind=case.kind, backend=backend, heads=case.heads, dim=case.head_dim)
    if case.kind == "prefill":
        return shape | dict(batch=case.batch, length=case.length, new=case.length, causal=case.is_causal)
    if package == "torch":  # it has no pages: plain arrays
        if case.kv_dtype != "bfloat16":
            raise Absent("bfloat16 only")
        return shape | dict(kind="prefill", batch=case.batch, length=case.history + case.new, new=case.new, causal=True)
    if case.kv_dtype not in ("bfloat16", "float8_e4m3fn"):
        raise Absent("bfloat16 and float8 caches only")
    new, lens = zip(*((new, new + before) for new, before in case.sequences))
    nbytes = 2 * sum(lens) * case.heads[1] * case.head_dim * jnp.dtype(case.kv_dtype).itemsize
    return shape | dict(lens=lens, new=new, page_size=case.page_size, dtype=case.kv_dtype, sets=rotated_sets(nbytes))

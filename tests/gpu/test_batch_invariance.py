"""batch_invariant: the bits of a sequence's rows, whatever the batch, its place in it and the padded sizes.

Hosts without a GPU run it too, on the CPU kernels with shorter contexts.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_turboattn as ta

GPU = jax.default_backend() == "gpu"
IMPLEMENTATION = "cuda" if GPU else "cpu"
H, K, D, P = 8, 2, 64, 64
M = 128 if GPU else 12  # 8,192 keys: 8 parts of a unit on the GPU
SHARED = 4 * M  # pages that any sequence reads; a sequence's last ones are its own, a step appends there
OWN = 3
BATCHES = (1, 2, 7, 64)
# (new tokens, context): one token, decode rows in several units, chunks of several tiles; context lengths by the part.
TARGETS = ((1, M * P), (3, 5 * M * P // 8), (130, M * P - 7), (70, 70), (1, 1), (4, M * P // 4 + 1), (1, M * P // 2))
RNG = np.random.default_rng(0)


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """numpy's, as all that is put together here: on a GPU each jnp operation of a new shape would be compiled."""
    return rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)


def pool(kv_dtype: str) -> ta.PagedKVCache:
    return pool_of(kv_dtype, K, D)


@functools.cache
def pool_of(kv_dtype: str, kv_heads: int, dim: int) -> ta.PagedKVCache:
    """Random pages: SHARED ones, and OWN for each sequence of the largest batch."""
    pages = SHARED + OWN * max(BATCHES)
    cache = ta.PagedKVCache.create(pages, kv_heads, dim, page_size=P, dtype=kv_dtype)
    if kv_dtype in ("bfloat16", "float8_e4m3fn"):
        rows = [jnp.asarray(normal(RNG, pages, kv_heads, P, dim)).astype(cache.key.dtype) for _ in range(2)]
        return dataclasses.replace(cache, key=rows[0], value=rows[1])
    codes = [jnp.asarray(RNG.integers(0, 256, cache.key.shape), jnp.uint8) for _ in range(2)]
    params = [jnp.asarray(RNG.uniform([0.01, -2], [0.02, -1], cache.key_params.shape), jnp.bfloat16) for _ in range(2)]
    return dataclasses.replace(cache, key=codes[0], value=codes[1], key_params=params[0], value_params=params[1])


@dataclasses.dataclass
class Sequence:
    """One sequence of a batch: everything that its rows may depend on."""

    q_len: int
    kv_len: int
    shared: np.ndarray  # pages [M]
    new: tuple[np.ndarray, ...]  # query, key, value rows

    @staticmethod
    def draw(rng: np.random.Generator, q_len: int, kv_len: int) -> Sequence:
        new = tuple(normal(rng, q_len, heads, D) for heads in (H, K, K))
        return Sequence(q_len, kv_len, rng.integers(0, SHARED, M), new)

    def table(self, own: int) -> np.ndarray:
        """Its page table; the pages that hold its new tokens are the own'th ones of the pool."""
        table = self.shared.copy()
        last = (self.kv_len - 1) // P
        first = max(last - OWN + 1, 0)
        table[first : last + 1] = SHARED + OWN * own + np.arange(last + 1 - first)
        return table


@functools.cache
def function(op: str):
    """The public function under jit: all arrays -> out, lse and, for a step, the pages that are place 0's own."""
    options = dict(batch_invariant=True, return_residual=True, implementation=IMPLEMENTATION)
    if op != "paged_attention_step":
        return jax.jit(functools.partial(getattr(ta, op), **options))

    def step(*arrays):
        out, cache = ta.paged_attention_step(*arrays, rope=ta.RopeConfig(dim=D), **options)
        return *out, *(x[SHARED : SHARED + OWN] for x in jax.tree.leaves(cache))

    return jax.jit(step)


def call(op: str, kv_dtype: str, batch: list[Sequence], place: int, columns: int, rows: int) -> tuple[bytes, ...]:
    """The bits of sequence `place` of the batch: out, lse, and for a step what the cache holds of its last pages.

    It has the same pages of its own wherever it stands, since their old contents are an input.

    Args:
      columns, rows: padding of the page table and of the packed arrays.
    """
    owners = [0 if i == place else i + 1 for i in range(len(batch))]
    owners = [owner if owner < max(BATCHES) else place + 1 for owner in owners]
    tables = np.full((len(batch), M + columns), -1, np.int32)
    tables[:, :M] = [s.table(owner) for s, owner in zip(batch, owners)]
    lens = np.array([s.kv_len for s in batch], np.int32)
    offsets = np.cumsum([0] + [s.q_len for s in batch]).astype(np.int32)
    padding = [np.full((rows, heads, D), np.nan, jnp.bfloat16) for heads in (H, K, K)]
    query, key, value = (np.concatenate([*(s.new[i] for s in batch), padding[i]]) for i in range(3))
    cache = pool(kv_dtype)
    arrays = dict(
        paged_decode=(query, cache, tables, lens),
        paged_attention=(query, cache, tables, lens, offsets),
        paged_attention_step=(query, key, value, cache, tables, lens, offsets),
    )
    out, lse, *written = map(np.asarray, function(op)(*arrays[op]))
    own = slice(offsets[place], offsets[place + 1])
    return tuple(x.tobytes() for x in (out[own], lse[own], *written))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("op", ["paged_decode", "paged_attention", "paged_attention_step"])
def test_bits_do_not_depend_on_the_batch(op, kv_dtype):
    """Each target among others: batch sizes, places, columns and rows that are padded; one executable for each size."""
    longest = 1 if op == "paged_decode" else 100
    for i, (q_len, kv_len) in enumerate(TARGETS):
        rng = np.random.default_rng(i)
        target = Sequence.draw(rng, min(q_len, longest) if op == "paged_decode" else q_len, kv_len)
        alone = call(op, kv_dtype, [target], 0, 0, 0)
        assert np.isfinite(np.frombuffer(alone[1], np.float32)).all()
        for size in BATCHES:
            # As many rows in all, whatever the target, so that a size is compiled once: the last one has the rest.
            for place in dict.fromkeys([0, size // 2, size - 1]):
                others = [Sequence.draw(rng, *lengths) for lengths in drawn(rng, size - 1, longest)]
                batch = others[:place] + [target] + others[place:]
                extra = 0 if op == "paged_decode" else size * 131 + 3 - sum(s.q_len for s in batch)
                assert call(op, kv_dtype, batch, place, size % 5, extra) == alone, (size, place, q_len, kv_len)


def test_bits_of_units_of_16_rows(monkeypatch):
    """int4 of head dim 128: their warps share values on sm90."""
    for name, value in dict(H=16, K=1, D=128).items():
        monkeypatch.setitem(globals(), name, value)
    test_bits_do_not_depend_on_the_batch("paged_decode", "int4")


def drawn(rng: np.random.Generator, count: int, longest: int):
    """(new tokens, context) of the others."""
    for _ in range(count):
        q_len = int(rng.integers(1, longest + 1)) if rng.random() < 0.3 else 1
        yield q_len, int(rng.integers(q_len, M * P + 1))


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "int8", "int4", "float8_e4m3fn"])
@pytest.mark.parametrize("op", ["paged_decode", "paged_attention"])
def test_bits_do_not_depend_on_empty_slots(op, kv_dtype):
    """Codes and parameters that an earlier owner of the last page may have left behind the sequence's end."""
    rng = np.random.default_rng(0)
    kv_len = 3 * P + 36
    target = Sequence.draw(rng, 1 if op == "paged_decode" else 150, kv_len)
    table, cache = target.table(0), pool(kv_dtype)

    def left_behind(code, parameter):
        def fill(array, x):
            if array is None or array.ndim < 4:  # one scale a head
                return array
            return array.at[table[kv_len // P], :, kv_len % P :].set(jnp.asarray(x, array.dtype))

        return dataclasses.replace(
            cache,
            key=fill(cache.key, code),
            value=fill(cache.value, code),
            key_params=fill(cache.key_params, parameter),
            value_params=fill(cache.value_params, parameter),
        )

    def bits(cache):
        arrays = (target.new[0], cache, table[None], np.array([kv_len], np.int32))
        if op == "paged_attention":
            arrays += (np.array([0, target.q_len], np.int32),)
        return [np.asarray(x).tobytes() for x in function(op)(*arrays)]

    codes = (0, 255) if kv_dtype in ("int8", "int4") else (0, jnp.nan)
    want = bits(left_behind(codes[0], 0))
    for parameter in (jnp.nan, jnp.inf, 1e38, -3e4):
        assert bits(left_behind(codes[1], parameter)) == want, parameter

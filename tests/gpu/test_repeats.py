"""The same call a hundred times, another one in between: the same bits each time.

Calls of a few shapes that cut work in parts, and a small one for every kernel row; hosts without a GPU run the latter
on the CPU kernels.
"""

import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_turboattn as ta

_path = pathlib.Path(__file__).with_name("sanitizer_cases.py")
_spec = importlib.util.spec_from_file_location("sanitizer_cases", _path)
sanitizer_cases = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(sanitizer_cases)

ROWS = sanitizer_cases.rows("_cuda" if jax.default_backend() == "gpu" else "_cpu")
REPEATS = 100
IMPLEMENTATIONS = ["cuda", "pallas"]
H, K, D, P, B, M = 16, 4, 128, 32, 24, 40
RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape, np.float32), jnp.bfloat16)


def pool(kv_dtype: str) -> ta.PagedKVCache:
    """B sequences of M pages, filled by append_kv."""
    cache = ta.PagedKVCache.create(B * M, K, D, page_size=P, dtype=kv_dtype)
    offsets = jnp.arange(B + 1, dtype=jnp.int32) * M * P
    lens = jnp.full(B, M * P, jnp.int32)
    return jax.jit(ta.append_kv)(cache, normal(B * M * P, K, D), normal(B * M * P, K, D), table(), lens, offsets)


def table():
    return jnp.asarray(np.random.default_rng(1).permutation(B * M).reshape(B, M), jnp.int32)


def packed(q_lens):
    """Offsets [B + 1] of q_lens, and lengths of contexts that hold them: one of every five sequences is long."""
    offsets = np.concatenate([[0], np.cumsum(q_lens)]).astype(np.int32)
    contexts = np.where(np.arange(B) % 5 == 0, M * P, np.random.default_rng(2).integers(1, 200, B))
    return jnp.asarray(np.maximum(contexts, q_lens), jnp.int32), jnp.asarray(offsets)


def decode(kv_dtype, implementation):
    lens, _ = packed(np.ones(B, np.int32))
    call = functools.partial(ta.paged_decode, implementation=implementation)
    return call, (normal(B, H, D), pool(kv_dtype), table()), lens


def long_decode(kv_dtype, implementation):
    """Blocks with many keys each, so that every place of their rings is written again and again."""
    call = functools.partial(ta.paged_decode, implementation=implementation)
    lens = jnp.full(4 * B, M * P - 5, jnp.int32)
    return call, (normal(4 * B, H, D), pool(kv_dtype), jnp.tile(table(), (4, 1))), lens


def many_decode(kv_dtype, implementation):
    """More units than blocks, of ragged lengths."""
    lens, _ = packed(np.ones(B, np.int32))
    call = functools.partial(ta.paged_decode, implementation=implementation)
    lens = jnp.concatenate([lens, lens // 2, lens // 3 + 1, lens[::-1]])
    return call, (normal(4 * B, H, D), pool(kv_dtype), jnp.tile(table(), (4, 1))), lens


def wide_decode(kv_dtype, implementation):
    """16 query heads a kv head."""
    lens, _ = packed(np.ones(B, np.int32))
    call = functools.partial(ta.paged_decode, implementation=implementation)
    return call, (normal(B, 16 * K, D), pool(kv_dtype), table()), lens


def prefill(kv_dtype, implementation):
    q_lens = np.random.default_rng(3).integers(0, 100, B)  # decode-like rows, chunks and empty sequences together
    q_lens[::3] = 1
    lens, offsets = packed(q_lens)

    def call(query, cache, table, lens):
        return ta.paged_attention(query, cache, table, lens, offsets, implementation=implementation)

    return call, (normal(int(q_lens.sum()) + 5, H, D), pool(kv_dtype), table()), lens


def step(kv_dtype, implementation):
    lens, offsets = packed(np.ones(B, np.int32))

    def call(query, key, value, cache, table, lens):
        return ta.paged_attention_step(
            query, key, value, cache, table, lens, offsets, rope=ta.RopeConfig(dim=D), implementation=implementation
        )

    new = (normal(B, H, D), normal(B, K, D), normal(B, K, D))
    return call, (*new, pool(kv_dtype), table()), lens


def dense(kv_dtype, implementation):
    def call(query, key, value, lens):
        return ta.attention(
            query, key, value, is_causal=True, key_value_seq_lengths=lens, implementation=implementation
        )

    arrays = (normal(3, 700, H, D), normal(3, 700, K, D), normal(3, 700, K, D))
    return call, arrays, jnp.array([700, 1, 333], jnp.int32)


CALLS = dict(decode=decode, long_decode=long_decode, many_decode=many_decode, wide_decode=wide_decode)
CALLS |= dict(prefill=prefill, step=step, dense=dense)


def bits(tree):
    """Integers that are equal exactly when the arrays are equal bit by bit."""
    return [jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}") for x in jax.tree.leaves(tree)]


def different(call, arguments, others) -> int:
    """How many of the repeats of a compiled call differ from the first in any bit.

    others: arguments of the calls in between: other contents of the workspace, under the same executable.
    """
    same = jax.jit(lambda a, b: jnp.all(jnp.array([jnp.all(x == y) for x, y in zip(bits(a), bits(b))])))
    first = call(*arguments)
    assert not any(bool(jnp.isnan(x).any()) for x in jax.tree.leaves(first) if x.dtype != jnp.uint8)
    equal = []
    for _ in range(REPEATS):
        call(*others)
        equal.append(same(call(*arguments), first))
    return REPEATS - sum(map(int, equal))


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "name, kv_dtype",
    [(n, d) for n in ("decode", "prefill", "step") for d in ("bfloat16", "int8")]
    + [("long_decode", d) for d in ("int8", "int4")]
    + [("many_decode", "bfloat16"), ("wide_decode", "int4"), ("dense", "bfloat16")],
)
def test_hundred_repeats_are_bitwise_equal(name, kv_dtype, implementation):
    try:
        call, arrays, lens = CALLS[name](kv_dtype, implementation)
        assert different(jax.jit(call), (*arrays, lens), (*arrays, jnp.maximum(lens // 3, 1))) == 0
    except NotImplementedError as reason:
        pytest.skip(str(reason))


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_every_kernel_repeats_its_bits(row, monkeypatch):
    monkeypatch.setenv("JAX_TURBOATTN_IMPLEMENTATION", sanitizer_cases.implementation(row))
    make = sanitizer_cases.CALLS[row["phase"]]
    (function, arguments), (_, others) = (make(np.random.default_rng(seed), row) for seed in (0, 1))
    assert different(jax.jit(function), *jax.device_put((arguments, others))) == 0

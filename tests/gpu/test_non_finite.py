"""A value of Inf or NaN reaches the rows that see its key, and no other row changes by a bit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_turboattn as ta

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
NEW, HISTORY, PAGE, H, K = 300, 1000, 16, 4, 2  # one chunk of NEW tokens after HISTORY
LENGTH = NEW + HISTORY


def normal(seed, *shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def filled(kv_dtype, dim, dtype):
    """A cache with LENGTH tokens of one sequence, and its page table; page of token t: table[0, t // PAGE]."""
    columns = -(-LENGTH // PAGE)
    table = np.random.default_rng(0).permutation(columns + 2)[None, :columns].astype(np.int32)
    cache = ta.PagedKVCache.create(columns + 2, K, dim, page_size=PAGE, dtype=kv_dtype, param_dtype=dtype)
    key, value = (normal(i, LENGTH, K, dim, dtype=dtype) for i in (1, 2))
    offsets = jnp.array([0, LENGTH], jnp.int32)
    return ta.append_kv(cache, key, value, jnp.array(table), jnp.array([LENGTH], jnp.int32), offsets), table


def check(call, bad, clean, *, first, column, whole_row, sign=None, heads=slice(None)):
    """Rows from token `first` on have the value of the bad key in `column` (whole_row: in all), others none."""
    out, expected = (np.asarray(call(x), np.float32) for x in (bad, clean))
    assert np.isfinite(expected).all()
    hit = np.zeros(expected.shape, bool)
    hit[first:, heads, slice(None) if whole_row else column] = True
    np.testing.assert_array_equal(out[~hit], expected[~hit])
    if sign is None:
        assert np.isnan(out[hit]).all()
    else:
        np.testing.assert_array_equal(out[hit], np.full(hit.sum(), sign * np.inf))


@pytest.mark.parametrize("implementation", ["cuda", "cuda:sm80"])
@pytest.mark.parametrize("token", [HISTORY + 130, HISTORY + NEW - 1, HISTORY - 1, 3])
@pytest.mark.parametrize(
    "kv_dtype, dim", [("bf16", 64), ("bf16", 128), ("bf16", 256), ("int8", 128), ("int4", 64), ("fp8", 128)]
)
def test_pages(kv_dtype, dim, token, implementation):
    name = {"bf16": jnp.bfloat16, "int8": jnp.int8, "int4": "int4", "fp8": jnp.float8_e4m3fn}[kv_dtype]
    cache, table = filled(name, dim, jnp.bfloat16)
    query = normal(9, NEW, H, dim)
    place = (int(table[0, token // PAGE]), 0, token % PAGE)  # of kv head 0: query heads 0 and 1
    if kv_dtype == "bf16":
        bad = dataclasses.replace(cache, value=cache.value.at[(*place, 5)].set(jnp.inf))
    elif kv_dtype == "fp8":
        bad = dataclasses.replace(cache, value=cache.value.at[(*place, 5)].set(jnp.nan))
    else:
        bad = dataclasses.replace(cache, value_params=cache.value_params.at[(*place, 0)].set(jnp.nan))

    def call(cache, **how):
        return ta.paged_attention(
            query,
            cache,
            jnp.array(table),
            jnp.array([LENGTH], jnp.int32),
            jnp.array([0, NEW], jnp.int32),
            implementation=implementation,
            **how,
        )

    where = dict(first=max(0, token - HISTORY), heads=slice(0, H // K), column=5)
    rule = dict(whole_row=kv_dtype.startswith("int"), sign=1 if kv_dtype == "bf16" else None)
    check(call, bad, cache, **where, **rule)
    if implementation == "cuda":
        check(lambda cache: call(cache, out_dtype=jnp.float32), bad, cache, **where, **rule)


@pytest.mark.parametrize("parameter", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("token", [LENGTH - 1, LENGTH - 2, LENGTH - 70, 3])
def test_units_of_16_rows(token, parameter):
    """int4, two tokens of eight heads a kv head: the last key is the second one's alone."""
    cache, table = filled("int4", 128, jnp.bfloat16)
    query = normal(9, 1, 2, 8 * K, 128)
    place = (int(table[0, token // PAGE]), 0, token % PAGE, 0)
    check(
        lambda cache: ta.paged_decode(
            query, cache, jnp.array(table), jnp.array([LENGTH], jnp.int32), implementation="cuda"
        )[0],
        dataclasses.replace(cache, value_params=cache.value_params.at[place].set(parameter)),
        cache,
        first=max(0, token - LENGTH + 2),
        heads=slice(0, 8),
        column=0,
        whole_row=True,
    )


def test_parts():
    """Keys cut in parts: few rows after many keys."""
    columns, new = 2048, 128
    length = columns * PAGE
    table = np.random.default_rng(0).permutation(columns)[None].astype(np.int32)
    cache = ta.PagedKVCache.create(columns, K, 128, page_size=PAGE)
    cache = dataclasses.replace(cache, key=normal(1, *cache.key.shape), value=normal(2, *cache.value.shape))
    query = normal(9, new, H, 128)
    for token in (length - 20, length - new, 5000):
        place = (int(table[0, token // PAGE]), 0, token % PAGE, 7)
        check(
            lambda cache: ta.paged_attention(
                query, cache, jnp.array(table), jnp.array([length]), jnp.array([0, new]), implementation="cuda"
            ),
            dataclasses.replace(cache, value=cache.value.at[place].set(jnp.nan)),
            cache,
            first=max(0, token - length + new),
            heads=slice(0, H // K),
            column=7,
            whole_row=False,
        )


@pytest.mark.parametrize("dim, value_dim", [(64, 64), (128, 128), (192, 128), (256, 256)])
@pytest.mark.parametrize("tokens", [700, 1408])
def test_dense(tokens, dim, value_dim):
    query, key = normal(0, 1, tokens, 4, dim), normal(1, 1, tokens, 4, dim)
    value = normal(2, 1, tokens, 4, value_dim)
    for token in (0, 130, 600, tokens - 1):
        check(
            lambda value: ta.attention(query, key, value, is_causal=True, implementation="cuda")[0],
            value.at[0, token, 1, 9].set(-jnp.inf),
            value,
            first=token,
            heads=slice(1, 2),
            column=9,
            whole_row=False,
            sign=-1,
        )


def test_segments():
    tokens = 900
    query, key, value = (normal(i, 1, tokens, 2, 128) for i in range(3))
    ids = (jnp.arange(tokens) // 250)[None].astype(jnp.int32)
    out, expected = (
        np.asarray(ta.attention(query, key, v, segment_ids=(ids, ids), implementation="cuda"), np.float32)[0]
        for v in (value.at[0, 400, 0, 3].set(jnp.nan), value)
    )
    hit = np.zeros(out.shape, bool)
    hit[250:500, 0, 3] = True
    np.testing.assert_array_equal(out[~hit], expected[~hit])
    assert np.isnan(out[hit]).all()


@pytest.mark.parametrize("implementation", ["cuda", "cuda:sm80"])
@pytest.mark.parametrize("length", [1, 40, 1000])
def test_infinite_scale_in_decode(length, implementation):
    """fp8 values of a head whose scale is Inf are Inf with their own signs, from the first key on."""
    columns = -(-1000 // PAGE)
    table = np.random.default_rng(0).permutation(columns)[None].astype(np.int32)
    cache = ta.PagedKVCache.create(columns, K, 128, page_size=PAGE, dtype="float8_e4m3fn")
    signs = np.where(np.arange(128) % 2 == 0, 1, -1)
    cache = dataclasses.replace(
        cache,
        key=normal(1, *cache.key.shape).astype(jnp.float8_e4m3fn),
        value=jnp.broadcast_to(jnp.asarray(signs, jnp.float8_e4m3fn), cache.value.shape),
    )

    def call(cache):
        return ta.paged_decode(
            normal(9, 1, H, 128), cache, jnp.array(table), jnp.array([length]), implementation=implementation
        )

    out, expected = (
        np.asarray(call(c), np.float32)[0]
        for c in (dataclasses.replace(cache, value_params=cache.value_params.at[0].set(jnp.inf)), cache)
    )
    np.testing.assert_array_equal(out[: H // K], np.broadcast_to(signs * np.inf, (H // K, 128)))
    np.testing.assert_array_equal(out[H // K :], expected[H // K :])

"""What the conformance suite does not look at in the jnp implementation: codec bytes by the million under jit, the
phase error of RoPE, positions that overflow 32 bits, pools updated in place, and sequences in groups."""

import functools
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jax_turboattn as ta
from jax_turboattn import quant, rotation
from jax_turboattn.backends import xla
from jax_turboattn.testing import codecs

INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
DTYPES = {name: np.dtype(getattr(ml_dtypes, name, name)) for name in ("float32", "bfloat16", "float16")}


# ---- codecs


def rows_of(dtype: np.dtype, count: int, width: int) -> np.ndarray:
    """Rows of every kind: scales from 2^-10 to 2^6, constant, subnormal scale, huge, integers, one NaN or Inf.

    Without values below 2^-126: XLA's CPU backend takes them for zero, as the CPU kernels under it do.
    """
    rng = np.random.default_rng(0)
    x = (rng.standard_normal((count, width)) * np.exp2(rng.integers(-10, 6, (count, 1)))).astype(np.float32)
    part = count // 16
    x[:part] = np.round(x[:part, :1])
    x[part : 2 * part] *= 2.0**-18 if dtype == np.float16 else 2.0**-121
    x[2 * part : 3 * part] *= 2.0**8 if dtype == np.float16 else 2.0**118
    x[3 * part : 4 * part] = np.round(x[3 * part : 4 * part])
    for i, bad in enumerate((np.nan, np.inf, -np.inf)):
        x[4 * part + i :: 97, i] = bad
    if dtype != np.float16:
        x[np.abs(x) < 2.0**-126] = 0
    return x.astype(dtype)


def same(got, want) -> bool:
    """Equal bytes, any NaN equal to any, and zeros of either sign."""
    g, w = np.asarray(got).astype(np.float32), np.asarray(want).astype(np.float32)
    return bool(((g == w) | (np.isnan(g) & np.isnan(w))).all())


@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_integer_codes_equal_the_numpy_codec(dtype, kv_dtype):
    x = rows_of(DTYPES[dtype], 40_000, 64)  # 2.6 M values
    # The decoding in the same program: nothing may be simplified across the stored parameters.
    both = jax.jit(lambda x: (lambda c, p: (c, p, quant.decode(c, p, kv_dtype, dtype)))(*quant.encode(x, kv_dtype)))
    codes, params, decoded = (np.asarray(y) for y in both(x))
    want_codes, want_params = codecs.encode_int(x, kv_dtype)
    want = codecs.decode_int(want_codes, want_params, kv_dtype)
    # Not rows whose steps are near 2^-126, where x - zero or a decoded value may be a denormal, which XLA flushes.
    scale = want_params[:, 0].astype(np.float32)
    exact = ~((scale > 0) & (scale < 2.0**-100)) if dtype != "float16" else np.ones(len(x), bool)
    assert exact.mean() > 0.93
    assert np.array_equal(codes[exact], want_codes[exact])
    assert same(params[exact], want_params[exact])
    assert same(decoded[exact], want[exact])


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_equals_the_numpy_codec(dtype):
    rng = np.random.default_rng(1)
    x = rows_of(DTYPES[dtype], 20_000, 64)
    scale = np.exp2(rng.uniform(-8, 8, (len(x), 1))).astype(np.float32)
    scale[:4, 0] = 0, np.nan, np.inf, -1
    stored = jax.jit(lambda x, s: quant.encode(x, "float8_e4m3fn", s)[0])(x, scale)
    want = codecs.encode_fp8(x, scale)
    assert same(stored, want)
    decoded = jax.jit(lambda y, s: quant.decode(y, s, "float8_e4m3fn", dtype))(want, scale)
    assert same(decoded, codecs.decode_fp8(want, scale, DTYPES[dtype]))


def test_int4_packing():
    codes = np.random.default_rng(2).integers(0, 16, (7, 40)).astype(np.uint8)
    assert np.array_equal(quant._pack_int4(codes), codecs.pack_int4(codes))
    assert np.array_equal(quant._unpack_int4(codecs.pack_int4(codes)), codes)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_is_that_of_a_conversion(dtype):
    rng = np.random.default_rng(3)
    x = (rng.standard_normal(1 << 18) * np.exp2(rng.integers(-30, 20, 1 << 18))).astype(np.float32)
    x[:6] = 0, -0.0, np.inf, -np.inf, np.nan, 65520  # 65520: the first that float16 rounds to Inf
    got = jax.jit(lambda x: quant.round_to(x, dtype))(x)
    with np.errstate(over="ignore"):
        assert same(got, x.astype(DTYPES[dtype]))


# ---- RoPE


POSITIONS = np.concatenate(
    [np.random.default_rng(4).integers(0, 2**20, 4000), [0, 1, 2**20 - 1, -1, -5000, INT32_MAX, INT32_MIN]]
).astype(np.int32)


@pytest.mark.parametrize("base", [10_000.0, 500_000.0])
def test_phase_error(base):
    """Far below the promised 1e-4 rad, at any int32 position."""
    rope = ta.RopeConfig(dim=128, base=base)
    cos, sin = jax.jit(lambda t, p: xla._rotation(rope, {"rope_turns": t}, p, None))(rope.turns(), POSITIONS)
    exact = POSITIONS[:, None].astype(np.float64) * rope.inv_freq()
    assert np.abs(np.asarray(cos, np.float64) - np.cos(exact)).max() < 1e-6
    assert np.abs(np.asarray(sin, np.float64) - np.sin(exact)).max() < 1e-6


def test_phase_error_of_a_traced_base():
    """2e-7 rad a token."""
    bases = np.array([1e3, 1e4, 12345.678, 5e5, 3.3e7, 1e9], np.float32)
    for dim in (8, 64, 128, 512):
        words = jax.jit(rotation.dynamic_turns, static_argnums=1)(jnp.asarray(bases), dim)
        hi, lo = (np.asarray(x, np.float64) for x in words)
        exact = bases[:, None].astype(np.float64) ** (-2 * np.arange(dim // 2) / dim)
        assert np.abs((hi * 2**32 + lo) / 2**64 * 2 * np.pi - exact).max() < 1e-7
        assert (hi[:, 0] == np.floor(2**31 / np.pi)).all()  # f_0 = 1 exactly


# ---- positions


def test_row_spans_are_those_of_64_bit_integers():
    rng = np.random.default_rng(5)
    edge = np.array([INT32_MIN, INT32_MIN + 3, INT32_MIN + 4096, -9, -1, 0, 1, 7, 4096, INT32_MAX - 4096, INT32_MAX])
    count = 20_000
    offset, left, right = (rng.choice(edge, count) + 0 for _ in range(3))
    left, right = (np.where(x < 0, -1, x) for x in (left, right))
    index, keys = rng.integers(0, 9, count), rng.integers(0, 12, count)
    s = np.arange(12)
    for causal in (False, True):
        spans = jax.jit(
            lambda o, i, n, a, b, causal=causal: xla.sees(xla.rows(o, i, 0, n, causal, (a, b)), jnp.arange(12)[None])
        )
        got = spans(*(x.astype(np.int32)[:, None] for x in (offset, index, keys, left, right)))[:, 0]
        distance = (offset + index)[:, None] - s
        want = s < keys[:, None]
        want &= (left[:, None] == -1) | (distance <= left[:, None])
        want &= (right[:, None] == -1) | (distance >= -right[:, None])
        if causal:
            want &= distance >= 0
        assert np.array_equal(got, want)


def test_distances_beyond_32_bits():
    p, s = np.array([INT32_MIN, -5, 0, 2**30, INT32_MAX], np.int64), np.array([0, 3, 4000])
    got = xla.distances(jnp.asarray(p, jnp.int32), jnp.asarray(s, jnp.int32))
    want = np.abs(p[:, None] - s)
    np.testing.assert_allclose(got, want, rtol=2.0**-22)
    assert np.array_equal(got[1:3], want[1:3])


# ---- values that some rows see


def test_infinite_values_reach_only_the_rows_that_see_them():
    rng = np.random.default_rng(6)
    q, k, v = (rng.standard_normal((1, 8, 2, 16)).astype(np.float32) for _ in range(3))
    run = functools.partial(ta.attention, is_causal=True, implementation="xla")
    clean = run(q, k, v)
    v[0, 3, 0, :4] = np.inf, -np.inf, np.nan, np.inf
    v[0, 5, 0, 3] = -np.inf
    got = np.asarray(run(q, k, v))
    np.testing.assert_allclose(got[0, :3], clean[0, :3], rtol=1e-6)
    np.testing.assert_allclose(got[0, :, 1], clean[0, :, 1], rtol=1e-6)
    np.testing.assert_allclose(got[0, :, 0, 4:], clean[0, :, 0, 4:], rtol=1e-6)
    assert np.isposinf(got[0, 3:, 0, 0]).all() and np.isneginf(got[0, 3:, 0, 1]).all()
    assert np.isnan(got[0, 3:, 0, 2]).all()
    assert np.isposinf(got[0, 3:5, 0, 3]).all() and np.isnan(got[0, 5:, 0, 3]).all()


# ---- pages


def paged_call(batch, columns, dtype="float32", kv_dtype=None, page_size=8):
    rng = np.random.default_rng(7)
    cache = ta.PagedKVCache.create(
        batch * columns, 2, 16, page_size=page_size, dtype=kv_dtype or dtype, param_dtype=dtype
    )
    fill = {name: jnp.asarray(rng.standard_normal(x.shape), x.dtype) for name, x in cache.arrays.items()}
    cache = ta.PagedKVCache(fill["key_cache"], fill["value_cache"], None, None, cache.dtype, 16, False)
    table = jnp.asarray(rng.permutation(batch * columns).reshape(batch, columns), jnp.int32)
    lens = jnp.asarray(rng.integers(0, columns * page_size + 1, batch), jnp.int32)
    query = jnp.asarray(rng.standard_normal((batch, 3, 4, 16)), dtype)
    return query, cache, table, lens


@pytest.mark.parametrize("group", [1, 2, 3, 7])
def test_groups_of_sequences_do_not_change_the_result(group, monkeypatch):
    """7 sequences in groups that divide them and that do not."""
    query, cache, table, lens = paged_call(7, 4)
    run = lambda: jax.jit(  # noqa: E731
        lambda *args: ta.paged_decode(*args, local_window_size=(9, 0), implementation="xla")
    )(query, cache, table, lens)
    monkeypatch.setattr(xla, "GROUP_BYTES", 1 << 40)
    want = run()
    monkeypatch.setattr(xla, "GROUP_BYTES", 4 * group * 4 * 8 * 2 * (16 + 16))
    np.testing.assert_allclose(run(), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hint", [1, 2, 16, 1000])
def test_a_wrong_hint_changes_nothing(hint):
    query, cache, table, lens = paged_call(5, 4)
    offsets = jnp.array([0, 1, 8, 8, 12, 15], jnp.int32)
    run = functools.partial(
        ta.paged_attention, query.reshape(15, 4, 16), cache, table, lens, offsets, implementation="xla"
    )
    np.testing.assert_allclose(run(max_q_len=hint), run(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize("uniform", [True, False], ids=["uniform", "packed"])
def test_reading_pages_converts_no_pool(dtype, uniform):
    """The CPU backend gathers bfloat16 and fp8 as float32: of the pages that are read, not of the pool."""
    query_dtype = "bfloat16" if dtype == "float8_e4m3fn" else dtype
    cache = ta.PagedKVCache.create(2000, 2, 16, page_size=8, dtype=dtype, param_dtype=query_dtype)
    query, table = jnp.zeros((3, 4, 16), query_dtype), jnp.zeros((3, 2), jnp.int32)
    lens, offsets = jnp.ones(3, jnp.int32), jnp.arange(4, dtype=jnp.int32)

    def call(query, cache):
        if uniform:
            return ta.paged_decode(query, cache, table, lens, implementation="xla")
        return ta.paged_attention(query, cache, table, lens, offsets, implementation="xla")

    memory = jax.jit(call).lower(query, cache).compile().memory_analysis()
    assert memory.temp_size_in_bytes < cache.key.nbytes / 2


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "bfloat16", "float8_e4m3fn"])
def test_append_updates_the_pool_in_place(dtype):
    """bfloat16 and fp8 cost passes over the pool's bits on CPU (no scatter there), but no float32 copy of it."""
    query_dtype = "bfloat16" if dtype in ("bfloat16", "float8_e4m3fn") else "float32"
    query_dtype = "float16" if dtype == "float16" else query_dtype
    cache = ta.PagedKVCache.create(500, 2, 16, page_size=8, num_layers=2, dtype=dtype, param_dtype=query_dtype)
    key, table = jnp.ones((3, 2, 16), query_dtype).at[..., 0].set(3), jnp.arange(6, dtype=jnp.int32).reshape(3, 2)
    lens, offsets = jnp.ones(3, jnp.int32), jnp.arange(4, dtype=jnp.int32)

    def call(cache):
        def layer(cache, index):
            return ta.append_kv(cache, key, key, table, lens, offsets, layer=index, implementation="xla"), None

        return jax.lax.scan(layer, cache, jnp.arange(2, dtype=jnp.int32))[0]

    compiled = jax.jit(call, donate_argnums=0).lower(cache).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(cache))
    pool = cache.key.nbytes
    assert memory.temp_size_in_bytes < (2.2 * pool if dtype in ("bfloat16", "float8_e4m3fn") else pool / 4)
    shape = ",".join(map(str, cache.key.shape))
    wide = [line for line in compiled.as_text().splitlines() if re.search(rf"= f32\[{shape}\]", line)]
    assert dtype == "float32" or not wide
    written = compiled(cache)
    assert float(jnp.abs(written.key[:, 0, :, 0].astype(jnp.float32)).sum()) > 0

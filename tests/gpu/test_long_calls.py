"""Hopper prefill of calls of many tiles, larger than the common cases: blocks that go from tile to tile.

A window that hides nothing changes no bit; the sm80 family gives the values.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_turboattn as ta

NO_WINDOW = np.array([-1, -1], np.int32)
HOPPER = jax.default_backend() == "gpu" and getattr(jax.devices()[0], "compute_capability", "") == "9.0"
pytestmark = pytest.mark.skipif(not HOPPER, reason="compute capability 9.0")


def normal(seed, *shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def check(call):
    """Bits of `call(local_window_size=, implementation=)` with a window and without; the values of the sm80 family."""
    out, lse = call(local_window_size=None, implementation="cuda")
    assert np.isfinite(np.asarray(out, np.float32)).all()
    for result, expected in zip((out, lse), call(local_window_size=NO_WINDOW, implementation="cuda"), strict=True):
        np.testing.assert_array_equal(result, expected)
    try:
        expected, expected_lse = call(local_window_size=None, implementation="cuda:sm80")
    except NotImplementedError:  # D = 192
        return
    check_values(out, lse, expected, expected_lse)


def check_values(out, lse, expected, expected_lse):
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=2e-3)
    out, expected = (np.asarray(x, np.float32) for x in (out, expected))
    np.testing.assert_allclose(out, expected, rtol=0, atol=0.02 * np.abs(expected).max())


DENSE = dict(
    causal=dict(is_causal=True),
    full=dict(),
    odd=dict(T=1400, heads=(2, 2), is_causal=True),  # 11 tiles: the one in the middle makes no pair
    odd_group=dict(heads=(3, 1), is_causal=True),  # consumers load the query's rows
    fp16=dict(dtype=jnp.float16, is_causal=True),
    d64=dict(D=64, T=2100, is_causal=True),
    d192=dict(D=192, Dv=128, is_causal=True),
    d256=dict(D=256, is_causal=True),
    history=dict(T=1280, S=3000, is_causal=True, query_offset=1720),
    ahead=dict(T=1280, S=3000, is_causal=True, query_offset=-300),  # rows of whole tiles see no key
    lens=dict(B=3, is_causal=True, query_seq_lengths=[1408, 0, 1000], key_value_seq_lengths=[1300, 1408, 7]),
    modified=dict(is_causal=True, logits_soft_cap=20.0, alibi=True),
    segments=dict(B=2, segments=True),
    # More tiles than the card has SMs.
    stay=dict(heads=(16, 16)),
    stay_in_pairs=dict(B=8, heads=(16, 16), is_causal=True),  # the last heads' tiles one by one
    stay_odd=dict(B=5, T=1200, heads=(7, 7), is_causal=True),  # heads of 5 items: no whole round of 132
    stay_d64=dict(B=2, D=64, T=2100, heads=(16, 16)),
)


@pytest.mark.parametrize("name", DENSE)
def test_dense(name):
    case = dict(B=1, T=1408, heads=(4, 2), D=128, dtype=jnp.bfloat16) | DENSE[name]
    B, T, (H, K), D, dtype = (case.pop(n) for n in ("B", "T", "heads", "D", "dtype"))
    S, Dv = case.pop("S", T), case.pop("Dv", D)
    query, key = normal(0, B, T, H, D, dtype=dtype), normal(1, B, S, K, D, dtype=dtype)
    value = normal(2, B, S, K, Dv, dtype=dtype)
    for lengths in ("query_seq_lengths", "key_value_seq_lengths"):
        if lengths in case:
            case[lengths] = jnp.array(case[lengths], jnp.int32)
    if "key_value_seq_lengths" in case:  # what lies behind is never looked at
        behind = jnp.arange(S)[None, :] >= case["key_value_seq_lengths"][:, None]
        key, value = (jnp.where(behind[..., None, None], jnp.nan, x) for x in (key, value))
    if case.pop("alibi", False):
        case["alibi_slopes"] = jnp.linspace(0.01, 0.2, H)
    if case.pop("segments", False):
        ids = jnp.broadcast_to(jnp.arange(T) // 300, (B, T)).astype(jnp.int32)
        case["segment_ids"] = (ids, ids)
    check(lambda **how: ta.attention(query, key, value, return_residual=True, **case, **how))


def test_dense_values_that_are_not_finite():
    """A causal row sees NaN of the keys before it alone."""
    T, first = 1408, 1000
    query, key, value = normal(0, 1, T, 2, 128), normal(1, 1, T, 2, 128), normal(2, 1, T, 2, 128)
    poisoned = value.at[:, first].set(jnp.nan)
    for implementation in ("cuda", "cuda:sm80"):
        out = ta.attention(query, key, poisoned, is_causal=True, implementation=implementation)
        clean = ta.attention(query, key, value, is_causal=True, implementation=implementation)
        np.testing.assert_array_equal(out[:, :first], clean[:, :first])
        assert np.isnan(np.asarray(out[:, first:], np.float32)).all()


def test_packed():
    lens = np.array([1500, 0, 1300, 700, 2000])
    offsets = jnp.array(np.concatenate([[0], np.cumsum(lens)]), jnp.int32)
    tokens = int(lens.sum()) + 9
    query, key, value = (normal(i, tokens, 4, 128) for i in range(3))  # 172 full tiles: blocks that stay
    check(
        lambda **how: ta.ragged_attention(
            query, key, value, offsets, offsets, is_causal=True, return_residual=True, **how
        )
    )


@pytest.mark.parametrize("prefix", [False, True])
@pytest.mark.parametrize("page_size", [8, 16, 64, 256])
def test_pages(page_size, prefix):
    """Pages of NaN at unmapped places, lengths in the middle of pages, one page id that does not exist."""
    lens, new = np.array([2300, 1290, 3000]), np.array([1290, 1290, 1500])
    columns, heads, kv_heads = 3072 // page_size, 16, 8
    rng = np.random.default_rng(0)
    pages = 3 * columns + 8
    ids = rng.permutation(pages - 8)
    table = np.full((3, columns), 2**31 - 1, np.int32)
    for b, n in enumerate(-(-lens // page_size)):
        table[b, :n] = ids[b * columns : b * columns + n]
    used = np.zeros(pages, bool)
    used[table[table < pages]] = True
    prefix_pages = np.arange(pages - 8, pages, dtype=np.int32)
    used[prefix_pages] = True
    table[1, 3] = -7
    cache = ta.PagedKVCache.create(pages, kv_heads, 128, page_size=page_size)
    pool = [jnp.where(used[:, None, None, None], normal(i, *cache.key.shape), jnp.nan) for i in (1, 2)]
    cache = dataclasses.replace(cache, key=pool[0], value=pool[1])
    query = normal(3, int(new.sum()), heads, 128)
    offsets = jnp.array(np.concatenate([[0], np.cumsum(new)]), jnp.int32)
    shared = (jnp.array(prefix_pages), jnp.int32(8 * page_size - 3)) if prefix else None
    check(
        lambda **how: ta.paged_attention(
            query,
            cache,
            jnp.array(table),
            jnp.array(lens, jnp.int32),
            offsets,
            max_q_len=1500,
            shared_prefix=shared,
            return_residual=True,
            **how,
        )
    )


# Sequences (new tokens, all tokens), what the call has besides, and whether tiles are longer than an SM's share: cut.
PIECES = dict(
    one=([(64, 20000), (500, 500), (700, 700)], {}, True),
    last=([(500, 500), (0, 0), (700, 700), (64, 20000)], {}, True),
    lengths=([(64, 20000), (100, 6000), (30, 1300), (300, 300)], {}, True),
    beside_decode=([(1, 3000)] * 30 + [(40, 9000), (500, 500)], {}, True),
    many=([(8, 500 + 150 * b) for b in range(40)], dict(heads=(8, 1)), True),  # more sequences than lanes
    whole=([(300, 2300), (40, 40), (700, 900), (9, 3000), (150, 1200)], dict(heads=(32, 8)), False),
    short=([(300, 300), (40, 40), (700, 900)], {}, False),
    stay=([(64, 20000), (2300, 2300), (2300, 2300)], dict(heads=(16, 4)), True),  # tiles enough for blocks that stay
    uniform=([(64, 20000), (64, 64), (64, 700)], dict(uniform=True), True),
    window=([(64, 20000), (500, 5000), (700, 700)], dict(local_window_size=(3000, 0)), True),
    prefix=([(64, 20000), (500, 500), (64, 64)], dict(prefix=3000), True),
    sinks=([(64, 20000), (500, 500)], dict(sinks=True), True),
    full=([(64, 20000), (500, 500)], dict(is_causal=False), True),
    int8=([(64, 20000), (500, 500)], dict(kv_dtype="int8"), True),
    d64=([(64, 20000), (500, 500)], dict(D=64), True),
    d256=([(64, 20000), (500, 500)], dict(D=256), True),
)


@pytest.mark.parametrize("name", PIECES)
def test_long_tiles_among_others(name):
    sequences, case, is_cut = PIECES[name]
    case = dict(heads=(8, 2), D=128, kv_dtype="bfloat16") | case
    (H, K), D = case.pop("heads"), case.pop("D")
    new, lens = np.array(sequences).T
    prefix, uniform, page = case.pop("prefix", 0), case.pop("uniform", False), 64
    counts = -(-(lens - prefix).clip(0) // page)
    pages, shared = int(counts.sum()) + 2, -(-prefix // page)
    ids, table = np.random.default_rng(0).permutation(pages + shared), np.full((len(lens), 32768 // page), -1, np.int32)
    for b, first in enumerate(np.cumsum(counts) - counts):
        table[b, : counts[b]] = ids[first : first + counts[b]]
    cache = ta.PagedKVCache.create(pages + shared, K, D, page_size=page, dtype=case.pop("kv_dtype"))
    if prefix:
        lens = (lens - prefix).clip(new)
        case["shared_prefix"] = (jnp.array(ids[pages:], jnp.int32), jnp.int32(prefix))
    if cache.key.dtype == jnp.bfloat16:
        cache = dataclasses.replace(cache, key=normal(1, *cache.key.shape), value=normal(2, *cache.value.shape))
    else:
        rows = pages * page
        everything = jnp.arange(pages, dtype=jnp.int32)[None]
        cache = ta.append_kv(
            cache,
            normal(1, rows, K, D),
            normal(2, rows, K, D),
            everything,
            jnp.array([rows], jnp.int32),
            jnp.array([0, rows], jnp.int32),
        )
    if case.pop("sinks", False):
        case["sinks"] = jnp.linspace(-1.0, 1.0, H)
    tokens = int(new.sum()) + (0 if uniform else 5)
    query = normal(3, tokens, H, D)
    offsets = jnp.array(np.concatenate([[0], np.cumsum(new)]), jnp.int32)

    def call(implementation, **how):
        how = dict(return_residual=True, implementation=implementation) | case | how
        if not uniform:
            return ta.paged_attention(query, cache, jnp.array(table), jnp.array(lens, jnp.int32), offsets, **how)
        rows = query.reshape(len(new), -1, H, D)
        out, lse = ta.paged_decode(rows, cache, jnp.array(table), jnp.array(lens, jnp.int32), **how)
        return out.reshape(query.shape), lse.reshape(query.shape[:2])

    out, lse = call("cuda")
    for result, expected in zip((out, lse), call("cuda"), strict=True):
        np.testing.assert_array_equal(result, expected)
    owned = slice(0, int(new.sum()))
    check_values(out, lse[owned], (expected := call("cuda:sm80"))[0], expected[1][owned])
    whole, _ = call("cuda", batch_invariant=True)
    assert bool((out[owned] != whole[owned]).any()) == is_cut


@pytest.mark.parametrize("tokens", [4000, 300])  # of 300 tokens, tiles are cut
def test_garbage(tokens):
    """Any int32 in page ids, lengths, layers: no hang, the same bits twice, and sm80's values.

    Ranges in order, past the end too.
    """
    rng = np.random.default_rng(1)
    pages, page_size, heads, batch = 90, 16, 8, 3
    cache = ta.PagedKVCache.create(pages, heads, 128, page_size=page_size, num_layers=2)
    cache = dataclasses.replace(cache, key=normal(1, *cache.key.shape), value=normal(2, *cache.value.shape))
    query = normal(3, tokens, heads, 128)

    @functools.partial(jax.jit, static_argnames=("windowed", "implementation"))
    def call(table, lens, offsets, layer, windowed, implementation="cuda"):
        window = NO_WINDOW if windowed else None
        how = dict(max_q_len=tokens, local_window_size=window, return_residual=True, implementation=implementation)
        return ta.paged_attention(query, cache, table, lens, offsets, layer=layer, **how)

    for _ in range(40):
        garbage = lambda *shape: np.asarray(rng.integers(-(2**31), 2**31, shape), np.int32)  # noqa: E731
        table = np.where(rng.random((batch, 128)) < 0.9, rng.integers(0, pages, (batch, 128)), garbage(batch, 128))
        lens = np.where(rng.random(batch) < 0.8, rng.integers(0, 2048, batch), garbage(batch))
        offsets = np.sort(np.where(rng.random(batch + 1) < 0.8, rng.integers(0, tokens, batch + 1), garbage(batch + 1)))
        layer = np.where(rng.random() < 0.9, rng.integers(0, 2), garbage())
        inputs = [np.asarray(x, np.int32) for x in (table, lens, offsets, layer)]
        out, lse = call(*inputs, windowed=False)
        for result, expected in zip((out, lse), call(*inputs, windowed=True), strict=True):
            np.testing.assert_array_equal(result, expected)
        check_values(out, lse, *call(*inputs, windowed=False, implementation="cuda:sm80"))
    for _ in range(20):  # ranges that overlap: whoever is last writes
        inputs = [garbage(batch, 128), garbage(batch), garbage(batch + 1), np.int32(1)]
        jax.block_until_ready(call(*inputs, windowed=False))

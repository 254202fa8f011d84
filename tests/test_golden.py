"""The golden itself, against values worked out by hand and against properties that the formula must have."""

from __future__ import annotations

import ast
import dataclasses
import math
import pathlib
import types

import ml_dtypes
import numpy as np
import pytest

from jax_turboattn.testing import codecs, golden

BF16 = np.dtype(ml_dtypes.bfloat16)
TESTING = pathlib.Path(golden.__file__).parent
RNG = np.random.default_rng(7)


def normal(*shape, dtype=np.float32):
    return RNG.standard_normal(shape).astype(dtype)


def one_head(values):
    """[B=1, n, 1 head, 1 column] from n numbers."""
    return np.array(values, np.float32).reshape(1, -1, 1, 1)


def rope(**fields):
    defaults = dict(kind="default", dim=8, base=10000.0, pairing="half", offset=0, factor=1.0)
    defaults |= dict(
        original_max_position=None, low_freq_factor=1.0, high_freq_factor=4.0, beta_fast=32.0, beta_slow=1.0
    )
    defaults |= dict(truncate=True, attention_factor=None, short_factor=None, long_factor=None, long=False)
    return types.SimpleNamespace(**(defaults | dict(sections=None, sections_interleaved=False) | fields))


def make_cache(pages=4, heads=2, page_size=8, dim=16, value_dim=None, kv_dtype="float32", dtype=np.float32, layers=()):
    value_dim = dim if value_dim is None else value_dim
    bits = codecs.BITS.get(kv_dtype)

    def data(columns):
        shape = (*layers, pages, heads, page_size, columns // 2 if bits == 4 else columns)
        return np.zeros(shape, np.uint8 if bits else codecs.FP8 if kv_dtype == "float8_e4m3fn" else dtype)

    def params():
        if kv_dtype == "float8_e4m3fn":
            return np.ones((*layers, heads), np.float32)
        return np.zeros((*layers, pages, heads, page_size, 2), dtype) if bits else None

    return golden.Cache(data(dim), data(value_dim), params(), params(), kv_dtype, value_dim)


@pytest.mark.parametrize("module", ["golden", "codecs", "tolerances", "poison"])
def test_imports_no_jax(module):
    tree = ast.parse((TESTING / f"{module}.py").read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not [name for name in names if name.split(".")[0] == "jax"]


# ---- attention by hand


def test_two_keys():
    r = golden.attention(one_head([1]), one_head([0, math.log(3)]), one_head([10, 20]), scale=1.0)
    np.testing.assert_allclose(r.out.ravel(), [17.5], rtol=1e-7)  # weights 1/4 and 3/4
    np.testing.assert_allclose(r.lse.ravel(), [math.log(4)], rtol=1e-7)
    assert r.keys.tolist() == [[2]]


def test_default_scale_is_of_the_head_dim():
    q = np.full((1, 1, 1, 4), 1, np.float32)
    k = np.stack([np.zeros(4), np.full(4, 1)]).astype(np.float32).reshape(1, 2, 1, 4)
    r = golden.attention(q, k, k)
    np.testing.assert_allclose(r.lse.ravel(), [math.log(1 + math.exp(4 / 2))], rtol=1e-7)


def test_soft_cap_then_alibi_then_bias():
    q, k, v = one_head([2.0]), one_head([1.0, 3.0]), one_head([0.0, 1.0])
    bias = np.array([0.25, -0.5], np.float32).reshape(1, 1, 1, 2)
    slopes = np.array([0.5], np.float32)
    r = golden.attention(q, k, v, bias, scale=1.0, logits_soft_cap=4.0, alibi_slopes=slopes, query_offset=1)
    x = [4 * math.tanh(2 / 4) - 0.5 * 1 + 0.25, 4 * math.tanh(6 / 4) - 0 - 0.5]
    np.testing.assert_allclose(r.out.ravel(), [1 / (1 + math.exp(x[0] - x[1]))], rtol=1e-7)


def test_sink_only_in_the_denominator():
    r = golden.attention(one_head([0]), one_head([0]), one_head([8]), sinks=np.array([math.log(3)], np.float32))
    np.testing.assert_allclose(r.out.ravel(), [2], rtol=1e-6)
    np.testing.assert_allclose(r.lse.ravel(), [math.log(4)], rtol=1e-6)


@pytest.mark.parametrize("sink", [-1e30, 1e4, 3e38])
def test_extreme_sinks_stay_finite(sink):
    r = golden.attention(one_head([1]), one_head([1]), one_head([5]), sinks=np.array([sink], np.float32))
    np.testing.assert_allclose(r.out.ravel(), [5.0 if sink < 0 else 0.0])
    np.testing.assert_allclose(r.lse.ravel(), [max(1.0, np.float32(sink))])


@pytest.mark.parametrize("sinks, lse", [(None, -np.inf), (np.array([0.5], np.float32), 0.5)])
def test_row_that_sees_nothing(sinks, lse):
    r = golden.attention(one_head([1]), one_head([1]), one_head([1]), key_value_seq_lengths=[0], sinks=sinks)
    assert r.out.ravel() == [0] and r.lse.ravel() == [lse] and r.keys.ravel() == [0]


def test_dense_rows_past_the_query_length_have_no_sink():
    q = one_head([1, 1])
    r = golden.attention(q, q, q, query_seq_lengths=[1], sinks=np.ones(1, np.float32))
    assert r.out[0, 1] == 0 and r.lse[0, 1] == -np.inf


@pytest.mark.parametrize(
    "window, causal, seen",
    [
        (None, False, [5, 5, 5, 5, 5]),
        (None, True, [1, 2, 3, 4, 5]),
        ((1, 0), False, [1, 2, 2, 2, 2]),
        ((1, 2), False, [3, 4, 4, 3, 2]),
        ((1, 2), True, [1, 2, 2, 2, 2]),
        (1, False, [2, 3, 3, 3, 2]),
        ((-1, 0), False, [1, 2, 3, 4, 5]),
        ((None, 1), False, [2, 3, 4, 5, 5]),
        ((0, 0), True, [1, 1, 1, 1, 1]),
    ],
)
def test_windows(window, causal, seen):
    x = one_head(range(5))
    assert golden.attention(x, x, x, local_window_size=window, is_causal=causal).keys[0].tolist() == seen
    offsets = np.array([0, 5])
    packed = golden.ragged_attention(x[0], x[0], x[0], offsets, offsets, local_window_size=window, is_causal=causal)
    assert packed.keys.tolist() == seen


def test_bottom_right_alignment_and_rows_of_no_sequence():
    q, kv = normal(6, 1, 4), normal(9, 1, 4)
    r = golden.ragged_attention(q, kv, kv, np.array([1, 3, 5]), np.array([0, 7, 8]))
    assert r.keys.tolist() == [0, 6, 7, 0, 1, 0]  # 2 queries over 7 keys; 2 over 1: the first sees nothing
    assert np.isneginf(r.lse[[0, 3, 5]]).all() and not r.out[[0, 3, 5]].any()


def test_wild_offsets_are_clamped():
    q, kv = normal(4, 1, 4), normal(5, 1, 4)
    r = golden.ragged_attention(q, kv, kv, np.array([-3, 2, 2**31 - 1]), np.array([-9, 3, 99]), is_causal=False)
    assert r.keys.tolist() == [3, 3, 2, 2]
    r = golden.ragged_attention(q, kv, kv, np.array([3, 1, 4]), np.array([0, 3, 5]), is_causal=False)
    assert r.keys.tolist() == [0, 2, 2, 2]  # [3, 3) is empty, then [1, 4)


def test_segments_mask_and_groups():
    q, k, v = normal(2, 3, 4, 8), normal(2, 3, 2, 8), normal(2, 3, 2, 6)
    ids = np.array([[0, 0, 1], [2, 1, 2]])
    r = golden.attention(q, k, v, segment_ids=ids)
    assert r.keys.tolist() == [[2, 2, 1], [2, 1, 2]] and r.out.shape == (2, 3, 4, 6)
    np.testing.assert_allclose(r.out[0, 2, :, :], v[0, 2, [0, 0, 1, 1]])  # query head h reads kv head h // 2
    same = golden.attention(q, k, v, mask=(ids[:, :, None] == ids[:, None, :])[:, None])
    np.testing.assert_allclose(r.out, same.out)
    np.testing.assert_allclose(r.lse, same.lse)
    mask = np.ones((1, 4, 3, 3), bool)
    mask[:, 1, :, 1:] = False  # head 1 sees only key 0
    v[:, 1, 0] = np.nan  # of kv head 0: reaches head 0, not head 1
    r = golden.attention(q, k, v, mask=mask)
    np.testing.assert_allclose(r.out[:, :, 1], np.broadcast_to(v[:, :1, 0], (2, 3, 6)))
    assert np.isnan(r.out[:, :, 0]).all()


def test_baseline_is_near():
    q, k, v = (normal(1, 9, 4, 32, dtype=BF16) for _ in range(3))
    exact, base = golden.attention(q, k, v), golden.attention(q, k, v, baseline=True)
    error = np.abs(exact.out - base.out).max()
    assert 1e-5 < error < 2e-2
    np.testing.assert_allclose(exact.lse, base.lse, atol=1e-5)


# ---- codecs


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("kv_dtype, top", [("int8", 255), ("int4", 15)])
def test_codec_by_hand(dtype, kv_dtype, top):
    x = np.array([[-1, top - 1, 3, 0.5, 1.5, 0, 2, 2]], dtype)  # scale 1, zero -1; halves round to even
    data, params = codecs.encode_int(x, kv_dtype)
    codes = codecs.unpack_int4(data) if kv_dtype == "int4" else data
    assert params.dtype == dtype and params.astype(float).tolist() == [[1, -1]]
    assert codes.tolist() == [[0, top, 4, 2, 2, 1, 3, 3]]
    assert codecs.decode_int(data, params, kv_dtype).astype(float).tolist() == [[-1, top - 1, 3, 1, 1, 0, 2, 2]]


def test_int4_nibble_order():
    assert codecs.pack_int4(np.arange(8, dtype=np.uint8)).view("<u4") == [0x75316420]
    codes = RNG.integers(0, 16, (3, 5, 16)).astype(np.uint8)
    assert (codecs.unpack_int4(codecs.pack_int4(codes)) == codes).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("kv_dtype", ["int8", "int4"])
def test_codec_special_rows(dtype, kv_dtype):
    limit = float(ml_dtypes.finfo(dtype).max)
    x = normal(6, 16, dtype=dtype)
    x[1], x[2, 3], x[3, 4] = 3.0, np.inf, np.nan
    x[4] = np.where(np.arange(16) % 2, 65504.0, -65504.0)
    x[5] = 0
    y = codecs.decode_int(*codecs.encode_int(x, kv_dtype), kv_dtype).astype(float)
    assert np.isnan(y[2:4]).all() and np.isfinite(y[[0, 1, 4, 5]]).all() and np.abs(y[4]).max() <= limit
    assert (y[1] == 3).all() and (y[5] == 0).all()


def test_small_scales():
    tiny = np.zeros((1, 8), np.float32)
    tiny[0, 0] = 2.0**-119  # scale about 2^-127
    for dtype in (np.float32, BF16):
        data, params = codecs.encode_int(tiny.astype(dtype), "int8")
        assert params.astype(float).tolist() == [[0, 0]] and not data.any()
    x = np.zeros((1, 8), np.float16)
    x[0, 0] = 255 * 2.0**-23  # scale 2^-23, subnormal in float16
    data, params = codecs.encode_int(x, "int8")
    assert params.astype(float).tolist() == [[2.0**-23, 0]] and data[0].tolist() == [255] + [0] * 7


def test_fp8():
    x = np.array([1, -2, 1000, -1e9, np.inf, -np.inf, np.nan, 0.0], np.float32)
    got = codecs.decode_fp8(codecs.encode_fp8(x, np.float32(0.5)), np.float32(0.5), np.float32)
    np.testing.assert_array_equal(got, [1, -2, 224, -224, np.nan, np.nan, np.nan, 0])
    assert not codecs.encode_fp8(x, np.float32(0)).astype(np.float32).any()


# ---- RoPE


def test_default_frequencies_and_pairings():
    np.testing.assert_allclose(golden.rope_inv_freq(rope()), [1, 0.1, 0.01, 0.001])
    x = np.zeros((1, 12), np.float32)
    x[0, 2], x[0, 6], x[0, 3] = 1, 2, 3
    angle = 5.0
    half = golden.rotate(x, rope(offset=2), 5)
    np.testing.assert_allclose(half[0, 2], math.cos(angle) - 2 * math.sin(angle))
    np.testing.assert_allclose(half[0, 6], 2 * math.cos(angle) + math.sin(angle))
    inter = golden.rotate(x, rope(offset=2, pairing="interleaved"), 5)
    np.testing.assert_allclose(inter[0, 3], 3 * math.cos(angle) + math.sin(angle))
    assert inter[0, :2].tolist() == [0, 0] and inter[0, 10:].tolist() == [0, 0]


def test_scaled_frequencies():
    f = golden.rope_inv_freq(rope())
    np.testing.assert_allclose(golden.rope_inv_freq(rope(kind="linear", factor=4.0)), f / 4)
    np.testing.assert_allclose(golden.rope_inv_freq(rope(kind="dynamic"), 16.0), 16.0 ** (-np.arange(4) / 4))
    long = rope(
        kind="longrope", short_factor=(1, 2, 3, 4), long_factor=(5, 6, 7, 8), factor=4.0, original_max_position=16
    )
    np.testing.assert_allclose(golden.rope_inv_freq(long), f / [1, 2, 3, 4])
    long.long = True
    np.testing.assert_allclose(golden.rope_inv_freq(long), f / [5, 6, 7, 8])
    np.testing.assert_allclose(golden.rope_attention_factor(long), math.sqrt(1.5))
    llama = rope(
        kind="llama3", factor=8.0, original_max_position=256
    )  # wavelengths in context: 40.7, 4.07, 0.407, 0.04
    np.testing.assert_allclose(golden.rope_inv_freq(llama), [f[0], f[1], f[2] / 8, f[3] / 8])


def test_yarn():
    # correction(r) = 8 ln(4096 / (2 pi r)) / (2 ln 10000): 1.3090 at r = 32 and 2.8142 at r = 1
    yarn = rope(kind="yarn", factor=4.0, original_max_position=4096)
    f = golden.rope_inv_freq(rope())
    ramp = np.array([0, 0, 0.5, 1])  # low 1, high 3
    np.testing.assert_allclose(golden.rope_inv_freq(yarn), f * (1 - ramp * 0.75))
    yarn.truncate = False
    ramp = np.clip((np.arange(4) - 1.30903) / (2.81417 - 1.30903), 0, 1)
    np.testing.assert_allclose(golden.rope_inv_freq(yarn), f * (1 - ramp * 0.75), rtol=1e-4)
    np.testing.assert_allclose(golden.rope_attention_factor(yarn), 0.1 * math.log(4) + 1)
    yarn.attention_factor = 1.25
    assert golden.rope_attention_factor(yarn) == 1.25


def test_multimodal_axes():
    assert golden.rope_axes(rope(dim=16, sections=(2, 3, 3))).tolist() == [0, 0, 1, 1, 1, 2, 2, 2]
    interleaved = rope(dim=16, sections=(4, 2, 2), sections_interleaved=True)
    assert golden.rope_axes(interleaved).tolist() == [0, 1, 2, 0, 1, 2, 0, 0]


# ---- paged


def packed_case(lens=((3, 5), (0, 9), (4, 20)), dim=16, value_dim=16, heads=(4, 2), dtype=np.float32):
    T, S = sum(q for q, _ in lens), sum(s for _, s in lens)
    q_offsets = np.cumsum([0] + [q for q, _ in lens])
    kv_offsets = np.cumsum([0] + [s for _, s in lens])
    q, k, v = (
        normal(T, heads[0], dim, dtype=dtype),
        normal(S, heads[1], dim, dtype=dtype),
        normal(S, heads[1], value_dim, dtype=dtype),
    )
    return q, k, v, q_offsets, kv_offsets


def fill(cache, k, v, kv_offsets, pages_each=3, **kwargs):
    """Appends whole sequences to an empty cache with disjoint pages; returns (cache, page_table, kv_lens)."""
    B = len(kv_offsets) - 1
    pages = RNG.permutation(cache.key.shape[-4])[: B * pages_each].reshape(B, pages_each)
    lens = np.diff(kv_offsets)
    return golden.append_kv(cache, k, v, pages, lens, kv_offsets, **kwargs), pages, lens


@pytest.mark.parametrize("layers, layer", [((), None), ((2,), 1)])
def test_paged_equals_ragged(layers, layer):
    q, k, v, q_offsets, kv_offsets = packed_case(value_dim=8)
    cache, pages, lens = fill(make_cache(12, value_dim=8, layers=layers), k, v, kv_offsets, layer=layer)
    for options in (dict(), dict(local_window_size=(3, 1), is_causal=False), dict(alibi_slopes=np.ones(4, np.float32))):
        paged = golden.paged_attention(q, cache, pages, lens, q_offsets, layer=layer, **options)
        ragged = golden.ragged_attention(q, k, v, q_offsets, kv_offsets, **options)
        np.testing.assert_array_equal(paged.out, ragged.out)
        np.testing.assert_array_equal(paged.lse, ragged.lse)
    key, value = golden.gather_kv(cache, pages, lens, layer=layer)
    for b in range(3):
        np.testing.assert_array_equal(key[b, : lens[b]], k[kv_offsets[b] : kv_offsets[b + 1]])
        np.testing.assert_array_equal(value[b, : lens[b]], v[kv_offsets[b] : kv_offsets[b + 1]])
        assert not key[b, lens[b] :].any()


def test_unmapped_pages_and_layers_are_not_seen():
    q, k, v, q_offsets, kv_offsets = packed_case()
    cache, pages, lens = fill(make_cache(12), k, v, kv_offsets)
    pages[2, 1] = 12
    r = golden.paged_attention(q, cache, pages, lens, q_offsets, is_causal=False)
    assert r.keys.tolist() == [5, 5, 5, 12, 12, 12, 12]
    stacked = dataclasses.replace(cache, key=cache.key[None], value=cache.value[None])
    assert not golden.paged_attention(q, stacked, pages, lens, q_offsets, layer=1).keys.any()
    written = golden.append_kv(cache, k, v, np.full_like(pages, -1), lens, kv_offsets)
    np.testing.assert_array_equal(written.key, cache.key)


def test_key_range_is_clamped_and_positions_are_not():
    q, k, v, _, kv_offsets = packed_case(lens=((2, 24),))
    cache, pages, _ = fill(make_cache(12), k, v, kv_offsets)
    offsets = np.array([0, 2])
    r = golden.paged_attention(q, cache, pages, [2**31 - 1], offsets)
    assert r.keys.tolist() == [24, 24]
    r = golden.paged_attention(q, cache, pages, [2**31 - 1], offsets, local_window_size=(4, 0))
    assert r.keys.tolist() == [0, 0]
    assert golden.paged_attention(q, cache, pages, [-(2**31)], offsets).keys.tolist() == [0, 0]
    appended = golden.append_kv(cache, k[:2], v[:2], pages, [25], offsets)  # positions 23 and 24: the second is dropped
    changed = (appended.key != cache.key).any((1, 3))
    assert changed.sum() == 1 and changed[pages[0, 2], 7]


@pytest.mark.parametrize("cp_size", [2, 3, 8])
def test_context_parallel_ranks_merge_to_the_whole(cp_size):
    q, k, v, q_offsets, kv_offsets = packed_case()
    lens = np.diff(kv_offsets)
    whole = golden.ragged_attention(q, k, v, q_offsets, kv_offsets, local_window_size=(11, 0))
    parts = []
    for rank in range(cp_size):
        cache, pages, _ = fill(make_cache(12), k, v, kv_offsets, cp_rank=rank, cp_size=cp_size)
        options = dict(cp_rank=rank, cp_size=cp_size, local_window_size=(11, 0))
        parts.append(golden.paged_attention(q, cache, pages, lens, q_offsets, **options))
    assert sum(part.keys for part in parts).tolist() == whole.keys.tolist()
    merged = golden.merge_partials(np.stack([p.out for p in parts]), np.stack([p.lse for p in parts]))
    np.testing.assert_allclose(merged.out, whole.out, atol=1e-12)
    np.testing.assert_allclose(merged.lse, whole.lse, atol=1e-12)


def test_shared_prefix_is_the_concatenation():
    lens = ((3, 5), (4, 20))
    q, k, v, q_offsets, kv_offsets = packed_case(lens)
    prefix_k, prefix_v = normal(11, 2, 16), normal(11, 2, 16)
    cache, pages, kv_lens = fill(make_cache(12), k, v, kv_offsets)
    free = np.setdiff1d(np.arange(12), pages)[:2]
    cache = golden.append_kv(cache, prefix_k, prefix_v, free[None], [11], np.array([0, 11]))
    joined = [
        np.concatenate([np.concatenate([p, x[a:b]]) for a, b in zip(kv_offsets, kv_offsets[1:])])
        for p, x in ((prefix_k, k), (prefix_v, v))
    ]
    for options in (dict(), dict(local_window_size=(9, 0)), dict(alibi_slopes=np.ones(4, np.float32))):
        got = golden.paged_attention(q, cache, pages, kv_lens, q_offsets, shared_prefix=(free, 11), **options)
        want = golden.ragged_attention(q, *joined, q_offsets, kv_offsets + 11 * np.arange(3), **options)
        np.testing.assert_allclose(got.out, want.out, atol=1e-14)


def test_tree_mask():
    q, k, v, q_offsets, kv_offsets = packed_case(((3, 10),))
    cache, pages, lens = fill(make_cache(4), k, v, kv_offsets)
    chain = np.tril(np.ones((3, 3), bool))
    causal = golden.paged_attention(q, cache, pages, lens, q_offsets)
    np.testing.assert_array_equal(
        golden.paged_attention(q, cache, pages, lens, q_offsets, tree_mask=chain).out, causal.out
    )
    tree = np.array([[True, False], [False, True], [True, True]])  # Q = 2 hides the third new token
    assert golden.paged_attention(q, cache, pages, lens, q_offsets, tree_mask=tree).keys.tolist() == [8, 8, 9]


def test_decode_is_the_packed_call():
    q, k, v, _, kv_offsets = packed_case(((2, 5), (2, 9), (2, 20)))
    cache, pages, lens = fill(make_cache(12), k, v, kv_offsets)
    packed = golden.paged_attention(q, cache, pages, lens, np.array([0, 2, 4, 6]))
    uniform = golden.paged_decode(q.reshape(3, 2, 4, 16), cache, pages, lens)
    np.testing.assert_array_equal(uniform.out.reshape(6, 4, 16), packed.out)
    single = golden.paged_decode(q[1::2], cache, pages, lens)
    np.testing.assert_array_equal(single.lse, packed.lse[1::2])


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "int4", "float8_e4m3fn"])
def test_step_is_append_then_attention(kv_dtype):
    q, k, v, q_offsets, _ = packed_case(((3, 5), (0, 9), (4, 20)))
    cache = make_cache(12, kv_dtype=kv_dtype)
    pages = RNG.permutation(12)[:9].reshape(3, 3)
    lens, new = np.array([5, 9, 20]), slice(0, 7)
    bias = normal(2, 16)
    config = rope(kind="yarn", factor=4.0, original_max_position=64)
    options = dict(rope=config, key_bias=bias)
    r, written = golden.paged_attention_step(q, k[new], v[new], cache, pages, lens, q_offsets, logn=4, **options)
    appended = golden.append_kv(cache, k[new], v[new], pages, lens, q_offsets, **options)
    np.testing.assert_array_equal(written.key, appended.key)
    turned = golden.rotate(q[6], config, 19) * (math.log(20) / math.log(4))
    by_hand = q.copy()
    by_hand[6] = turned
    want = golden.paged_attention(by_hand, appended, pages, lens, q_offsets)
    np.testing.assert_array_equal(r.out[6], want.out[6])


def test_read_only_pages_and_copies():
    k, v = normal(16, 2, 16), normal(16, 2, 16)
    cache = make_cache(4)
    pages, offsets = np.array([[2, 0]]), np.array([0, 16])
    written = golden.append_kv(cache, k, v, pages, [16], offsets, read_only_pages=[1])
    assert not written.key[2].any() and written.key[0].any()
    copied = golden.copy_pages(written, np.array([0, 9, 2]), np.array([2, 1, 0]))
    np.testing.assert_array_equal(copied.key[2], written.key[0])
    np.testing.assert_array_equal(copied.value[0], written.value[2])
    assert not copied.key[1].any()


def test_merge_of_empty_partials():
    outs = np.full((2, 1, 1, 3), np.nan, np.float32)
    lses = np.full((2, 1, 1), -np.inf, np.float32)
    r = golden.merge_partials(outs, lses)
    assert not r.out.any() and r.lse == -np.inf
    r = golden.merge_partials(outs, lses, sinks=np.array([2], np.float32))
    assert not r.out.any() and r.lse == 2
    outs[1], lses[1] = 4, 0
    r = golden.merge_partials(outs, lses, sinks=np.array([0], np.float32))
    assert (r.out == 2).all() and np.allclose(r.lse, math.log(2))

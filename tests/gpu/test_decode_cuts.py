"""How decode cuts its work: clusters for one sequence that cannot be long, units of one length cut evenly.

The common cases have too few kv heads for either. A page table of more columns, all unmapped, keeps clusters away.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_turboattn as ta

PAGE = 16
FAR = 16384 // PAGE + 1  # kMaxClusterKeys
pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")


def normal(seed, *shape, dtype=jnp.bfloat16):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def pool(lens, kv_heads, dim, kv_dtype=jnp.bfloat16):
    """Random keys and values under a shuffled table; what no sequence has is NaN where the dtype knows it."""
    columns = max(1, -(-max(lens) // PAGE))
    counts = [-(-n // PAGE) for n in lens]
    pages = sum(counts) + 3
    ids, table, first = np.random.default_rng(0).permutation(pages), np.full((len(lens), columns), -1, np.int32), 0
    for b, n in enumerate(counts):
        table[b, :n] = ids[first : first + n]
        first += n
    cache = ta.PagedKVCache.create(pages, kv_heads, dim, page_size=PAGE, dtype=kv_dtype, param_dtype=jnp.bfloat16)
    if cache.key.dtype == jnp.bfloat16:
        used = np.isin(np.arange(pages), table)[:, None, None, None]
        fields = {n: jnp.where(used, normal(i, *cache.key.shape), jnp.nan) for i, n in enumerate(("key", "value"))}
        return dataclasses.replace(cache, **fields), jnp.array(table)
    offsets = jnp.array(np.concatenate([[0], np.cumsum(lens)]), jnp.int32)
    new = [normal(i, sum(lens), kv_heads, dim) for i in (1, 2)]
    return ta.append_kv(cache, *new, jnp.array(table), jnp.array(lens, jnp.int32), offsets), jnp.array(table)


def check(query, cache, table, lens, **how):
    """The values of `xla`, and the same bits again. Returns the call and its result.

    `xla` rounds decoded keys to bfloat16 and the kernels do not: with one key, lse is its score, which that may move by
    2^-9 * sum |q k| / sqrt(D), 0.014 here. Over more keys it averages out.
    """

    def call(query, cache, table, implementation):
        lengths = jnp.array(lens, jnp.int32)
        return ta.paged_decode(query, cache, table, lengths, return_residual=True, implementation=implementation, **how)

    compiled = jax.jit(functools.partial(call, query, cache, implementation="cuda"))
    out, lse = (np.asarray(x, np.float32) for x in compiled(table))
    for again, first in zip(compiled(table), (out, lse), strict=True):
        np.testing.assert_array_equal(np.asarray(again, np.float32), first)
    with jax.default_device(jax.devices("cpu")[0]):  # the GPU's compiler would try out a minute of kernels for each
        moved = jax.device_put((query, cache, table), jax.devices("cpu")[0])
        expected, expected_lse = (
            np.asarray(x, np.float32) for x in jax.jit(functools.partial(call, implementation="xla"))(*moved)
        )
    few_codes = cache.key.dtype != jnp.bfloat16 and max(lens) < 1000
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=0.014 if few_codes else 2e-3)
    np.testing.assert_allclose(out, expected, rtol=0, atol=0.02 * max(1, np.abs(expected).max()))
    return compiled, out, lse


ONE = dict(
    plain=dict(),
    group_1=dict(heads=(8, 8)),
    group_5=dict(heads=(40, 8)),
    group_8=dict(heads=(64, 8)),
    group_12=dict(heads=(96, 8)),
    group_16=dict(heads=(128, 8)),
    ten_heads=dict(heads=(40, 10)),
    cluster_of_8=dict(heads=(32, 32)),
    two_tokens=dict(tokens=2),
    three_tokens=dict(tokens=3),
    d64=dict(dim=64),
    d256=dict(dim=256),
    d256_group_16=dict(dim=256, heads=(128, 8)),
    int8=dict(kv_dtype=jnp.int8),
    int4=dict(kv_dtype="int4"),
    int4_d256=dict(kv_dtype="int4", dim=256, heads=(128, 8)),
    fp8=dict(kv_dtype=jnp.float8_e4m3fn),
    window=dict(local_window_size=(300, 0)),
    soft_cap=dict(logits_soft_cap=20.0),
    float32=dict(out_dtype=jnp.float32),
    sinks=dict(sinks=True),
)


@pytest.mark.parametrize(
    "name, length", [*((name, 1025) for name in ONE), *(("plain", n) for n in (0, 1, 64, 65, 500, 3001))]
)
def test_one_sequence(name, length):
    case = dict(heads=(32, 8), dim=128, tokens=1, kv_dtype=jnp.bfloat16) | ONE[name]
    (H, K), D, tokens, kv_dtype = (case.pop(n) for n in ("heads", "dim", "tokens", "kv_dtype"))
    if case.pop("sinks", False):
        case["sinks"] = jnp.linspace(-2, 3, H)
    cache, table = pool([length], K, D, kv_dtype)
    call, out, lse = check(normal(9, 1, tokens, H, D), cache, table, [length], **case)
    far = jnp.pad(table, ((0, 0), (0, FAR)), constant_values=-1)
    expected, expected_lse = (np.asarray(x, np.float32) for x in call(far))
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-5)
    np.testing.assert_allclose(out, expected, rtol=0, atol=0.01 * max(1, np.abs(expected).max()))


def test_one_sequence_after_a_prefix():
    cache, table = pool([200, 150], 8, 128)
    prefix = (table[1, :10], jnp.int32(150))
    check(normal(9, 1, 32, 128), cache, table[:1], [200], shared_prefix=prefix)


def test_one_sequence_without_pages():
    """Every page unmapped, one of them, and ids that do not exist."""
    cache, table = pool([900], 8, 128)
    for wild in (table.at[0, 3].set(-1), table.at[0, ::7].set(2**31 - 1), jnp.full_like(table, -5)):
        check(normal(9, 1, 32, 128), cache, wild, [900])


@pytest.mark.parametrize("ranges", [[0, 1], [0, 0], [1, 1], [-5, 9], [7, 3]])
def test_one_packed_sequence(ranges):
    cache, table = pool([700], 8, 128)
    query, offsets = normal(9, 1, 32, 128), jnp.array(ranges, jnp.int32)
    calls = [
        ta.paged_attention(
            query, cache, table, jnp.array([700], jnp.int32), offsets, return_residual=True, implementation=name
        )
        for name in ("cuda", "xla")
    ]
    for result, expected in zip(*calls, strict=True):
        np.testing.assert_allclose(np.asarray(result, np.float32), np.asarray(expected, np.float32), rtol=0, atol=0.02)


@pytest.mark.parametrize("group, kv_dtype", [(2, jnp.bfloat16), (16, "int4")])
@pytest.mark.parametrize("batch, length", [(2, 700), (8, 1000), (8, 1), (33, 400), (64, 256), (130, 90)])
def test_one_length(batch, length, group, kv_dtype):
    """Units of one length, all and all but one, and one of none."""
    for lens in ([length] * batch, [length] * (batch - 1) + [length + 130], [0] + [length] * (batch - 1)):
        cache, table = pool(lens, 8, 128, kv_dtype)
        check(normal(9, batch, 8 * group, 128), cache, table, lens)


RAGGED = [int(n) for n in np.random.default_rng(3).integers(0, 700, 70)]
MANY = dict(
    plain=dict(),
    group_1=dict(heads=(8, 8)),
    group_8=dict(heads=(64, 8)),
    group_16=dict(heads=(128, 8)),
    two_tokens=dict(tokens=2),
    d64=dict(dim=64),
    d256=dict(dim=256),
    d256_group_16=dict(dim=256, heads=(128, 8)),
    float32=dict(out_dtype=jnp.float32),
    sinks=dict(sinks=True),
    window=dict(local_window_size=(300, 0)),
    one_long=dict(lens=[9000] + [90] * 69),  # a unit of many parts
    one_long_group_16=dict(heads=(128, 8), lens=[9000] + [90] * 69),  # more than are copied at once
    one_place_each=dict(lens=[20] * 71 + [0]),
    few_places=dict(lens=[0] * 69 + [3]),
)


@pytest.mark.parametrize("name", MANY)
def test_units_of_many_sequences(name):
    """At least as many units as blocks: those that are cut are merged by blocks, of 16-bit caches of head dim 128."""
    case = dict(heads=(32, 8), dim=128, tokens=1, lens=RAGGED) | MANY[name]
    (H, K), D, tokens, lens = (case.pop(n) for n in ("heads", "dim", "tokens", "lens"))
    if case.pop("sinks", False):
        case["sinks"] = jnp.linspace(-2, 3, H)
    cache, table = pool(lens, K, D)
    check(normal(9, len(lens), tokens, H, D), cache, table, lens, **case)


def test_many_sequences_of_any_lengths_and_pages():
    """Lengths that are no lengths, pages that do not exist, and sequences without one."""
    cache, table = pool(RAGGED, 8, 128)
    lens = np.array(RAGGED)
    lens[::9], lens[1::9] = 2**31 - 1, -(2**31)
    check(normal(9, len(lens), 32, 128), cache, table.at[::5, 3].set(2**31 - 1).at[::7].set(-5), lens)

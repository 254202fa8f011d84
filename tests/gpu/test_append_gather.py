"""append_kv and gather_kv on an NVIDIA GPU: the bytes of the cache and of the decoded rows equal the numpy codecs'."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_turboattn as ta
from jax_turboattn.testing import golden

KV_DTYPES = ("same", "int8", "int4", "float8_e4m3fn")
pytestmark = pytest.mark.gpu


@dataclasses.dataclass
class Case:
    """Shapes of one call. Offsets and lengths are given; pages are a random permutation with unmapped and wild entries."""

    q_offsets: tuple[int, ...] = (0, 1, 1, 40, 71)
    kv_lens: tuple[int, ...] = (1, 17, 55, 200)
    tokens: int = 75  # T: the last rows belong to no sequence
    kv_heads: int = 2
    head_dim: int = 128
    value_dim: int = 128
    page_size: int = 16
    columns: int = 16  # M
    layers: int | None = None
    cp_size: int = 1
    shared_value: bool = False  # MLA


CASES = {
    "base": Case(),
    "one_head_d8": Case(kv_heads=1, head_dim=8, value_dim=8),
    "d64": Case(kv_heads=5, head_dim=64, value_dim=64),
    "d256": Case(head_dim=256, value_dim=256, kv_heads=1),
    "dv_differs": Case(kv_heads=3, head_dim=80, value_dim=112),
    "d512": Case(head_dim=512, value_dim=512, page_size=8, columns=40),
    "d576": Case(head_dim=576, value_dim=64, kv_heads=1),
    "mla": Case(kv_heads=1, head_dim=576, value_dim=512, shared_value=True),
    "layers": Case(layers=3),
    "cp": Case(cp_size=2),
    "wild_lengths": Case(kv_lens=(-5, 2**31 - 1, 10, 400)),
    # Ranges that overlap promise memory safety alone, so these do not.
    "unsorted_offsets": Case(q_offsets=(60, 5, 30, 2, 5), kv_lens=(80, 70, 40, 50)),
    "decode": Case(q_offsets=tuple(range(301)), kv_lens=tuple(range(1, 301)), tokens=300, columns=20, kv_heads=8),
    # Enough tokens that a block takes several, of several sequences and of none.
    "several_tokens_a_block": Case(
        q_offsets=(1, 900, 901, 902, 2050, 2051, 3331),
        kv_lens=(920, 1, 300, 1148, 40, 1280),
        tokens=3333,
        columns=80,
        kv_heads=3,
        head_dim=64,
        value_dim=64,
    ),
    "no_tokens": Case(q_offsets=(0, 0, 0), kv_lens=(3, 40), tokens=0),
}


def random_bytes(rng, like):
    """Finite garbage of `like`'s shape and dtype, so that a write too many shows."""
    raw = rng.integers(1, 100, like.size * like.dtype.itemsize, dtype=np.uint8)
    return raw.view(like.dtype).reshape(like.shape)


def make(case: Case, dtype, kv_dtype: str, seed: int = 0):
    """(cache with garbage in it, key, value, page_table, kv_lens, q_offsets), all numpy but for the cache's class."""
    rng = np.random.default_rng(seed)
    batch = len(case.kv_lens)
    pages = batch * case.columns + 3
    cache = ta.PagedKVCache.create(
        pages,
        case.kv_heads,
        case.head_dim,
        value_dim=case.value_dim,
        page_size=case.page_size,
        num_layers=case.layers,
        dtype=np.dtype(dtype).name if kv_dtype == "same" else kv_dtype,
        param_dtype=dtype,
        shared_value=case.shared_value,
    )
    cache = jax.tree.map(np.asarray, cache)
    garbage = jax.tree.map(lambda a: random_bytes(rng, a), cache)
    if kv_dtype == "float8_e4m3fn":  # its scales are the caller's
        scales = {
            n: rng.uniform(0.01, 0.1, a.shape).astype(np.float32) for n, a in cache.arrays.items() if "params" in n
        }
        garbage = dataclasses.replace(garbage, **scales)
    table = rng.permutation(pages)[: batch * case.columns].reshape(batch, case.columns).astype(np.int32)
    holes = rng.random(table.shape)
    table[holes < 0.05] = -1
    table[holes > 0.95] = 2**31 - 1
    scale = np.exp(rng.normal(size=(case.tokens, case.kv_heads, 1)))
    key = (rng.normal(size=(case.tokens, case.kv_heads, case.head_dim)) * scale).astype(dtype)
    value = (rng.normal(size=(case.tokens, case.kv_heads, case.value_dim)) * scale + 1).astype(dtype)
    if case.tokens > 8:
        key[3, 0] = 0.5  # a constant row
        key[4, 0] = np.abs(key[4, 0])  # a minimum of both zeros
        key[4, 0, ::3], key[4, 0, 1::3] = 0.0, -0.0
        value[5, -1, 2] = np.nan
        key[7, 0, 1] = np.inf
    if case.shared_value:
        value = None
    return garbage, key, value, table, np.asarray(case.kv_lens, np.int32), np.asarray(case.q_offsets, np.int32)


def assert_same_bytes(got, want):
    for name, expected in want.arrays.items():
        actual, expected = np.asarray(got.arrays[name]), np.asarray(expected)
        assert actual.dtype == expected.dtype
        # NaN is a value here and not a bit pattern: compare it as such, everything else as bytes.
        if expected.dtype != np.uint8:
            nan = np.isnan(expected.astype(np.float32))
            assert (np.isnan(actual.astype(np.float32)) == nan).all(), name
            actual, expected = (
                np.where(nan, np.zeros_like(actual), actual),
                np.where(nan, np.zeros_like(expected), expected),
            )
        different = (actual.view(np.uint8) != expected.view(np.uint8)).sum()
        assert different == 0, f"{name}: {different} of {expected.nbytes} bytes differ"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "fp16"])
def test_append_bytes(dtype, kv_dtype, name):
    case = CASES[name]
    cache, key, value, table, kv_lens, q_offsets = make(case, dtype, kv_dtype)
    rng = np.random.default_rng(1)
    options = {
        "key_bias": rng.normal(size=key.shape[1:]).astype(dtype),
        "value_bias": None if value is None else rng.normal(size=value.shape[1:]).astype(np.float32),
        "read_only_pages": rng.integers(-1, 2, len(kv_lens)).astype(np.int32),
        "layer": None if case.layers is None else case.layers - 1,
        "cp_size": case.cp_size,
        "cp_rank": case.cp_size - 1,
    }
    want = golden.append_kv(cache, key, value, table, kv_lens, q_offsets, **options)
    got = jax.jit(
        lambda *arrays: ta.append_kv(*arrays, **options, implementation="cuda"),
    )(cache, key, value, table, kv_lens, q_offsets)
    assert_same_bytes(got, want)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bf16", "fp16"])
def test_gather_bytes(dtype, kv_dtype, name):
    case = CASES[name]
    cache, *_, table, kv_lens, _ = make(case, dtype, kv_dtype)
    options = {"layer": None if case.layers is None else 1, "out_dtype": dtype}
    want = golden.gather_kv(cache, table, kv_lens, **options)
    got = jax.jit(lambda *arrays: ta.gather_kv(*arrays, **options, implementation="cuda"))(cache, table, kv_lens)
    for array, expected in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(array), expected, strict=True)


ROPES = {
    "half": ta.RopeConfig(dim=64, offset=32),
    "interleaved": ta.RopeConfig(dim=128, pairing="interleaved", base=5e5),
    "yarn": ta.RopeConfig("yarn", 128, factor=4.0, original_max_position=4096),
    "sections": ta.RopeConfig(dim=128, sections=(16, 24, 24)),
    "sections_interleaved": ta.RopeConfig(dim=128, sections=(24, 20, 20), sections_interleaved=True),
    "dynamic": ta.RopeConfig("dynamic", 128, factor=2.0, original_max_position=64),
}


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("name", ROPES)
def test_append_rope(name, kv_dtype):
    check_rope(Case(), ROPES[name], kv_dtype)


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("case", ["d64", "d256", "several_tokens_a_block"])
def test_append_rope_of_whole_rows(case, pairing):
    case = CASES[case]
    check_rope(case, ta.RopeConfig(dim=case.head_dim, pairing=pairing), "int8")


def check_rope(case, rope, kv_dtype):
    """Sine and cosine are the GPU's own, so one step of E or of a code is allowed, on few elements; all else is bytes."""
    cache, key, value, table, kv_lens, q_offsets = make(case, jnp.float16, kv_dtype)
    key = np.where(np.isfinite(key), key, np.float16(0))
    rng = np.random.default_rng(2)
    options = {"rope": rope}
    if rope.kind == "dynamic":
        options["rope_base"] = np.float32(rng.uniform(1e4, 1e5, len(kv_lens)))
    if rope.sections:
        options["positions"] = rng.integers(-(2**20), 2**20, (len(key), 3)).astype(np.int32)
    want = golden.append_kv(cache, key, value, table, kv_lens, q_offsets, **options)
    got = ta.append_kv(cache, key, value, table, kv_lens, q_offsets, **options, implementation="cuda")
    tables = (table, np.minimum(kv_lens, 10_000))
    gathered = golden.gather_kv(jax.tree.map(np.asarray, got), *tables, out_dtype=np.float16)
    expected = golden.gather_kv(want, *tables, out_dtype=np.float16)
    np.testing.assert_array_equal(gathered[1], expected[1])  # V is not rotated
    actual, reference = (np.asarray(a[0], np.float32) for a in (gathered, expected))
    # One code is 1/255 or 1/15 of the row's range; an fp8 step is 1/8 of the value; fp16 has an ulp of 2^-10.
    spread = np.nanmax(reference, -1, keepdims=True) - np.nanmin(reference, -1, keepdims=True)
    step = {"same": 2**-9 * np.abs(reference), "int8": spread / 250, "int4": spread / 14}.get(
        kv_dtype, np.abs(reference) / 7
    )
    assert (np.abs(actual - reference) <= step + 2e-4 * spread).all()
    assert (actual != reference).mean() < 0.02


def test_roundtrip_keeps_other_pages_and_runs_twice():
    """Another length under the same executable, and the donated pool is updated in place."""
    case = Case()
    cache, key, value, table, kv_lens, q_offsets = make(case, jnp.bfloat16, "int8")
    append = jax.jit(lambda *arrays: ta.append_kv(*arrays, implementation="cuda"), donate_argnums=0)
    device_cache = jax.device_put(cache)
    pointer = device_cache.key.unsafe_buffer_pointer()
    for lengths in (kv_lens, kv_lens - 3):
        cache = golden.append_kv(cache, key, value, table, lengths, q_offsets)
        device_cache = append(device_cache, key, value, table, lengths, q_offsets)
        assert_same_bytes(device_cache, cache)
    assert device_cache.key.unsafe_buffer_pointer() == pointer

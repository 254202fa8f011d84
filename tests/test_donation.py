"""A donated pool is never copied: proved from the optimised HLO and from the pointers of the live buffers."""

import re

import jax
import jax.numpy as jnp
import pytest

import jax_turboattn as ta
from jax_turboattn import backends

B, H, K, D, P, N, M, L = 3, 4, 2, 16, 8, 1024, 4, 3
IMPLEMENTATIONS = ["xla", "cpu"]
DTYPES = ["float32", "int8", "bfloat16", "int4", "float8_e4m3fn"]
# XLA's CPU scatter has neither dtype: `xla` scatters the bits, with a pool-sized temporary. The CPU kernels write in place.
COPIED_BY_XLA_CPU = ("bfloat16", "float8_e4m3fn")


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request, monkeypatch):
    if request.param != "xla" and backends.ffi.load(request.param).reason is not None:
        pytest.skip(backends.ffi.load(request.param).reason)
    monkeypatch.setenv("JAX_TURBOATTN_IMPLEMENTATION", request.param)
    return request.param


def make_cache(dtype, num_layers=None):
    return ta.PagedKVCache.create(
        N, K, D, page_size=P, num_layers=num_layers, dtype=dtype, param_dtype=jnp.float32
    )


QUERY = jnp.ones((B, H, D))
NEW = jnp.ones((B, K, D))
OFFSETS = jnp.arange(B + 1, dtype=jnp.int32)
TABLE = jnp.arange(B * M, dtype=jnp.int32).reshape(B, M)
LENS = jnp.array([1, 9, 20], jnp.int32)


def of(cache, x):
    """x in the dtype of the cache's queries."""
    return x.astype(jnp.bfloat16) if cache.dtype == "bfloat16" else x


def append(cache, layer=None):
    return ta.append_kv(cache, of(cache, NEW), of(cache, NEW), TABLE, LENS, OFFSETS, layer=layer)


def step(cache, layer=None):
    return ta.paged_attention_step(of(cache, QUERY), of(cache, NEW), of(cache, NEW), cache, TABLE, LENS, OFFSETS, layer=layer)


def decode_loop(cache):
    """Append and attend, several times: the serving loop."""

    def body(carry, _):
        cache, lens = carry
        out, cache = ta.paged_attention_step(of(cache, QUERY), of(cache, NEW), of(cache, NEW), cache, TABLE, lens, OFFSETS)
        return (cache, lens + 1), out

    (cache, _), outs = jax.lax.scan(body, (cache, LENS), length=4)
    return cache, outs


def while_loop(cache):
    def body(carry):
        i, cache, total = carry
        out, cache = step(cache)
        return i + 1, cache, total + out

    _, cache, total = jax.lax.while_loop(lambda c: c[0] < 3, body, (0, cache, of(cache, jnp.zeros_like(QUERY))))
    return cache, total


def scan_over_layers(cache):
    def layer(carry, index):
        cache, x = carry
        out, cache = step(cache, layer=index)
        return (cache, x + out), None

    (cache, x), _ = jax.lax.scan(layer, (cache, of(cache, QUERY)), jnp.arange(L, dtype=jnp.int32))
    return cache, x


def copy(cache):
    return ta.copy_pages(cache, jnp.array([0, 1], jnp.int32), jnp.array([5, 6], jnp.int32))


PROGRAMS = {
    "append": (append, None),
    "step": (step, None),
    "copy_pages": (copy, None),
    "decode_loop": (decode_loop, None),
    "while_loop": (while_loop, None),
    "scan_over_layers": (scan_over_layers, L),
    "copy_pages_of_all_layers": (copy, L),
}


def pool_sized_copies(hlo: str, cache) -> list[str]:
    """Instructions that copy an array as large as one of the cache's pools, or as one layer of it."""
    sizes = set()
    for array in jax.tree.leaves(cache):
        sizes |= {array.size, array.size // (cache.num_layers or 1)}
    found = []
    for line in hlo.splitlines():
        match = re.search(r"= \w+\[([\d,]*)\]\S* (copy|copy-start|\S*fusion)\(", line)
        if match is None or (match[2].endswith("fusion") and "copy" not in line.split("=")[0]):
            continue
        size = 1
        for dim in filter(None, match[1].split(",")):
            size *= int(dim)
        if size in sizes:
            found.append(line.strip()[:160])
    return found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_donated_pool_is_updated_in_place(program, dtype, implementation):
    if implementation == "xla" and dtype in COPIED_BY_XLA_CPU:
        pytest.skip("XLA's CPU scatter of this dtype needs a pool-sized temporary")
    function, num_layers = PROGRAMS[program]
    cache = make_cache(dtype, num_layers)
    compiled = jax.jit(function, donate_argnums=0).lower(cache).compile()
    pools = jax.tree.leaves(cache)
    assert pool_sized_copies(compiled.as_text(), cache) == []
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= sum(x.nbytes for x in pools)
    assert memory.temp_size_in_bytes < min(x.nbytes for x in jax.tree.leaves(make_cache(dtype)) if x.ndim > 1)
    before = [x.unsafe_buffer_pointer() for x in pools]
    result = compiled(cache)
    after = result if isinstance(result, ta.PagedKVCache) else next(r for r in result if isinstance(r, ta.PagedKVCache))
    assert [x.unsafe_buffer_pointer() for x in jax.tree.leaves(after)] == before
    assert all(x.is_deleted() for x in pools)


def test_the_detector_sees_a_copy(implementation):
    """Without donation the pool must be copied, and the same search finds it."""
    cache = make_cache("float32")
    compiled = jax.jit(append).lower(cache).compile()
    assert pool_sized_copies(compiled.as_text(), cache)


def test_eager_append_leaves_the_input_alone(implementation):
    cache = make_cache("float32")
    written = append(cache)
    assert float(jnp.abs(cache.key).sum()) == 0
    assert float(jnp.abs(written.key).sum()) == NEW.size

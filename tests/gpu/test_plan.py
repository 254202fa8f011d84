"""Plans: with one, decode gives the bits that it gives without, and reads it where there is something to read."""

import dataclasses
import functools

import conformance
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jax_turboattn as ta
from jax_turboattn.testing import cases

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
PAGE, K, H, D = 16, 8, 32, 128


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(jnp.bfloat16)


@functools.cache
def pool(pages, kv_dtype):
    """Every page is a part of one long sequence."""
    cache = ta.PagedKVCache.create(pages, K, D, page_size=PAGE, dtype=kv_dtype, param_dtype=jnp.bfloat16)
    count, table = pages * PAGE, jnp.arange(pages, dtype=jnp.int32)[None]
    new = [normal(seed, count, K, D) for seed in (1, 2)]
    return ta.append_kv(cache, *new, table, jnp.array([count], jnp.int32), jnp.array([0, count], jnp.int32))


def arguments(lens, tokens=1, heads=H, kv_dtype="bfloat16"):
    """query, cache, page_table, kv_lens of a paged_decode. Sequences share pages, which reading allows."""
    pages, columns = 600, max(1, -(-max(lens) // PAGE))
    table = jnp.asarray(np.random.default_rng(0).integers(0, pages, (len(lens), columns)), jnp.int32)
    return normal(3, len(lens), tokens, heads, D), pool(pages, kv_dtype), table, jnp.array(lens, jnp.int32)


def same_bits(left, right):
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


RAGGED = [int(n) for n in np.random.default_rng(1).integers(0, 700, 37)]
LENGTHS = dict(
    even=[256] * 64,  # units of one length, none cut
    long_even=[4096] * 8,  # cut
    one_long=[20000] + [1024] * 63,
    one=[40000],
    ragged=RAGGED,
    empty=[0] * 9,
    some_empty=[0, 0, 700, 0, 3, 64, 65, 0],
    many=[n % 90 for n in range(1000)],  # several sequences a thread
    few_places=[5, 7],
)
HOW = dict(
    plain=dict(),
    int8=dict(kv_dtype="int8"),
    two_tokens=dict(tokens=2),
    group_12=dict(heads=96),
)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("lengths", LENGTHS)
def test_the_bits_of_a_call_without(lengths, how):
    given = arguments(LENGTHS[lengths], **HOW[how])
    plan = jax.jit(ta.make_plan, static_argnums=4)(*given, None)
    call = jax.jit(functools.partial(ta.paged_decode, return_residual=True))
    assert int(plan.data[0, 0]) > 0, "the schedule says nothing"
    same_bits(call(*given, plan=plan), call(*given))


def test_it_is_read():
    """A plan of shorter sequences gives other numbers."""
    query, cache, table, lens = arguments([256] * 64)
    plan = ta.make_plan(query, cache, table, lens - 128, None)
    short, whole = ta.paged_decode(query, cache, table, lens, plan=plan), ta.paged_decode(query, cache, table, lens)
    assert (np.asarray(short, np.float32) != np.asarray(whole, np.float32)).any((1, 2, 3)).all()


@pytest.mark.parametrize(
    "how",
    [dict(batch_invariant=True), dict(local_window_size=(100, 0)), dict(shared_prefix=(jnp.array([1], jnp.int32), 9))],
    ids=lambda how: next(iter(how)),
)
def test_calls_that_read_none(how):
    given = arguments(RAGGED)
    plan = ta.make_plan(*given, None, **how)
    assert not np.asarray(plan.data).any()
    same_bits(ta.paged_decode(*given, plan=plan, **how), ta.paged_decode(*given, **how))


def test_one_short_sequence():
    given = arguments([3000])
    plan = ta.make_plan(*given, None)
    same_bits(ta.paged_decode(*given, plan=plan), ta.paged_decode(*given))


@pytest.mark.parametrize("grid", [0, 1, 100, 511, 2**31 - 1])
def test_a_plan_for_another_grid(grid):
    given = arguments(RAGGED)
    plan = ta.make_plan(*given, None)
    other = dataclasses.replace(plan, data=plan.data.at[:, 0].set(grid))
    same_bits(ta.paged_decode(*given, plan=other), ta.paged_decode(*given))


@pytest.mark.parametrize("column", range(1, 8))
def test_garbage_in_a_plan(column):
    """It names no key or slot that does not exist, comes to an end, and leaves nothing behind for other calls."""
    given = arguments(RAGGED)
    plan = ta.make_plan(*given, None)
    call = jax.jit(ta.paged_decode)
    right = call(*given, plan=plan)
    rng = np.random.default_rng(column)
    for low, high in ((0, 2**4), (0, 2**16), (-(2**31), 2**31)):
        garbage = jnp.asarray(rng.integers(low, high, len(plan.data)), jnp.int32)
        wrong = call(*given, plan=dataclasses.replace(plan, data=plan.data.at[:, column].set(garbage)))
        jax.block_until_ready(wrong)
        same_bits(call(*given, plan=plan), right)


def test_plans_that_are_not_the_calls():
    """Rows in another order, so that units have two first parts or none, and a plan of other lengths."""
    query, cache, table, lens = arguments(RAGGED)
    plan = ta.make_plan(query, cache, table, lens, None)
    call = jax.jit(ta.paged_decode)
    right = call(query, cache, table, lens, plan=plan)
    order = jnp.asarray(np.random.default_rng(1).permutation(len(plan.data)))
    others = [
        dataclasses.replace(plan, data=plan.data[order]),
        ta.make_plan(query, cache, table, lens[::-1], None),
        ta.make_plan(query, cache, table, lens // 3, None),
    ]
    for other in others:
        jax.block_until_ready(call(query, cache, table, lens, plan=other))
        same_bits(call(query, cache, table, lens, plan=plan), right)


def test_vmap_plans_for_itself():
    query, cache, table, lens = arguments(RAGGED)
    queries, many = jnp.stack([query, -query]), jnp.stack([lens, lens // 2])
    call = lambda q, n: ta.paged_decode(q, cache, table, n, plan=ta.make_plan(q, cache, table, n, None))  # noqa: E731
    same_bits(jax.vmap(call)(queries, many), jax.vmap(lambda q, n: ta.paged_decode(q, cache, table, n))(queries, many))


def test_one_plan_for_a_scan_over_layers():
    """Steps of a stacked cache, whose new tokens decode appends."""
    layers, lens = 3, jnp.array([1, 20, 300, 77], jnp.int32)
    batch, columns = len(lens), 20
    table = jnp.asarray(np.random.default_rng(2).permutation(batch * columns).reshape(batch, columns), jnp.int32)
    cache = ta.PagedKVCache.create(batch * columns, K, D, page_size=PAGE, num_layers=layers)
    cache = dataclasses.replace(cache, key=normal(4, *cache.key.shape), value=normal(5, *cache.value.shape))
    new = [normal(6 + i, layers, batch, heads, D) for i, heads in enumerate((H, K, K))]
    offsets, rope = jnp.arange(batch + 1, dtype=jnp.int32), ta.RopeConfig(dim=D)

    @functools.partial(jax.jit, static_argnums=1)
    def step(cache, with_plan):
        plan = ta.make_plan(new[0][0], cache, table, lens, offsets, layer=0) if with_plan else None

        def layer(cache, inputs):
            i, q, k, v = inputs
            out, cache = ta.paged_attention_step(
                q, k, v, cache, table, lens, offsets, rope=rope, layer=i, plan=plan, return_residual=True
            )
            return cache, out

        return jax.lax.scan(layer, cache, (jnp.arange(layers), *new))

    same_bits(step(cache, True), step(cache, False))


@pytest.mark.parametrize(
    "planned_lens, planned_offsets, offsets",
    [
        ([140, 150], [0, 1, 2], [0, 1, 2]),
        ([40, 50], [0, 1, 2], [0, 0, 1]),  # the first sequence pauses
        ([40, 50], [0, 2, 2], [0, 1, 2]),
    ],
)
def test_a_plan_of_another_step(planned_lens, planned_offsets, offsets):
    """A step stores by its own lengths and offsets, or not at all: nothing where an old plan says."""
    lens, offsets, planned_lens, planned_offsets = (
        jnp.array(x, jnp.int32) for x in ([40, 50], offsets, planned_lens, planned_offsets)
    )
    cache, table = ta.PagedKVCache.create(40, K, D, page_size=PAGE), jnp.arange(40, dtype=jnp.int32).reshape(2, 20)
    new = [normal(i, 2, heads, D) for i, heads in enumerate((H, K, K))]
    plan = ta.make_plan(new[0], cache, table, planned_lens, planned_offsets)
    _, stored = ta.paged_attention_step(*new, cache, table, lens, offsets, plan=plan)
    _, right = ta.paged_attention_step(*new, cache, table, lens, offsets)
    for name in ("key", "value"):
        before, after, expected = (np.asarray(getattr(c, name), np.float32) for c in (cache, stored, right))
        assert ((after == before) | (after == expected)).all()


STEPS = [s for s in cases.SPECS if s.op in ("paged_attention", "paged_attention_step") and s.T <= s.B]
SPECS = [s for s in cases.SPECS if s.op == "paged_decode"] + STEPS
ONLY_STEP = {
    "key",
    "value",
    "query_bias",
    "key_bias",
    "value_bias",
    "rope",
    "rope_base",
    "positions",
    "read_only_pages",
}
ONLY_STEP |= {"logn", "logn_zero_based"}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_conformance_cases(spec):
    reason = conformance.declined(spec, "cuda")
    if reason is not None:
        pytest.skip(reason)
    static = spec.options | dict(spec.hints)
    operation = getattr(ta, spec.op)

    @functools.partial(jax.jit, static_argnums=1)
    def call(arrays, with_plan):
        named = arrays | static | dict(implementation="cuda")
        if with_plan:
            kept = {n: x for n, x in named.items() if n not in ONLY_STEP}
            kept.setdefault("q_offsets", None)
            named["plan"] = ta.make_plan(**kept)
        return operation(**named, return_residual=True)

    values = cases.random_values(np.random.default_rng(len(spec.name)), spec, "draw")
    arrays = {n: conformance.to_jax(x) for n, x in cases.build(cases.Case(spec, values)).arrays.items()}
    same_bits(call(arrays, True), call(arrays, False))

"""TurboAttention: its two ways to run agree, and every option shows in the output."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from flax import nnx

from jax_turboattn import PagedKVCache, RopeConfig, apply_rope
from jax_turboattn.nn import TurboAttention

FEATURES, HEADS, KV_HEADS, HEAD_DIM, PAGE = 48, 4, 2, 16, 8

OPTIONS = {
    "plain": {},
    "bias": {"use_bias": True},
    "sinks": {"use_sinks": True},
    "window": {"local_window_size": (3, 0)},
    "soft cap": {"logits_soft_cap": 0.5},
    "scale": {"scale": 0.7},
    "rope": {"rope": RopeConfig(dim=16)},
    "partial interleaved rope": {"rope": RopeConfig(dim=8, offset=8, pairing="interleaved")},
    "yarn": {"rope": RopeConfig(kind="yarn", dim=16, factor=4.0, original_max_position=8)},
    "sections": {"rope": RopeConfig(dim=16, sections=(4, 2, 2))},
    "all": {
        "use_bias": True,
        "use_sinks": True,
        "local_window_size": (5, 0),
        "logits_soft_cap": 2.0,
        "rope": RopeConfig(dim=16, base=100.0),
        "out_features": 24,
    },
}


def layer(implementation="xla", **options):
    """A layer with every parameter away from its initial value."""
    made = TurboAttention(
        FEATURES,
        HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        implementation=implementation,
        rngs=nnx.Rngs(0),
        **options,
    )
    graph, params = nnx.split(made)
    leaves, structure = jax.tree.flatten(params)
    leaves = [
        leaf + 0.3 * jax.random.normal(jax.random.key(i), leaf.shape) if leaf.ndim < 3 else leaf
        for i, leaf in enumerate(leaves)
    ]
    return nnx.merge(graph, jax.tree.unflatten(structure, leaves))


def inputs(batch=2, length=21):
    return jax.random.normal(jax.random.key(7), (batch, length, FEATURES))


def run_paged(layer, x, chunks, dtype=jnp.float32):
    """The layer's output over the paged cache, fed in chunks: [B, T, F_out]."""
    batch, length, _ = x.shape
    columns = -(-length // PAGE)
    cache = PagedKVCache.create(2 * batch * columns, KV_HEADS, HEAD_DIM, page_size=PAGE, dtype=dtype)
    pages = np.random.default_rng(0).permutation(2 * batch * columns)[: batch * columns]
    table = jnp.asarray(pages.reshape(batch, columns), jnp.int32)
    outs, done = [], 0
    sections = layer.rope is not None and layer.rope.sections is not None
    for chunk in chunks:
        rows = x[:, done : done + chunk].reshape(batch * chunk, -1)
        positions = jnp.tile(jnp.arange(done, done + chunk, dtype=jnp.int32), batch)
        done += chunk
        out, cache = layer.paged(
            rows,
            cache,
            table,
            jnp.full((batch,), done, jnp.int32),
            jnp.arange(0, batch * chunk + 1, chunk, dtype=jnp.int32),
            positions=jnp.stack([positions] * 3, -1) if sections else None,
        )
        outs.append(out.reshape(batch, chunk, -1))
    assert done == length
    return jnp.concatenate(outs, axis=1)


@pytest.mark.parametrize("implementation", ["xla", "cpu"])
@pytest.mark.parametrize("name", OPTIONS)
def test_full_equals_paged(name, implementation):
    attention = layer(implementation, **OPTIONS[name])
    x = inputs()
    np.testing.assert_allclose(attention(x), run_paged(attention, x, (7, 7, 7)), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name not in ("plain", "all")])
def test_every_option_shows(name):
    x = inputs(batch=1)
    assert jnp.abs(layer(**OPTIONS[name])(x) - layer()(x)).max() > 1e-3


def test_dynamic_rope_base():
    attention = layer(rope=RopeConfig(kind="dynamic", dim=16, factor=2.0, original_max_position=8))
    x = inputs()
    base = jnp.array([100.0, 10000.0])
    out = attention(x, rope_base=base)
    fixed = layer(rope=RopeConfig(dim=16, base=100.0))(x[:1])
    np.testing.assert_allclose(out[:1], fixed, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="rope_base"):
        attention(x)


def test_positions_of_sections():
    attention = layer(rope=RopeConfig(dim=16, sections=(4, 2, 2)))
    x = inputs()
    axes = jnp.stack([jnp.arange(21), jnp.arange(21) // 2, jnp.arange(21) % 3], -1).astype(jnp.int32)
    same = jnp.broadcast_to(jnp.arange(21, dtype=jnp.int32)[:, None], (21, 3))
    np.testing.assert_array_equal(attention(x, positions=same), attention(x))
    assert jnp.abs(attention(x, positions=axes) - attention(x)).max() > 1e-3


def test_lengths_and_segments():
    attention = layer()
    x = inputs()
    out = attention(x, lengths=jnp.array([5, 21], jnp.int32))
    np.testing.assert_allclose(out[0, :5], attention(x[:1, :5])[0], rtol=1e-5, atol=1e-5)
    assert not out[0, 5:].any()
    segments = jnp.broadcast_to((jnp.arange(21) >= 9).astype(jnp.int32), (2, 21))
    out = attention(x, segment_ids=segments)
    np.testing.assert_allclose(out[:, 9:], attention(x[:, 9:]), rtol=1e-5, atol=1e-5)


def test_gradients_reach_every_parameter():
    attention = layer(**OPTIONS["all"])
    graph, params = nnx.split(attention)
    x = inputs()
    grads = jax.grad(lambda p: jnp.sum(jnp.sin(nnx.merge(graph, p)(x))))(params)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        name = jax.tree_util.keystr(path)
        assert jnp.isfinite(grad).all(), name
        if "k_bias" not in name:
            assert jnp.abs(grad).max() > 1e-6, name


def test_bf16_computes_and_answers_in_bf16():
    attention = layer(dtype=jnp.bfloat16, rope=RopeConfig(dim=16))
    x = inputs()
    out = attention(x)
    assert out.dtype == jnp.bfloat16
    paged = run_paged(attention, x, (21,), jnp.bfloat16)
    np.testing.assert_allclose(out.astype(np.float32), paged.astype(np.float32), atol=0.03)


def test_bad_sizes():
    with pytest.raises(ValueError, match="num_heads must be a positive multiple of num_kv_heads, got 3 and 2"):
        TurboAttention(48, 3, num_kv_heads=2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="in_features must be a multiple of num_heads = 5, got 48"):
        TurboAttention(48, 5, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_rope_against_float64(pairing):
    config = RopeConfig(dim=32, offset=16, pairing=pairing)
    positions = np.array([0, -3, 7, 1000003, 2**31 - 5], np.int32)
    x = np.random.default_rng(0).standard_normal((1, 5, 2, 64)).astype(np.float32)
    angle = positions[:, None].astype(np.float64) * config.inv_freq()
    first, second = (
        (np.arange(16), np.arange(16, 32)) if pairing == "half" else (np.arange(0, 32, 2), np.arange(1, 32, 2))
    )
    first, second = first + 16, second + 16
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
    expected = x.astype(np.float64)
    expected[..., first] = cos * x[..., first] - sin * x[..., second]
    expected[..., second] = cos * x[..., second] + sin * x[..., first]
    np.testing.assert_allclose(apply_rope(jnp.asarray(x), jnp.asarray(positions), config), expected, atol=1e-6)

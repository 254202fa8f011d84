"""attention_fn inside the multi-head attention of nnx and linen, against their own attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("flax")

from flax import linen, nnx

from jax_turboattn.nn import attention_fn

FEATURES, LENGTH = 32, 12


def inputs(*batch, length=LENGTH):
    return jax.random.normal(jax.random.key(1), (*batch, length, FEATURES))


def mask_of(*lead, queries=LENGTH, keys=LENGTH):
    """Random, and no query without a key: what to do with those is not the same everywhere."""
    mask = jax.random.bernoulli(jax.random.key(2), 0.5, (*lead, queries, keys))
    return mask.at[..., 0].set(True)


def nnx_attention(**options):
    return nnx.MultiHeadAttention(
        num_heads=4, in_features=FEATURES, decode=False, use_bias=True, rngs=nnx.Rngs(0), **options
    )


def linen_attention(**options):
    return linen.MultiHeadDotProductAttention(num_heads=4, **options)


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2}, {"normalize_qk": True}], ids=str)
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
def test_nnx(batch, options):
    if "num_kv_heads" in options and "num_kv_heads" not in nnx.MultiHeadAttention.__init__.__annotations__:
        pytest.skip("this flax has no num_kv_heads")
    x = inputs(*batch)
    ours, theirs = nnx_attention(attention_fn=attention_fn, **options), nnx_attention(**options)
    np.testing.assert_allclose(ours(x), theirs(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lead", [(1, 1), (2, 1), (1, 4), (2, 4)], ids=str)
def test_nnx_mask(lead):
    x, mask = inputs(2), mask_of(*lead)
    ours, theirs = nnx_attention(attention_fn=attention_fn), nnx_attention()
    np.testing.assert_allclose(ours(x, mask=mask), theirs(x, mask=mask), rtol=1e-5, atol=1e-5)
    assert jnp.abs(ours(x, mask=mask) - ours(x)).max() > 1e-2


def test_nnx_causal_and_cross():
    x, memory = inputs(2), inputs(2, length=7)
    ours, theirs = nnx_attention(attention_fn=attention_fn), nnx_attention()
    np.testing.assert_allclose(ours(x, is_causal=True), theirs(x, is_causal=True), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ours(x, memory), theirs(x, memory), rtol=1e-5, atol=1e-5)


def test_nnx_decode():
    x = inputs(2)
    ours, theirs = nnx_attention(attention_fn=attention_fn), nnx_attention()
    for module in (ours, theirs):
        module.init_cache(x.shape)
    for i in range(3):
        step = [module(x[:, i : i + 1], decode=True) for module in (ours, theirs)]
        np.testing.assert_allclose(*step, rtol=1e-5, atol=1e-5)


def test_nnx_gradients():
    x = inputs(2)

    def grads(module):
        graph, params = nnx.split(module, nnx.Param)[:2]
        rest = nnx.split(module, nnx.Param, ...)[2]
        return jax.grad(lambda p: jnp.sum(nnx.merge(graph, p, rest)(x, is_causal=True) ** 2))(params)

    ours = jax.tree.leaves(grads(nnx_attention(attention_fn=attention_fn)))
    theirs = jax.tree.leaves(grads(nnx_attention()))
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
def test_linen(batch):
    x = inputs(*batch)
    theirs = linen_attention()
    variables = theirs.init(jax.random.key(0), x)
    ours = linen_attention(attention_fn=attention_fn)
    np.testing.assert_allclose(ours.apply(variables, x), theirs.apply(variables, x), rtol=1e-5, atol=1e-5)


def test_linen_mask():
    x, mask = inputs(2), mask_of(2, 1)
    theirs = linen_attention()
    variables = theirs.init(jax.random.key(0), x)
    ours = linen_attention(attention_fn=attention_fn)
    out = ours.apply(variables, x, mask=mask)
    np.testing.assert_allclose(out, theirs.apply(variables, x, mask=mask), rtol=1e-5, atol=1e-5)
    assert jnp.abs(out - ours.apply(variables, x)).max() > 1e-2


def test_bias_and_dtype():
    query, key, value = (jax.random.normal(jax.random.key(i), (2, 5, 4, 8)) for i in range(3))
    bias = jax.random.normal(jax.random.key(3), (2, 4, 5, 5))
    expected = jax.nn.dot_product_attention(query, key, value, bias)
    np.testing.assert_allclose(attention_fn(query, key, value, bias), expected, rtol=1e-5, atol=1e-5)
    assert attention_fn(query, key, value, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    assert attention_fn(query.astype(jnp.bfloat16), key, value).dtype == jnp.float32


@pytest.mark.parametrize("module", ["nnx", "linen"])
def test_dropout_is_refused_unless_deterministic(module):
    x = inputs(2)
    if module == "nnx":
        call = nnx_attention(attention_fn=attention_fn, dropout_rate=0.1)
    else:
        made = linen_attention(attention_fn=attention_fn, dropout_rate=0.1)
        variables = made.init(jax.random.key(0), x, deterministic=True)
        call = functools.partial(made.apply, variables, rngs={"dropout": jax.random.key(1)})
    assert call(x, deterministic=True).shape == x.shape
    with pytest.raises(NotImplementedError, match="dropout_rate must be 0 unless deterministic, got 0.1"):
        call(x, deterministic=False)


def test_sown_weights_are_refused():
    x = inputs(2)
    with pytest.raises(NotImplementedError, match="module must be None"):
        nnx_attention(attention_fn=attention_fn)(x, sow_weights=True)
    made = linen_attention(attention_fn=attention_fn)
    variables = made.init(jax.random.key(0), x)
    with pytest.raises(NotImplementedError, match="module must be None"):
        made.apply(variables, x, sow_weights=True)


@pytest.mark.parametrize("name", ["einsum_dot_general", "qk_attn_weights_einsum", "attn_weights_value_einsum"])
def test_custom_einsums_are_refused(name):
    x = jnp.ones((1, 2, 1, 8))
    with pytest.raises(NotImplementedError, match=f"{name} must be None"):
        attention_fn(x, x, x, **{name: jnp.einsum})


def test_what_has_no_effect_is_refused():
    x = jnp.ones((1, 2, 1, 8))
    with pytest.raises(NotImplementedError, match="precision must be None or DEFAULT"):
        attention_fn(x, x, x, precision=jax.lax.Precision.HIGHEST)
    with pytest.raises(TypeError, match="input_positions must be left out"):
        attention_fn(x, x, x, input_positions=jnp.arange(2))
    assert attention_fn(x, x, x, input_positions=None, precision=jax.lax.Precision.DEFAULT).shape == x.shape

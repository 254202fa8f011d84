"""The decoders that the model tests run."""

import dataclasses
import functools

import pytest

pytest.importorskip("flax")

import jax
import jax.numpy as jnp
from flax import nnx

from jax_turboattn import RopeConfig
from jax_turboattn.models import weights
from jax_turboattn.models.decoder import Decoder, DecoderConfig

SMALL = DecoderConfig(
    vocab_size=61,
    hidden_size=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mlp_size=48,
    rope=RopeConfig(dim=8),
)


@functools.lru_cache
def small_decoder(implementation="xla", **changes):
    """Random, with an embedding large enough that the logits differ from token to token."""
    decoder = Decoder(dataclasses.replace(SMALL, **changes), implementation=implementation, rngs=nnx.Rngs(0))
    decoder.embedding[...] = decoder.embedding[...] * 50
    for i, name in enumerate(("q_bias", "k_bias", "v_bias", "o_bias")):
        bias = getattr(decoder.layers.attention, name)
        if bias is not None:
            bias[...] = 0.3 * jax.random.normal(jax.random.key(i), bias.shape)
    return decoder


@functools.lru_cache
def shipped_decoder(implementation="xla"):
    return weights.load(weights.shipped(), dtype=jnp.float32, implementation=implementation)


@functools.partial(jax.jit, static_argnames=("graph", "dropout_rate"))
def _full(graph, params, tokens, dropout_rate, dropout_key):
    return nnx.merge(graph, params)(tokens, dropout_rate=dropout_rate, dropout_key=dropout_key)


def full(decoder, tokens, dropout_rate=0.0, dropout_key=None):
    """`decoder(tokens)`, compiled once for decoders that are alike."""
    return _full(*nnx.split(decoder), tokens, dropout_rate, dropout_key)

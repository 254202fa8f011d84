"""Rotation of whole sequences in jnp: what the fused step's prologue does to new tokens, for the training path."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np

from ..rope import RopeConfig


def apply_rope(x: jax.Array, positions: jax.Array, config: RopeConfig, rope_base: jax.Array | None = None) -> jax.Array:
    """Rotates the columns `[offset, offset + dim)` of each head.

    Args:
      x: float32 [B, T, heads, D].
      positions: int32 [T] or [B, T]; with `config.sections` they may end in an axis of 3 (temporal, height, width).
      config: frequencies, pairing and rotated columns.
      rope_base: float32 [B], required by kind "dynamic" and refused by the others.
    Returns:
      float32 [B, T, heads, D].
    Raises:
      ValueError: `rope_base` is missing or superfluous, or `x` has too few columns.
    """
    end = config.offset + config.dim
    if x.shape[-1] < end:
        raise ValueError(f"apply_rope: rope must rotate columns of D = {x.shape[-1]}, got columns up to {end}")
    if (rope_base is not None) != (config.kind == "dynamic"):
        raise ValueError(
            f"apply_rope: rope_base must be given exactly for kind 'dynamic', got {rope_base} for {config.kind!r}"
        )
    if config.sections is not None and positions.ndim > 1 and positions.shape[-1] == 3:
        positions = jnp.take(positions, jnp.asarray(_section_axes(config)), axis=-1)  # [..., T, dim / 2]
    else:
        positions = positions[..., None]
    if rope_base is None:
        angle = _fixed_point_angle(positions, config.turns())
    else:
        exponent = -2.0 * jnp.arange(config.dim // 2, dtype=jnp.float32) / config.dim
        angle = positions * jnp.power(rope_base[:, None, None], exponent)
    factor = jnp.float32(config.resolved_attention_factor)
    cos, sin = (jnp.expand_dims(f(angle) * factor, -2) for f in (jnp.cos, jnp.sin))  # over the heads

    rotated = x[..., config.offset : end]
    if config.pairing == "half":
        first, second = jnp.split(rotated, 2, axis=-1)
    else:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    pair = (first * cos - second * sin, second * cos + first * sin)
    if config.pairing == "half":
        rotated = jnp.concatenate(pair, axis=-1)
    else:
        rotated = jnp.stack(pair, axis=-1).reshape(rotated.shape)
    return jnp.concatenate([x[..., : config.offset], rotated, x[..., end:]], axis=-1)


def _fixed_point_angle(positions, turns):
    """Angle in [-pi, pi) from the top 32 bits of position * turns modulo 2^64, exact for every int32 position."""
    high, low = (jnp.asarray(word) for word in np.moveaxis(turns, -1, 0))
    unsigned = positions.astype(jnp.uint32)
    # Upper word of unsigned * low from 16-bit halves: no 64-bit integers without jax_enable_x64.
    a, b = unsigned >> 16, unsigned & 0xFFFF
    c, d = low >> 16, low & 0xFFFF
    middle = a * d + ((b * d) >> 16)  # <= (2^16 - 1)^2 + 2^16 - 1 < 2^32, and so is the next line
    carry = a * c + (middle >> 16) + ((b * c + (middle & 0xFFFF)) >> 16)
    phase = unsigned * high + carry
    phase = jnp.where(positions < 0, phase - low, phase)  # position = unsigned - 2^32
    return phase.astype(jnp.int32).astype(jnp.float32) * jnp.float32(math.pi / 2**31)


def _section_axes(config):
    """Position axis (0 temporal, 1 height, 2 width) of each pair: int32 [dim / 2]."""
    temporal, height, width = config.sections
    pair = np.arange(config.dim // 2)
    if not config.sections_interleaved:
        return np.select([pair < temporal, pair < temporal + height], [0, 1], 2)
    axis, turn = pair % 3, pair // 3
    return np.where((axis == 1) & (turn < height), 1, np.where((axis == 2) & (turn < width), 2, 0))

"""Rotary position embedding in jnp: the prologue of the fused step on `xla`, and `apply_rope` for training."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import checks
from .rope import RopeConfig


def apply_rope(
    x: jax.Array, positions: jax.Array, rope: RopeConfig, *, rope_base: jax.Array | None = None
) -> jax.Array:
    """Rotates queries or keys as the fused step does, for models that call `attention`. Differentiable.

    Args:
      x: [..., T, heads, D] of a floating dtype; rotated in float32 and rounded once.
      positions: int32 [..., T]; with `rope.sections` [..., T, 3] (temporal, height, width). Leading axes broadcast.
      rope: frequencies, pairing, rotated columns.
      rope_base: float32 [...], the base of each sequence (x's axes before T), for rope kind "dynamic".
    Returns:
      x's shape and dtype.
    Raises:
      ValueError: rope_base is missing or superfluous, or x has too few columns.
    """
    if rope.offset + rope.dim > x.shape[-1]:
        rule = f"rotate columns of the head: offset + dim <= D = {x.shape[-1]}"
        raise checks.value_error("apply_rope", "rope", rule, f"{rope.offset} + {rope.dim}")
    if (rope_base is None) == (rope.kind == "dynamic"):
        got = "None" if rope_base is None else f"kind {rope.kind!r}"
        raise checks.value_error("apply_rope", "rope_base", "come with rope kind 'dynamic', and only with it", got)
    if rope.sections and positions.shape[-1:] != (3,):
        raise checks.value_error("apply_rope", "positions", "end in an axis of 3 for a rope with sections", positions.shape)
    if rope_base is None:
        turns = tuple(jnp.asarray(word) for word in np.moveaxis(rope.turns(), -1, 0))
    else:
        turns = dynamic_turns(rope_base[..., None], rope.dim)
    return rotate(x.astype(jnp.float32), rope, *cos_sin(rope, positions, turns)).astype(x.dtype)


def cos_sin(rope: RopeConfig, position: jax.Array, turns: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """(cos, sin), float32 [..., T, dim / 2], attention factor included.

    position: int32 [..., T], with sections [..., T, 3]; turns: two uint32 words that broadcast to the result.
    """
    position = position[..., _section_axes(rope)] if rope.sections else position[..., None]
    angle = _phases(position, *turns)
    factor = np.float32(rope.resolved_attention_factor)
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor


def rotate(x: jax.Array, rope: RopeConfig, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """x [..., T, heads, D], float32, with its rotary columns turned by (cos, sin) [..., T, dim / 2]."""
    before, block, after = jnp.split(x, [rope.offset, rope.offset + rope.dim], axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    if rope.pairing == "half":
        x0, x1 = jnp.split(block, 2, axis=-1)
        turned = jnp.concatenate([cos * x0 - sin * x1, cos * x1 + sin * x0], axis=-1)
    else:
        x0, x1 = block[..., 0::2], block[..., 1::2]
        turned = jnp.stack([cos * x0 - sin * x1, cos * x1 + sin * x0], axis=-1).reshape(block.shape)
    return jnp.concatenate([before, turned, after], axis=-1)


def _high_word(a: jax.Array, b: jax.Array) -> jax.Array:
    """The upper 32 bits of the 64-bit product of uint32 a and b, from products of 16-bit halves."""
    mask = jnp.uint32(0xFFFF)
    a_hi, a_lo, b_hi, b_lo = a >> 16, a & mask, b >> 16, b & mask
    low = a_lo * b_lo
    middle = a_hi * b_lo + (low >> 16)  # at most (2^16 - 1)^2 + 2^16 - 1: fits
    other = a_lo * b_hi + (middle & mask)
    return a_hi * b_hi + (middle >> 16) + (other >> 16)


def _phases(position: jax.Array, turns_hi: jax.Array, turns_lo: jax.Array) -> jax.Array:
    """position * turns modulo one turn, in radians of [-pi, pi), float32.

    position: int32. turns: a 64-bit fixed-point fraction of a turn in two uint32 words. The product modulo 2^64 wraps
    just as angles do; its upper word, read as signed, is the angle.
    """
    p = position.astype(jnp.uint32)
    word = turns_hi * p + _high_word(turns_lo, p)
    word = word - jnp.where(position < 0, turns_lo, jnp.uint32(0))  # the borrow of p's sign extension to 64 bits
    return lax.bitcast_convert_type(word, jnp.int32).astype(jnp.float32) * np.float32(math.pi / 2**31)


def dynamic_turns(base: jax.Array, dim: int) -> tuple[jax.Array, jax.Array]:
    """Turns of base ** (-2 j / dim) for float32 base [...]: two uint32 words [..., dim / 2].

    The frequency is at most 1 and within 2e-7 of the exact one, which is all that float32 powers give; as 31-bit fixed
    point it loses nothing more, and 2^33 / 2 pi is an integer to 1 part in 10^10.
    """
    exponent = np.asarray(-2.0 * np.arange(dim // 2) / dim, np.float32)
    frequency = jnp.clip(jnp.power(base[..., None], exponent), 0.0, 1.0)
    fixed = (frequency * 2.0**31).astype(jnp.uint32)
    turn = jnp.uint32(round(2**33 / (2 * math.pi)))
    return _high_word(fixed, turn), fixed * turn


def _section_axes(rope: RopeConfig) -> np.ndarray:
    """Which of the three position axes turns each pair, int [dim / 2]."""
    pair = np.arange(rope.dim // 2)
    t, h, w = rope.sections
    if not rope.sections_interleaved:
        return np.where(pair < t, 0, np.where(pair < t + h, 1, 2))
    axis, cycle = pair % 3, pair // 3
    return np.where((axis == 1) & (cycle < h), 1, np.where((axis == 2) & (cycle < w), 2, 0))

"""The cache codecs in jnp: int8, int4 and fp8 rows, byte for byte those of every implementation.

int8 and int4: each row of D elements has a scale and a zero (its minimum), both in the dtype E of the row; a code is
`round_half_even((x - zero) / scale)`. fp8 e4m3: `x / scale` with a float32 scale that the caller chose. All steps are
float32 with one rounding each; XLA reorders and drops some of them unless it is kept from it, as the comments say.
`jax_turboattn.testing.codecs` is the same in numpy, written independently.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .spec import INTEGER_KV_DTYPES


def round_to(x: jax.Array, dtype: Any) -> jax.Array:
    """float32 values rounded to those of `dtype`.

    XLA may drop a pair of conversions there and back (18 % of the int8 codes of bfloat16 rows changed), but not these.
    reduce_precision has no float16 subnormals, so multiples of 2^-24 are rounded in fixed point.
    """
    dtype = jnp.dtype(dtype)
    if dtype == jnp.bfloat16:
        return lax.reduce_precision(x, 8, 7)
    if dtype == jnp.float16:
        return jnp.where(jnp.abs(x) < 2.0**-14, jnp.round(x * 2.0**24) * 2.0**-24, lax.reduce_precision(x, 5, 10))
    return x


def _saturate(x: jax.Array, finite: jax.Array, dtype: Any) -> jax.Array:
    """float32 values in dtype, clipped to its finite range where `finite`."""
    limit = float(jnp.finfo(dtype).max)
    return round_to(jnp.where(finite, jnp.clip(x, -limit, limit), x), dtype).astype(dtype)


def _pack_int4(codes: jax.Array) -> jax.Array:
    """uint8 [..., D] below 16 -> [..., D/2]: elements 0 2 | 4 6 | 1 3 | 5 7 of eight, low nibble first."""
    pairs = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 8, 2, 2, 2)  # element = 4 i + 2 j + parity
    pairs = jnp.moveaxis(pairs, -1, -3)  # [..., parity, i, j]
    packed = pairs[..., 0] | (pairs[..., 1] << 4)
    return packed.reshape(*codes.shape[:-1], codes.shape[-1] // 2)


def _unpack_int4(packed: jax.Array) -> jax.Array:
    """[..., D/2] -> uint8 [..., D] below 16."""
    pairs = packed.reshape(*packed.shape[:-1], packed.shape[-1] // 4, 2, 2)  # [..., parity, i]
    codes = jnp.moveaxis(jnp.stack([pairs & 15, pairs >> 4], axis=-1), -3, -1)  # [..., i, j, parity]
    return codes.reshape(*packed.shape[:-1], packed.shape[-1] * 2)


def _product(code: jax.Array, scale: jax.Array) -> jax.Array:
    """code * scale rounded to float32 before anything is added to it; code below 2^8.

    The CPU backend contracts `a * b + c` into one rounding. Split in two, each product is exact, and the one rounding
    left is that of their sum. Small scales are lifted first, or their lower part would be flushed as a denormal.
    """
    small = scale < 2.0**-64
    lifted = scale * jnp.where(small, 2.0**64, 1.0)
    bits = lax.bitcast_convert_type(lifted, jnp.uint32) & jnp.uint32(0xFFFFF000)
    high = lax.bitcast_convert_type(bits, jnp.float32)
    low = jnp.where(jnp.isfinite(scale), lifted - high, 0.0)
    return (code * high + code * low) * jnp.where(small, 2.0**-64, 1.0)


def decode(data: jax.Array, params: jax.Array | None, kv_dtype: str, dtype: Any) -> jax.Array:
    """Stored rows [..., D'] as rows of E [..., D] (contract section 3).

    params: int8 and int4: E [..., 2], (scale, zero) of each row. fp8: float32, broadcast against the rows.
    """
    if params is None:
        return data
    if kv_dtype in INTEGER_KV_DTYPES:
        codes = (_unpack_int4(data) if kv_dtype == "int4" else data).astype(jnp.float32)
        scale, zero = params[..., :1].astype(jnp.float32), params[..., 1:].astype(jnp.float32)
        product = _product(codes, scale) if dtype == "float32" else codes * scale  # 8 bits times E's 11 are exact
        return _saturate(product + zero, jnp.isfinite(scale) & jnp.isfinite(zero), dtype)
    values = data.astype(jnp.float32)
    return _saturate(values * params, jnp.isfinite(values) & jnp.isfinite(params), dtype)


def encode(x: jax.Array, kv_dtype: str, fp8_scale: jax.Array | None = None) -> tuple[jax.Array, jax.Array | None]:
    """Rows x [..., D] of dtype E as (stored rows [..., D'], E [..., 2] parameters or None) (contract section 3)."""
    dtype = x.dtype
    values = x.astype(jnp.float32)
    if kv_dtype in INTEGER_KV_DTYPES:
        top = 255 if kv_dtype == "int8" else 15
        finite = jnp.all(jnp.isfinite(values), axis=-1, keepdims=True)
        values = jnp.where(finite, values, 0.0)
        zero = jnp.min(values, axis=-1, keepdims=True)  # already a value of E
        # Which of +0 and -0 is the minimum depends on the order: +0 is stored. By bits, since == may flush subnormals.
        negative_zero = lax.bitcast_convert_type(zero, jnp.uint32) == np.uint32(1 << 31)
        zero = jnp.where(negative_zero, 0.0, zero)
        spread = jnp.max(values, axis=-1, keepdims=True) - zero
        scale = round_to(spread * np.float32(1 / top), dtype)
        codes = jnp.round(_quotient(values - zero, scale))
        codes = jnp.where((scale == 0) | jnp.isnan(codes), 0.0, jnp.clip(codes, 0, top)).astype(jnp.uint8)
        params = jnp.where(finite, jnp.concatenate([scale, zero], axis=-1), jnp.nan).astype(dtype)
        return (_pack_int4(codes) if kv_dtype == "int4" else codes), params
    if kv_dtype == "float8_e4m3fn":
        quotient = _quotient(values, fp8_scale)
        quotient = jnp.where(jnp.isfinite(quotient), jnp.clip(quotient, -448.0, 448.0), jnp.nan)
        return jnp.where(fp8_scale == 0, 0.0, quotient).astype(jnp.float8_e4m3fn), None
    return x, None


def _quotient(values: jax.Array, scale: jax.Array) -> jax.Array:
    """values / scale in float32, rounded once.

    The divisor is broadcast out of XLA's sight: it would divide once a row and multiply by the reciprocal. And XLA's GPU
    division is off by up to 2 ulp (3 of 63,488 int8 codes differed on an H100), so the remainder, of exact products of
    halves, corrects it. Not for scales whose products could be subnormal: those may be flushed.
    """
    divisor = lax.optimization_barrier(jnp.broadcast_to(scale, values.shape))
    quotient = values / divisor
    high, low = _halves(quotient)
    scale_high, scale_low = _halves(divisor)
    remainder = ((values - high * scale_high) - high * scale_low - low * scale_high) - low * scale_low
    exact = (jnp.abs(divisor) >= 2.0**-64) & jnp.isfinite(quotient) & jnp.isfinite(remainder) & (remainder != 0)
    return jnp.where(exact, quotient + remainder / divisor, quotient)  # -0 keeps its sign


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x as a sum of two floats of 12 significant bits each."""
    bits = lax.bitcast_convert_type(x, jnp.uint32) & jnp.uint32(0xFFFFF000)
    high = lax.bitcast_convert_type(bits, jnp.float32)
    return high, x - high

"""Encoders and decoders of the key/value cache dtypes, in numpy, written from the contract and not from a kernel.

Every operation is float32 with one rounding. A row is the last axis: one token of one head, D elements. E is the query
dtype: float32, bfloat16 or float16 (bfloat16 and float8 come from `ml_dtypes`).
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
FP8_MAX = np.float32(448.0)
SMALLEST_NORMAL = np.float32(
    2.0**-126
)  # of float32 and of bfloat16; float16 scales may be subnormal, since float32 holds them as normals
BITS = {"int8": 8, "int4": 4}
INT4_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # element held by nibble 0 (least significant) .. 7 of a little-endian uint32


def pack_int4(codes: Array) -> Array:
    """[..., D] uint8 codes below 16, D a multiple of 8 -> [..., D/2] uint8, two codes a byte."""
    if codes.shape[-1] % 8:
        raise ValueError(f"pack_int4: codes must have a last axis that is a multiple of 8, got {codes.shape[-1]}")
    nibbles = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 8, 8)[..., INT4_ORDER]
    packed: Array = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)
    return packed.astype(np.uint8).reshape(*codes.shape[:-1], codes.shape[-1] // 2)


def unpack_int4(packed: Array) -> Array:
    """[..., D/2] uint8 -> [..., D] uint8 codes below 16."""
    octets = packed.reshape(*packed.shape[:-1], packed.shape[-1] // 4, 4)
    codes = np.empty((*octets.shape[:-1], 8), np.uint8)
    codes[..., INT4_ORDER] = np.stack([octets & 15, octets >> 4], axis=-1).reshape(codes.shape)
    return codes.reshape(*packed.shape[:-1], packed.shape[-1] * 2)


def encode_int(x: Array, kv_dtype: str) -> tuple[Array, Array]:
    """Rows x [..., D] of dtype E -> codes, uint8 [..., D] or packed [..., D/2], and (scale, zero), E [..., 2]."""
    bits, dtype = BITS[kv_dtype], x.dtype
    top = np.float32(2**bits - 1)
    values = x.astype(np.float32)
    finite = np.isfinite(values).all(-1, keepdims=True)
    values = np.where(finite, values, np.float32(0))
    with np.errstate(all="ignore"):
        zero = values.min(-1, keepdims=True).astype(dtype)
        zero = np.where(zero == 0, np.zeros_like(zero), zero)  # which of +0 and -0 is the minimum depends on the order
        spread: Array = values.max(-1, keepdims=True) - values.min(-1, keepdims=True)
        scale = (spread * np.float32(1.0 / float(top))).astype(dtype)
        if dtype != np.float16:
            scale = np.where(scale.astype(np.float32) < SMALLEST_NORMAL, np.zeros_like(scale), scale)
        stored_scale, stored_zero = scale.astype(np.float32), zero.astype(np.float32)
        codes = np.rint((values - stored_zero) / stored_scale)
        codes = np.where(stored_scale == 0, np.float32(0), np.fmin(np.fmax(codes, np.float32(0)), top)).astype(
            np.uint8
        )  # fmax: NaN to 0
        nan = np.full_like(scale, np.nan)
    params = np.concatenate([np.where(finite, scale, nan), np.where(finite, zero, nan)], axis=-1)
    return (pack_int4(codes) if kv_dtype == "int4" else codes), params


def decode_int(data: Array, params: Array, kv_dtype: str, rounded: bool = True) -> Array:
    """E(code * scale + zero): rows [..., D] of params' dtype, saturated to its range if the parameters are finite.

    rounded=False: float64, before the rounding to E.
    """
    real = np.float32 if rounded else np.float64
    codes = (unpack_int4(data) if kv_dtype == "int4" else data).astype(real)
    scale, zero = params[..., 0:1].astype(real), params[..., 1:2].astype(real)
    with np.errstate(all="ignore"):
        values = _saturate(codes * scale + zero, np.isfinite(scale) & np.isfinite(zero), params.dtype)
    return values.astype(params.dtype) if rounded else values


def encode_fp8(x: Array, scale: Array) -> Array:
    """float8_e4m3fn of x / scale; scale is float32 and broadcasts against x [..., D]."""
    with np.errstate(all="ignore"):
        quotient = x.astype(np.float32) / scale.astype(np.float32)
        finite = np.isfinite(quotient)
        clipped = np.where(finite, np.clip(quotient, -FP8_MAX, FP8_MAX), np.float32(np.nan))
        return np.where(scale == 0, np.float32(0), clipped).astype(FP8)


def decode_fp8(data: Array, scale: Array, dtype: Any, rounded: bool = True) -> Array:
    """E(x * scale), rows of `dtype`; rounded=False: float64, before the rounding to E."""
    real = np.float32 if rounded else np.float64
    with np.errstate(all="ignore"):
        codes = data.astype(real)
        values = _saturate(codes * scale.astype(real), np.isfinite(codes) & np.isfinite(scale), dtype)
    return values.astype(dtype) if rounded else values


def _saturate(values: Array, finite: Array, dtype: Any) -> Array:
    """Values within the range of `dtype`, where `finite`."""
    limit = values.dtype.type(ml_dtypes.finfo(dtype).max)
    return np.where(finite, np.clip(values, -limit, limit), values)

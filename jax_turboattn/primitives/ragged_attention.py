"""Packed attention over packed keys: sequences are row ranges of [T, H, D] and [S, K, D]."""

from __future__ import annotations

import functools

import jax

from ..spec import AttnSpec
from . import attention_vjp
from .common import Definition, define

_AXES = dict(
    query="t h d",
    key="s k d",
    value="s k e",
    q_ranges="n w",
    kv_ranges="n w",
    window="n w",
    sinks="h",
    alibi_slopes="h",
)


def _results(spec, named):
    T, H, _ = named["query"].shape
    return [((T, H, spec.value_dim), spec.out_dtype), ((T, H), "float32")]


ragged_attention_p = define(
    Definition(
        op="ragged_attention",
        operand_axes=lambda spec: _AXES,
        result_axes=lambda spec: ["t h e", "t h"],
        results=_results,
    )
)


def ragged_attention(spec: AttnSpec, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(out [T, H, Dv], lse float32 [T, H]); differentiable in its floating operands."""
    return _ragged_attention(spec, *attention_vjp.alike(operands))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ragged_attention(spec, *operands):
    out, lse = ragged_attention_p.bind(*operands, spec=spec)
    return out, lse


def _forward(spec, *operands):
    out, lse = _ragged_attention(spec, *operands)
    return (out, lse), (operands, out, lse)


def _backward(spec, residuals, cotangents):
    operands, out, lse = residuals
    grads = attention_vjp.backward(spec, dict(zip(spec.operands, operands)), out, lse, *cotangents)
    return tuple(grads.get(name) for name in spec.operands)


_ragged_attention.defvjp(_forward, _backward)

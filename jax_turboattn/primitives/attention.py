"""Dense attention: [B, T, H, D] queries over [B, S, K, D] keys."""

from __future__ import annotations

import functools

import jax

from ..spec import AttnSpec
from . import attention_vjp
from .common import Definition, define

_AXES = dict(
    query="b t h d",
    key="b s k d",
    value="b s k e",
    query_lens="b",
    kv_lens="b",
    query_offset="b",
    segment_ids_q="b t",
    segment_ids_kv="b s",
    window="b w",
    sinks="h",
    alibi_slopes="h",
    # Broadcastable [B|1, H|1, T|1, S|1] arrays run on xla alone, whose partitioning needs no rule of ours.
    bias="b1 h1 t1 s1",
    mask="b2 h2 t2 s2",
)


def _results(spec, named):
    B, T, H, _ = named["query"].shape
    return [((B, T, H, spec.value_dim), spec.out_dtype), ((B, T, H), "float32")]


attention_p = define(
    Definition(
        op="attention",
        operand_axes=lambda spec: _AXES,
        result_axes=lambda spec: ["b t h e", "b t h"],
        results=_results,
    )
)


def attention(spec: AttnSpec, *operands: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(out [B, T, H, Dv], lse float32 [B, T, H]); differentiable in its floating operands."""
    return _attention(spec, *attention_vjp.alike(operands))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(spec, *operands):
    out, lse = attention_p.bind(*operands, spec=spec)
    return out, lse


def _forward(spec, *operands):
    out, lse = _attention(spec, *operands)
    return (out, lse), (operands, out, lse)


def _backward(spec, residuals, cotangents):
    operands, out, lse = residuals
    grads = attention_vjp.backward(spec, dict(zip(spec.operands, operands)), out, lse, *cotangents)
    return tuple(grads.get(name) for name in spec.operands)


_attention.defvjp(_forward, _backward)

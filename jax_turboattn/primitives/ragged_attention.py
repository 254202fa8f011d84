"""Packed attention over packed keys: sequences are row ranges of [T, H, D] and [S, K, D]."""

from __future__ import annotations

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

ragged_attention = attention_vjp.differentiable(ragged_attention_p)

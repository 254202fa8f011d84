"""Dense attention: [B, T, H, D] queries over [B, S, K, D] keys."""

from __future__ import annotations

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

attention = attention_vjp.differentiable(attention_p)

"""Attention from pages: packed queries [T, H, D], or the same number for each sequence [B, Q, H, D]."""

from __future__ import annotations

from .common import Definition, define
from .paged import PACKED, UNIFORM, cache_axes, sequence_axes


def _rows(spec):
    return "t" if spec.packed else "b r"


def _axes(spec):
    return dict(
        cache_axes(spec.kv_dtype, spec.stacked),
        **sequence_axes(PACKED if spec.packed else UNIFORM),
        query=f"{_rows(spec)} h d",
        sinks="h",
        alibi_slopes="h",
        plan="blocks eight",
        tree_mask="t j",
    )


def _results(spec, named):
    shape = named["query"].shape[:-1]
    return [((*shape, spec.value_dim), spec.out_dtype), (shape, "float32")]


paged_attention_p = define(
    Definition(
        op="paged_attention",
        operand_axes=_axes,
        result_axes=lambda spec: [f"{_rows(spec)} h e", f"{_rows(spec)} h"],
        results=_results,
        not_differentiable="train with attention or ragged_attention, which keep keys and values outside a cache",
    )
)

"""The fused step: prologue of q, k and v, append, then attention over what was stored."""

from __future__ import annotations

from .common import Definition, define, written_axes, written_shapes
from .paged import PACKED, cache_axes, sequence_axes


def _axes(spec):
    return dict(
        cache_axes(spec.attn.kv_dtype, spec.stacked),
        **sequence_axes(PACKED),
        query="t h d",
        key="t k d",
        value="t k e",
        query_bias="h d",
        key_bias="k d",
        value_bias="k e",
        rope_turns="j two",
        positions="t three" if spec.append.rope is not None and spec.append.rope.sections else "t",
        sinks="h",
        alibi_slopes="h",
        plan="blocks eight",
        tree_mask="t u",
    )


def _results(spec, named):
    T, H, _ = named["query"].shape
    return [*written_shapes(spec, named), ((T, H, spec.attn.value_dim), spec.attn.out_dtype), ((T, H), "float32")]


paged_attention_step_p = define(
    Definition(
        op="paged_attention_step",
        operand_axes=_axes,
        result_axes=lambda spec: [*written_axes(spec, _axes(spec)), "t h e", "t h"],
        results=_results,
        not_differentiable="train with attention or ragged_attention, which keep keys and values outside a cache",
    )
)

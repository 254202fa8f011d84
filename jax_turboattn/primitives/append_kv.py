"""Bias, RoPE, encode and store of new keys and values, in place."""

from __future__ import annotations

from .common import Definition, define, written_axes, written_shapes
from .paged import PACKED, cache_axes, sequence_axes


def _axes(spec):
    return dict(
        cache_axes(spec.kv_dtype, spec.stacked),
        **sequence_axes(PACKED),
        key="t k d",
        value="t k e",
        key_bias="k d",
        value_bias="k e",
        rope_turns="j two",
        positions="t three" if spec.rope is not None and spec.rope.sections else "t",
    )


append_kv_p = define(
    Definition(
        op="append_kv",
        operand_axes=_axes,
        result_axes=lambda spec: written_axes(spec, _axes(spec)),
        results=written_shapes,
        not_differentiable="a cache is written in place; take gradients through attention or ragged_attention",
    )
)

"""Pages to contiguous, dequantised keys and values."""

from __future__ import annotations

from .common import Definition, define
from .paged import UNIFORM, cache_axes, sequence_axes


def _axes(spec):
    return dict(cache_axes(spec.kv_dtype, spec.stacked), **sequence_axes(UNIFORM))


def _results(spec, named):
    B, M = named["page_table"].shape
    tokens, heads = M * spec.page_size, named["key_cache"].shape[-3]
    return [
        ((B, tokens, heads, spec.head_dim), spec.out_dtype),
        ((B, tokens, heads, spec.value_dim), spec.out_dtype),
    ]


gather_kv_p = define(
    Definition(
        op="gather_kv",
        operand_axes=_axes,
        result_axes=lambda spec: ["b s k d", "b s k e"],
        results=_results,
        not_differentiable="a cache holds no gradients",
    )
)

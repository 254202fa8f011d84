"""Pages to contiguous, dequantised keys and values."""

from __future__ import annotations

from .common import Definition, define
from .paged import UNIFORM, cache_axes, sequence_axes


def _axes(spec):
    return dict(cache_axes(spec.kv_dtype), **sequence_axes(UNIFORM))


def _results(spec, named):
    B, M = named["page_table"].shape
    tokens, heads = M * spec.page_size, named["key_cache"].shape[2]
    return [
        ("b s k d", (B, tokens, heads, spec.head_dim), spec.out_dtype),
        ("b s k e", (B, tokens, heads, spec.value_dim), spec.out_dtype),
    ]


gather_kv_p = define(
    Definition(
        op="gather_kv",
        operand_axes=_axes,
        results=_results,
        not_differentiable="a cache holds no gradients",
    )
)

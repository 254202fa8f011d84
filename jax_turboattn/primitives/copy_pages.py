"""Page to page copies inside one pool, in place."""

from __future__ import annotations

from .common import Definition, define, written_axes, written_shapes
from .paged import cache_axes


def _axes(spec):
    return dict(cache_axes(spec.kv_dtype, spec.stacked), layer="n", source="n", destination="n")


copy_pages_p = define(
    Definition(
        op="copy_pages",
        operand_axes=_axes,
        result_axes=lambda spec: written_axes(spec, _axes(spec)),
        results=written_shapes,
        not_differentiable="a cache is written in place",
    )
)

"""Page to page copies inside one pool, in place."""

from __future__ import annotations

from .common import Definition, define, written_results
from .paged import cache_axes


def _axes(spec):
    return dict(cache_axes(spec.kv_dtype), layer="n", source="n", destination="n")


copy_pages_p = define(
    Definition(
        op="copy_pages",
        operand_axes=_axes,
        results=lambda spec, named: written_results(spec, named, _axes(spec)),
        not_differentiable="a cache is written in place",
    )
)

"""Merge of partial results over disjoint keys by their log-sum-exp."""

from __future__ import annotations

from .common import Definition, define

_AXES = dict(outs="r t k e", lses="r t k", sinks="k")


def _results(spec, named):
    _, T, H, Dv = named["outs"].shape
    return [("t k e", (T, H, Dv), spec.out_dtype), ("t k", (T, H), "float32")]


merge_partials_p = define(
    Definition(
        op="merge_partials",
        operand_axes=lambda spec: _AXES,
        results=_results,
        not_differentiable="merge float32 results of attention with jnp, or train without splitting the keys",
    )
)

"""Merge of partial results over disjoint keys by their log-sum-exp."""

from __future__ import annotations

from .common import Definition, define

_AXES = dict(outs="r t k e", lses="r t k", sinks="k")


def _results(spec, named):
    _, T, H, Dv = named["outs"].shape
    return [((T, H, Dv), spec.out_dtype), ((T, H), "float32")]


merge_partials_p = define(
    Definition(
        op="merge_partials",
        operand_axes=lambda spec: _AXES,
        result_axes=lambda spec: ["t k e", "t k"],
        results=_results,
        not_differentiable="merge float32 results of attention with jnp, or train without splitting the keys",
    )
)

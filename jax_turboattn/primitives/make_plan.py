"""The schedule of decode calls: which part of their work each block of a grid has."""

from __future__ import annotations

import jax.numpy as jnp
from jax.interpreters import batching

from ..spec import PLAN_SHAPE
from .common import Definition, define
from .paged import PACKED, sequence_axes

make_plan_p = define(
    Definition(
        op="make_plan",
        operand_axes=lambda spec: sequence_axes(PACKED),  # one plan for all sequences, wherever they are
        result_axes=lambda spec: ["blocks eight"],
        results=lambda spec, named: [(PLAN_SHAPE, "int32")],
        not_differentiable="it is a schedule",
    )
)


def _batch(args, dims, *, spec):
    """Zeros: calls that are folded into one have more sequences than a plan is for, and plan for themselves."""
    return [jnp.zeros(PLAN_SHAPE, jnp.int32)], [None]


batching.primitive_batchers[make_plan_p] = _batch

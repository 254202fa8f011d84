"""What all primitives share: types, batching, partitioning and lowering, derived from one table of axis names.

A primitive is two JAX primitives. The outer one carries the types and the batching rule; its lowering wraps the inner
one in custom_partitioning, so that heads and batch shard without a gather; the inner one lowers to the implementation
that the platform and the spec select.

Axis names (tokens): `b` batch, `k` kv heads, `h` query heads (kv head major, so a shard of kv heads holds its query
heads), the others are never sharded. A primitive says which tokens each operand and result has; everything else follows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from .. import backends
from ..backends import ffi, pallas, xla
from ..spec import AttnSpec, MergeSpec, Spec, StepSpec, on_stacked_cache, without_plan, written_caches

Named = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Definition:
    """One primitive.

    Attributes:
      op: its name.
      operand_axes: spec -> {operand name: axis tokens}, for the operands that may be present.
      result_axes: spec -> axis tokens of each result.
      results: (spec, {name: aval}) -> [(shape, dtype)].
      not_differentiable: what to say under differentiation; None when a custom_vjp stands above the primitive.
    """

    op: str
    operand_axes: Callable[[Spec], dict[str, str]]
    result_axes: Callable[[Spec], list[str]]
    results: Callable[[Spec, Named], list[tuple[tuple[int, ...], Any]]]
    not_differentiable: str | None = None


def define(definition: Definition) -> Primitive:
    """Builds the two primitives of `definition` and returns the outer one. Bind it as `p.bind(*operands, spec=spec)`."""
    outer = Primitive(f"turboattn_{definition.op}")
    inner = Primitive(f"turboattn_{definition.op}_local")
    abstract = functools.partial(_abstract_eval, definition)
    for primitive in (outer, inner):
        primitive.multiple_results = True
        primitive.def_abstract_eval(abstract)

    jitted = jax.jit(lambda *operands, spec: outer.bind(*operands, spec=spec), static_argnames="spec")
    outer.def_impl(lambda *operands, spec: jitted(*operands, spec=spec))

    @functools.lru_cache(maxsize=None)
    def partitioned(spec):
        return _partitioned(definition, inner, spec)

    def lower_outer(*operands, spec):
        return partitioned(spec)(*operands)

    mlir.register_lowering(outer, mlir.lower_fun(lower_outer, multiple_results=True))
    _needs_devices_during_lowering(outer)
    for platform in ("cpu", "cuda", None):
        mlir.register_lowering(inner, functools.partial(_lower_inner, platform), platform=platform)
    batching.primitive_batchers[outer] = functools.partial(_batch, definition, outer)
    if definition.not_differentiable is not None:

        def refuse(primals, tangents, *, spec):
            raise NotImplementedError(f"{definition.op} is not differentiable; {definition.not_differentiable}")

        ad.primitive_jvps[outer] = refuse
    return outer


def _needs_devices_during_lowering(primitive: Primitive) -> None:
    # custom_partitioning below a primitive asserts that this set names it. The set is private to JAX (its own cuDNN
    # attention uses it); if it moves, lowering fails loudly in the first sharding test.
    from jax._src import dispatch

    dispatch.prim_requires_devices_during_lowering.add(primitive)


# --- types ---------------------------------------------------------------------------------------------------------


def _tokens(definition: Definition, spec: Spec) -> tuple[list[list[str]], list[list[str]]]:
    """Axis tokens of the operands that are present, and of the results."""
    axes = definition.operand_axes(spec)
    return [axes[name].split() for name in spec.operands], [axes.split() for axes in definition.result_axes(spec)]


def _abstract_eval(definition: Definition, *avals, spec):
    named = dict(zip(spec.operands, avals))
    tokens, result_tokens = _tokens(definition, spec)
    varying = frozenset().union(*(a.manual_axis_type.varying for a in avals))
    results = []
    for axes, (shape, dtype) in zip(result_tokens, definition.results(spec, named)):
        sharding = _sharding(avals, tokens, axes)
        aval = avals[0].update(shape=shape, dtype=jnp.dtype(dtype), weak_type=False, sharding=sharding)
        if varying:  # the union: a replicated query over device-dependent pages gives device-dependent rows
            aval = aval.update(manual_axis_type=aval.manual_axis_type.update(varying=varying))
        results.append(aval)
    return results


def _sharding(avals, tokens, axes: list[str]):
    """In explicit-sharding mode a result axis is sharded like the first operand axis of the same token."""
    mesh = avals[0].sharding.mesh
    spec = []
    for axis in axes:
        found = (
            a.sharding.spec[i]
            for a, names in zip(avals, tokens)
            for i, name in enumerate(names)
            if name == axis and a.sharding.spec[i] is not None
        )
        spec.append(next(found, None) if axis in ("b", "k", "h") else None)
    return NamedSharding(mesh, PartitionSpec(*spec))


# --- lowering ------------------------------------------------------------------------------------------------------


def _lower_inner(platform, ctx, *operands, spec):
    name = backends.select(spec, platform or "another platform")
    if name == "pallas":
        reason = pallas.refuses_sizes(spec, {n: a.shape for n, a in zip(spec.operands, ctx.avals_in)})
        if reason is None:
            with pallas.quiet():
                return _lower_jnp(functools.partial(pallas.run, spec, platform), pallas.target_mesh(), ctx, *operands)
        if spec.implementation is not None:
            raise NotImplementedError(f"{spec.op}: implementation={name!r} has no kernel for this call: {reason}")
        name = "xla"
    if name == "xla":
        return _lower_jnp(functools.partial(xla.run, spec), jax.sharding.AbstractMesh((), ()), ctx, *operands)
    return ffi.lower(ctx, *operands, spec=spec, platform=name.partition(":")[0])


def _lower_jnp(function, mesh, ctx, *operands):
    # Shardings, and what varies over the devices of a shard_map, have been typed above. Here everything is one
    # device's: plain jnp would have to repeat those types for every constant that its loops start from.
    ctx = ctx.replace(avals_in=[jax.core.ShapedArray(a.shape, a.dtype) for a in ctx.avals_in])
    with jax.sharding.use_abstract_mesh(mesh):
        return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


# --- partitioning --------------------------------------------------------------------------------------------------


def _group(spec: Spec) -> int:
    attn = spec.attn if isinstance(spec, StepSpec) else spec
    return attn.num_q_heads // attn.num_kv_heads if isinstance(attn, AttnSpec) else 1


def _with_fewer_heads(spec: Spec, parts: int) -> Spec:
    """The spec of one of `parts` shards of the heads."""
    if parts == 1:
        return spec
    if isinstance(spec, StepSpec):
        attn, append = _with_fewer_heads(spec.attn, parts), _with_fewer_heads(spec.append, parts)
        return dataclasses.replace(spec, attn=attn, append=append)
    heads = [f for f in ("num_q_heads", "num_kv_heads") if hasattr(spec, f)]
    return dataclasses.replace(spec, **{f: getattr(spec, f) // parts for f in heads})


def _partitioned(definition: Definition, inner: Primitive, spec: Spec):
    tokens, result_tokens = _tokens(definition, spec)
    group = _group(spec)

    def call(local_spec):
        taken = [i for i, name in enumerate(spec.operands) if name in local_spec.operands]
        return lambda *operands: tuple(inner.bind(*(operands[i] for i in taken), spec=local_spec))

    def size(mesh, axis):
        return math.prod(mesh.shape[a] for a in ((axis,) if isinstance(axis, str) else axis or ()))

    def partition(mesh, arg_infos, result_infos):
        # Propagation may propose anything; only the batch and the kv heads can be split, for all operands alike.
        # Trusting it gives wrong numbers where a shard holds fewer query heads than its kv heads need.
        chosen: dict[str, Any] = {}
        for axis, names in (("b", ("b",)), ("k", ("k", "h"))):
            for info, toks in zip(arg_infos, tokens):
                # Not every sharding that XLA proposes has a spec: those are ignored.
                dims = tuple(getattr(info.sharding, "spec", ())) + (None,) * len(info.shape)
                for i, tok in enumerate(toks):
                    if tok in names and dims[i] is not None and axis not in chosen:
                        extent = info.shape[i] // (group if tok == "h" else 1)
                        if extent % size(mesh, dims[i]) == 0:
                            chosen[axis] = dims[i]
        used = chosen.get("k")
        if used is not None and chosen.get("b") is not None:
            as_set = lambda a: {a} if isinstance(a, str) else set(a)  # noqa: E731
            if as_set(used) & as_set(chosen["b"]):
                chosen.pop("b")  # one mesh axis cannot split two array axes

        def sharding(toks, info):
            where = {"b": chosen.get("b"), "k": chosen.get("k"), "h": chosen.get("k")}
            # bias and mask: b1 and h1 are b and h, or broadcast from size 1
            axes = [t[0] if t[1:].isdigit() and n > 1 else t for t, n in zip(toks, info.shape)]
            return NamedSharding(mesh, PartitionSpec(*(where.get(t) for t in axes)))

        # A plan is for all heads and sequences: those of a shard plan for themselves.
        local = call(_with_fewer_heads(without_plan(spec) if chosen else spec, size(mesh, chosen.get("k"))))
        results = tuple(map(sharding, result_tokens, result_infos))
        return mesh, local, results, tuple(map(sharding, tokens, arg_infos))

    def rule(mesh, arg_types, result_types):
        names = {"h": "(k g)" if group > 1 else "k"}
        sides = [
            ", ".join(" ".join(names.get(t, t) for t in toks) for toks in side) for side in (tokens, result_tokens)
        ]
        seen = dict.fromkeys(t for side in (tokens, result_tokens) for toks in side for t in toks)
        whole = tuple(t for t in seen if t not in ("b", "k", "h"))
        factors = {"g": group} if group > 1 and "h" in seen else {}
        return " -> ".join(sides), dict(need_replication_factors=whole, **factors)

    wrapped = custom_partitioning(call(spec))
    wrapped.def_partition(partition=partition, sharding_rule=rule)
    return wrapped


# --- batching ------------------------------------------------------------------------------------------------------

_CACHES = ("key_cache", "value_cache", "key_params", "value_params")
_RANGES = {"q_ranges": "query", "kv_ranges": "key"}
# The same for every sequence of a call: mapping one of them cannot be folded into the batch.
_SHARED = (
    "sinks alibi_slopes query_bias key_bias value_bias rope_turns prefix_pages prefix_len".split()
)


def _batch(definition: Definition, primitive: Primitive, args, dims, *, spec):
    """Folds the mapped axis into the batch: one call with more sequences. Shared operands that are mapped cost a loop."""
    count = next(a.shape[d] for a, d in zip(args, dims) if d is not None)
    mapped = {name: (a, d) for name, a, d in zip(spec.operands, args, dims)}
    if count == 0:
        shapes = [jax.ShapeDtypeStruct(tuple(_unmapped_shape(a, d)), a.dtype) for a, d in zip(args, dims)]
        outs = jax.eval_shape(lambda *xs: primitive.bind(*xs, spec=spec), *shapes)
        return [jnp.zeros((0, *o.shape), o.dtype) for o in outs], [0] * len(outs)

    def spread(name):
        a, d = mapped[name]
        return jnp.broadcast_to(a[None], (count, *a.shape)) if d is None else jnp.moveaxis(a, d, 0)

    if any(mapped[name][1] is not None for name in _SHARED if name in mapped):
        looped = tuple(spread(name) for name in spec.operands)
        outs = jax.lax.map(lambda xs: tuple(primitive.bind(*xs, spec=spec)), looped)
        return list(outs), [0] * len(outs)

    spec = without_plan(spec)  # which is for the sequences of one example
    present = [name for name in _CACHES if name in mapped]
    writes = bool(present) and not isinstance(spec, (AttnSpec,)) and spec.op != "gather_kv"
    fold_caches = writes or any(mapped[name][1] is not None for name in present)
    layers = _unmapped_shape(*mapped[present[0]])[0] if present and spec.stacked else 1

    def fold(name):
        if name in _SHARED or (name in _CACHES and not fold_caches):
            return mapped[name][0]
        x = spread(name)
        example = jnp.arange(count, dtype=jnp.int32)
        if name in _CACHES and not spec.stacked:
            return x  # [V, N, ...]: each example's cache is a layer
        if name == "layer" and fold_caches:  # example v's layer l is layer v * L + l of the folded cache
            valid = (x >= 0) & (x < layers)
            x = jnp.where(valid, x + layers * example[:, None], -1)
        if name in _RANGES:
            rows_of = _RANGES[name] if _RANGES[name] in mapped else "key"
            rows = _unmapped_shape(*mapped[rows_of])[0]
            low = jnp.clip(x[..., 0], 0, rows)
            high = jnp.clip(x[..., 1], low, rows)
            x = jnp.stack([low, high], -1) + rows * example[:, None, None]
        if name in ("bias", "mask"):
            batch = _unmapped_shape(*mapped["query"])[0]
            x = jnp.broadcast_to(x, (count, batch, *x.shape[2:]))
        if isinstance(spec, MergeSpec):  # outs and lses: [R, T, ...], the rows are axis 1
            x = jnp.moveaxis(x, 0, 1)
            return x.reshape(x.shape[0], count * x.shape[2], *x.shape[3:])
        return x.reshape(count * x.shape[1], *x.shape[2:])

    outs = primitive.bind(
        *(fold(name) for name in spec.operands), spec=on_stacked_cache(spec) if fold_caches else spec
    )
    layered = len(written_caches(spec)) if writes and not spec.stacked else 0  # these are [V, N, ...] already
    unfolded = [
        o if i < layered else o.reshape(count, o.shape[0] // count, *o.shape[1:]) for i, o in enumerate(outs)
    ]
    return unfolded, [0] * len(outs)


def _unmapped_shape(array, dim) -> Sequence[int]:
    shape = list(array.shape)
    if dim is not None:
        del shape[dim]
    return shape


def written_axes(spec: Spec, axes: dict[str, str]) -> list[str]:
    """Axes of the results that are the written caches."""
    return [axes[name] for name in written_caches(spec)]


def written_shapes(spec: Spec, named: Named) -> list[tuple[tuple[int, ...], Any]]:
    """Shapes and dtypes of the results that are the written caches."""
    return [(named[name].shape, named[name].dtype) for name in written_caches(spec)]

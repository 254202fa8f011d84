"""Which kernel a call would take, and what this installation has: nothing that a user can see is silent."""

from __future__ import annotations

import dataclasses
import platform as host
from typing import Any, Callable, Iterator

import jax
import jaxlib

from . import backends
from .backends import ffi, pallas
from .spec import Spec


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One implementation of one primitive of a call.

    Attributes:
      op: the primitive.
      implementation: "cuda", "cpu", "pallas" or "xla".
      reason: None when it has a kernel for the call, else why not.
      chosen: whether the call would take it.
      kernels: names of the compiled kernels that it may launch, as `kernels()` lists them. Of prefill and decode the
        lengths take one or both (prefill all, where there is no decode kernel), and a step of few tokens appends inside
        decode. Of several families of one phase the first takes what suits it on cards that it is compiled for (sm90:
        compute capability 9.0), the last the rest; what no GPU of this host runs is left out. Empty when there is a
        reason, and for "pallas" and "xla", which have none.
    """

    op: str
    implementation: str
    reason: str | None
    chosen: bool
    kernels: tuple[str, ...] = ()


def explain(function: Callable, *args: Any, platform: str | None = None, **kwargs: Any) -> list[Candidate]:
    """Every implementation that `function(*args, **kwargs)` could take, best first, for each primitive in it.

    Traces `function` (one of this package, or anything that calls it) without running it; array arguments may be
    `jax.ShapeDtypeStruct`s.

    Args:
      platform: "cpu", "cuda", ...; default: that of jax's default backend.
    Raises:
      NotImplementedError: the call names an implementation that has no kernel for it.
    """
    if platform is None:
        platform = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())
    leaves, structure = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(x, "shape") and hasattr(x, "dtype") for x in leaves]

    def call(arrays):
        arrays = iter(arrays)
        args, kwargs = jax.tree.unflatten(structure, [next(arrays) if a else x for a, x in zip(is_array, leaves)])
        return function(*args, **kwargs)

    jaxpr = jax.make_jaxpr(call)([x for a, x in zip(is_array, leaves) if a])
    found = []
    for spec in dict.fromkeys(_specs(jaxpr.jaxpr)):
        chosen = backends.select(spec, platform)
        names = backends.candidates(platform)
        for name in names if chosen in names else (chosen, *names):
            reason = backends.supports(name, spec)
            names_of_kernels = backends.kernels(name, spec) if reason is None else ()
            found.append(Candidate(spec.op, name, reason, name == chosen, names_of_kernels))
    return found


def _specs(jaxpr) -> Iterator[Spec]:
    for equation in jaxpr.eqns:
        if equation.primitive.name.startswith("turboattn_"):
            yield equation.params["spec"]
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)  # a closed jaxpr wraps one
                if hasattr(inner, "eqns"):
                    yield from _specs(inner)


def kernels() -> list[dict[str, Any]]:
    """The compiled kernels of the loaded extension modules, with the module's name."""
    rows = []
    for name in ("cpu", "cuda"):
        loaded = ffi.load(name)
        if loaded.module is not None:
            rows += [dict(kernel, module=f"_{name}") for kernel in loaded.module.kernels()]
    return rows


def _forced_implementation() -> str:
    name = backends.default_implementation()
    if name is None or name in backends.NAMES:
        return name or "not set"
    return f"{name}: calls that name none raise, since it is none of {', '.join(backends.NAMES)}"


def environment() -> dict[str, str]:
    """Versions, devices, and for each implementation whether it is loaded and why not."""
    from . import __version__

    major, minor = ffi.runtime_ffi_version()
    facts = {
        "jax_turboattn": __version__,
        "python": host.python_version(),
        "jax": jax.__version__,
        "jaxlib": f"{jaxlib.__version__} (XLA FFI {major}.{minor})",
        "devices": ", ".join(f"{d.platform}:{d.id} {d.device_kind}" for d in jax.devices()),
        backends.ENVIRONMENT_VARIABLE: _forced_implementation(),
    }
    for name in ("cuda", "cpu"):
        loaded = ffi.load(name)
        if loaded.reason is not None:
            facts[name] = f"not available: {loaded.reason}"
            continue
        built = ".".join(map(str, loaded.module.ffi_api_version()))
        facts[name] = f"loaded: {len(loaded.targets)} primitives, built against XLA FFI {built}"
        if name == "cuda":
            fault = loaded.module.device_error()
            if fault:
                facts[name] += f"; no usable GPU: {fault}"
    reason = pallas.load()[2]
    facts["pallas"] = "available: Triton on cuda, interpret mode on cpu" if reason is None else f"not available: {reason}"
    facts["xla"] = "always available"
    return facts

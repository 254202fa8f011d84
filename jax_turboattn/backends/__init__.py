"""The implementations and the choice between them.

An implementation is a module with `supports(spec) -> None | reason`. Those that come from our extension modules share
`ffi.py`; `xla.py` is plain jnp and takes everything.
"""

from __future__ import annotations

import os

from ..spec import Spec
from . import ffi, pallas, xla

ENVIRONMENT_VARIABLE = "JAX_TURBOATTN_IMPLEMENTATION"
NAMES = ("cuda", "cuda:sm75", "cuda:sm80", "cuda:sm90", "cpu", "pallas", "xla")

# Candidates by lowering platform, best first; every other platform has plain jnp alone.
_CANDIDATES = {"cpu": ("cpu", "xla"), "cuda": ("cuda", "pallas", "xla")}
# Where a named implementation runs; xla runs everywhere. Pallas on the CPU is its interpret mode: slow, for tests.
_PLATFORMS = {"cuda": ("cuda",), "cpu": ("cpu",), "pallas": ("cuda", "cpu")}


def candidates(platform: str) -> tuple[str, ...]:
    return _CANDIDATES.get(platform, ("xla",))


def supports(name: str, spec: Spec) -> str | None:
    """None when implementation `name` has a kernel for `spec`, else the reason why not."""
    kind, _, family = name.partition(":")
    if kind == "xla":
        return xla.supports(spec)
    if kind == "pallas":
        return pallas.supports(spec)
    return ffi.supports(spec, kind, family or None)


def kernels(name: str, spec: Spec) -> tuple[str, ...]:
    """Names of the compiled kernels that implementation `name`, which supports `spec`, may launch for it."""
    kind, _, family = name.partition(":")
    return () if kind in ("xla", "pallas") else ffi.kernels(spec, kind, family or None)


def select(spec: Spec, platform: str) -> str:
    """The implementation that runs `spec` on `platform`.

    Raises:
      NotImplementedError: the named implementation has no kernel for it or does not run on this platform.
    """
    name = spec.implementation
    if name is None:
        return next(n for n in candidates(platform) if supports(n, spec) is None)
    require(name, spec)
    homes = _PLATFORMS.get(name.partition(":")[0])
    if homes is not None and platform not in homes:
        raise NotImplementedError(
            f"{spec.op}: implementation={name!r} runs on platform {' or '.join(homes)}, and this program is lowered "
            f"for {platform}"
        )
    return name


def require(name: str, spec: Spec) -> None:
    """Raises NotImplementedError when the named implementation has no kernel for `spec`."""
    reason = supports(name, spec)
    if reason is not None:
        raise NotImplementedError(f"{spec.op}: implementation={name!r} has no kernel for this call: {reason}")


def default_implementation() -> str | None:
    """What `implementation=None` means in this process: the environment variable's value, or None."""
    return os.environ.get(ENVIRONMENT_VARIABLE) or None

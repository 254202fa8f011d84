"""The kernels of our extension modules, as XLA FFI targets. The only file that touches `_cpu` and `_cuda`.

A module whose FFI headers are newer than the running jaxlib's is not registered: XLA would refuse the handler while it
starts the backend, and no JAX program of the process could run.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import math
import pathlib
import re
from typing import Any

import jax
import jax.export
import numpy as np

from ..spec import (
    AppendSpec,
    AttnSpec,
    CopySpec,
    GatherSpec,
    MergeSpec,
    PlanSpec,
    Spec,
    StepSpec,
    written_caches,
)

OPS = (
    "attention",
    "ragged_attention",
    "paged_attention",
    "paged_attention_step",
    "append_kv",
    "gather_kv",
    "copy_pages",
    "make_plan",
    "merge_partials",
)
_XLA_PLATFORM = {"cpu": "cpu", "cuda": "CUDA"}  # "cuda" in lower case is accepted there and never registered


@dataclasses.dataclass(frozen=True)
class Module:
    """An extension module, or the reason for its absence."""

    name: str
    module: Any = None
    reason: str | None = None  # why it is not usable; None when loaded
    targets: frozenset[str] = frozenset()


def runtime_ffi_version() -> tuple[int, int]:
    """(major, minor) of the FFI API of the running jaxlib, read from the header that it ships."""
    text = (pathlib.Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()

    def number(which):
        return int(re.search(rf"#define XLA_FFI_API_{which} (\d+)", text).group(1))

    return number("MAJOR"), number("MINOR")


def version_mismatch(built: tuple[int, int], running: tuple[int, int]) -> str | None:
    """Why a module built against `built` cannot run on a jaxlib of `running`; None when it can."""
    if built[0] == running[0] and built[1] <= running[1]:
        return None
    return (
        f"it was built against XLA FFI {built[0]}.{built[1]} and this jaxlib has {running[0]}.{running[1]}; "
        "reinstall jax_turboattn against this jaxlib, or upgrade jaxlib"
    )


def _source_tree_hint() -> str:
    """In a clone the sources in the current folder hide an installed package, and builds leave no modules there."""
    root = pathlib.Path(__file__).parents[2]
    package = __package__.rpartition(".")[0]
    has_modules = any(importlib.util.find_spec(f"{package}._{name}") for name in _XLA_PLATFORM)  # editable install
    if has_modules or not (root / "CMakeLists.txt").exists():
        return ""
    return f"; this is the source tree {root}: to use an installed jax_turboattn, run elsewhere or with python -P"


@functools.cache
def load(name: str) -> Module:
    """Imports and registers extension module `name` ("cpu" or "cuda") once."""
    path = f"{__package__.rpartition('.')[0]}._{name}"
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        if error.name != path:  # something that it needs is missing: that is a fault, not a choice
            raise
        return Module(name, reason=f"the extension module _{name} was not built{_source_tree_hint()}")
    except ImportError as error:
        return Module(name, reason=f"the extension module _{name} does not load: {error}")
    mismatch = version_mismatch(module.ffi_api_version(), runtime_ffi_version())
    if mismatch is not None:
        return Module(name, reason=f"the extension module _{name} is not usable: {mismatch}")
    registrations = module.registrations()
    for target, capsule in registrations.items():
        jax.ffi.register_ffi_target(target, capsule, platform=_XLA_PLATFORM[name])
    return Module(name, module, targets=frozenset(registrations))


def target(op: str) -> str:
    """The FFI target of a primitive. Versioned: exported programs and compilation caches outlive a build."""
    return f"turboattn_{op}_v1"


def export_disabled_checks() -> list[jax.export.DisabledSafetyCheck]:
    """What `jax.export.export(..., disabled_checks=...)` needs for programs that hold our kernels.

    Our names are versioned, so an exported program keeps its meaning or does not run. Triton's is XLA's: what pallas
    exports runs where jaxlib still reads that Triton.
    """
    names = [*map(target, OPS), "__gpu$xla.gpu.triton"]
    return [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]


_MISSING = {
    "bias": "a dense bias runs on xla only",
    "mask": "a dense mask runs on xla only",
}


def supports(spec: Spec, platform: str, family: str | None = None) -> str | None:
    """None when the module of `platform` has a kernel for `spec`, else the reason why not."""
    loaded = load(platform)
    if loaded.reason is not None:
        return loaded.reason
    if target(spec.op) not in loaded.targets:
        return f"the {platform} module has no kernel for {spec.op}"
    if isinstance(spec, PlanSpec):
        return supports(spec.attn, platform, family)
    for operand, reason in _MISSING.items():
        if operand in spec.operands:
            return reason
    return _cuda_missing(spec, family) if platform == "cuda" else None


_ATTENTION_PHASES = ("attention", "prefill", "decode")  # of kernel_matrix.cmake: those that come in families
_CARD = {"sm90": "9.0"}  # families that are compiled for one compute capability alone


def _cards() -> set[str]:
    """Compute capabilities of this host's GPUs; without any, programs are for another host."""
    try:
        return {device.compute_capability for device in jax.devices("cuda")}
    except RuntimeError:
        return set()


def _asked(spec: Spec, platform: str) -> list[dict[str, Any]]:
    """What the handler of `spec` asks of its module's table of kernels, one for each kernel that it may launch."""
    if isinstance(spec, StepSpec):
        return _asked(spec.append, platform) + _asked(spec.attn, platform)
    if isinstance(spec, PlanSpec):
        decodes = platform == "cuda" and spec.plain and _has_decode(spec.attn)
        return [asked for asked in _asked(spec.attn, platform) if decodes and asked["phase"] == "decode"]
    if isinstance(spec, CopySpec):
        return [dict(phase="copy_pages")]
    if isinstance(spec, MergeSpec):
        return [dict(phase="merge", value_dim=spec.value_dim, dtype=spec.dtype, kv_dtype=spec.dtype)]
    dims = dict(head_dim=spec.head_dim, value_dim=spec.value_dim)
    if isinstance(spec, AppendSpec):
        return [dict(phase="append", **dims, dtype=spec.dtype, kv_dtype=spec.kv_dtype)]
    if isinstance(spec, GatherSpec):
        return [dict(phase="gather", **dims, dtype=spec.out_dtype, kv_dtype=spec.kv_dtype)]
    if spec.op != "paged_attention":
        return [dict(phase="attention", **dims, dtype=spec.dtype, kv_dtype=spec.dtype)]
    prefill = dict(phase="prefill", **dims, dtype=spec.dtype, kv_dtype=spec.kv_dtype)
    if platform == "cpu":  # one kernel serves both
        return [prefill]
    # The lengths decide, on the device. Prefill takes all of them where there is no decode kernel.
    decode = prefill | dict(phase="decode")
    return [decode, prefill] if _has_decode(spec) or not _offered(prefill, platform, None) else [prefill]


def _has_decode(spec: AttnSpec) -> bool:
    dims = dict(head_dim=spec.head_dim, value_dim=spec.value_dim)
    return bool(_offered(dict(phase="decode", **dims, dtype=spec.dtype, kv_dtype=spec.kv_dtype), "cuda", None))


def _offered(asked: dict[str, Any], platform: str, family: str | None) -> list[dict[str, Any]]:
    """The kernels among which the handler finds one, best first: as FindKernel in ffi/core/registry.h.

    A family that is named is that of the phases which have it; the first kernel of it takes the call. What no GPU of
    this host runs is left out.
    """
    kernels = load(platform).module.kernels()
    cards = _cards() if platform == "cuda" else set()
    found = [
        kernel
        for kernel in kernels
        if all(kernel[name] in (None, x) for name, x in asked.items())
        and (not cards or _CARD.get(kernel["family"]) in {None, *cards})
    ]
    return [kernel for kernel in found if kernel["family"] == family][:1] or found


def kernels(spec: Spec, platform: str, family: str | None = None) -> tuple[str, ...]:
    """Names of the kernels that a call which `supports` takes may launch."""
    return tuple(kernel["name"] for asked in _asked(spec, platform) for kernel in _offered(asked, platform, family))


def _cuda_missing(spec: Spec, family: str | None) -> str | None:
    """Why the CUDA module has no kernel for `spec`: what its table of kernels does not offer."""
    attn = spec.attn if isinstance(spec, StepSpec) else spec
    here = f" on compute capability {' and '.join(sorted(_cards()))}" if _cards() else ""
    if isinstance(attn, AttnSpec) and attn.shared_value:
        return "the CUDA attention kernels have no MLA (values that are columns of the keys)"
    for asked in _asked(spec, "cuda"):
        phase, said = asked["phase"], ", ".join(f"{name} {x}" for name, x in asked.items() if name != "phase")
        if asked.get("head_dim", 0) % 8 or (phase != "merge" and asked.get("value_dim", 0) % 8):
            return f"the CUDA kernels take rows of a multiple of 8 elements, not {said}"
        if not _offered(asked, "cuda", None):
            return f"the CUDA module has no {phase} kernel for {said}{here}"
    phases = [asked for asked in _asked(spec, "cuda") if asked["phase"] in _ATTENTION_PHASES]
    if family and phases and not any(_offered(asked, "cuda", family)[0]["family"] == family for asked in phases):
        said = ", ".join(f"{name} {x}" for name, x in phases[-1].items())
        return f"the CUDA module has no {family} kernel for {said}{here}"
    return None


def attributes(spec: Spec) -> dict[str, Any]:
    """FFI attributes, each of the one type that its handler binds (the names and types are those of ffi/handlers)."""
    named: dict[str, Any] = {"operands": ",".join(spec.operands)}
    if isinstance(spec, (AttnSpec, StepSpec, PlanSpec)):
        named |= {"family": (spec.implementation or "").partition(":")[2]}
    if isinstance(spec, AttnSpec):
        named |= _attention_attributes(spec)
    elif isinstance(spec, AppendSpec):
        named |= _append_attributes(spec)
    elif isinstance(spec, StepSpec):
        named |= _attention_attributes(spec.attn) | _append_attributes(spec.append)
        named |= {"logn": np.int32(spec.logn or 0), "logn_zero_based": np.bool_(spec.logn_zero_based)}
    elif isinstance(spec, PlanSpec):
        named |= {"dtype": spec.attn.dtype, "kv_dtype": spec.attn.kv_dtype}
        sizes = ("num_q_heads", "num_kv_heads", "head_dim", "value_dim", "page_size")
        named |= {name: np.int32(getattr(spec.attn, name)) for name in sizes}
        named |= {name: np.int64(getattr(spec, name)) for name in ("num_tokens", "max_pages")}
        named |= {"plain": np.bool_(spec.plain)}
    elif isinstance(spec, GatherSpec):
        named |= {"kv_dtype": spec.kv_dtype}
    return named


def _attention_attributes(spec: AttnSpec) -> dict[str, Any]:
    named = {
        "is_causal": np.bool_(spec.is_causal),
        "scale": np.float32(spec.scale),
        "logits_soft_cap": np.float32(spec.logits_soft_cap or 0.0),
    }
    if spec.kv_dtype is not None:
        named |= {
            "kv_dtype": spec.kv_dtype,
            "value_dim": np.int32(spec.value_dim),
            "cp_size": np.int32(spec.cp_size),
            "batch_invariant": np.bool_(spec.batch_invariant),
        }
    return named


def _append_attributes(spec: AppendSpec) -> dict[str, Any]:
    rope = spec.rope
    sections = (rope.sections if rope else None) or (0, 0, 0)
    return {
        "kv_dtype": spec.kv_dtype,
        "cp_size": np.int32(spec.cp_size),
        "rope_dim": np.int32(rope.dim if rope else 0),
        "rope_offset": np.int32(rope.offset if rope else 0),
        "rope_interleaved": np.bool_(rope is not None and rope.pairing == "interleaved"),
        "rope_attention_factor": np.float32(rope.resolved_attention_factor if rope else 1.0),
        "rope_section_t": np.int32(sections[0]),
        "rope_section_h": np.int32(sections[1]),
        "rope_section_w": np.int32(sections[2]),
        "rope_sections_interleaved": np.bool_(rope is not None and rope.sections_interleaved),
    }


def _workspace_bytes(spec: Spec, named: dict[str, Any]) -> int:
    """Bytes of scratch memory that the CUDA kernels of a call need; `named`: its operands' avals. 0: none.

    Static shapes decide alone: the program may be compiled where there is no GPU, or another one.
    """
    if isinstance(spec, CopySpec):  # a page of each array for each copy: a source may be another copy's destination
        pages = (math.prod(named[name].shape[-3:]) * named[name].dtype.itemsize for name in spec.caches)
        return named["source"].shape[0] * sum(pages)
    attn = spec.attn if isinstance(spec, StepSpec) else spec
    if not isinstance(attn, AttnSpec) or attn.op != "paged_attention":
        return 0
    batch, columns = named["page_table"].shape
    prefix = named["prefix_pages"].shape[0] if "prefix_pages" in named else 0
    rows = named["query"].shape[:-2]  # [T], or [B, Q]
    plan = load("cuda").module.paged_plan(
        batch=batch,
        num_tokens=math.prod(rows),
        uniform_q_len=rows[1] if len(rows) == 2 else 0,
        num_heads=attn.num_q_heads,
        num_kv_heads=attn.num_kv_heads,
        value_dim=attn.value_dim,
        max_keys=(columns + prefix) * attn.page_size,
        batch_invariant=attn.batch_invariant,
        has_decode=_has_decode(attn),
    )
    return plan["workspace_bytes"]


def lower(ctx, *operands, spec: Spec, platform: str):
    """The MLIR lowering of a primitive to its FFI target. Written caches alias the operands that they replace."""
    aliases = {}
    if isinstance(spec, (AppendSpec, StepSpec, CopySpec)):
        aliases = {spec.operands.index(name): i for i, name in enumerate(written_caches(spec))}
    rule = jax.ffi.ffi_lowering(target(spec.op), operand_output_aliases=aliases)
    workspace = _workspace_bytes(spec, dict(zip(spec.operands, ctx.avals_in))) if platform == "cuda" else 0
    if workspace == 0:
        return rule(ctx, *operands, **attributes(spec))
    scratch = jax.core.ShapedArray((workspace,), np.dtype(np.uint8))
    *results, _ = rule(ctx.replace(avals_out=[*ctx.avals_out, scratch]), *operands, **attributes(spec))
    return results

"""Static descriptions of one call: what the primitives carry and what the implementations read.

A spec is frozen and hashable, so that it can be a `jit` static argument and one parameter of a primitive. It holds
everything that is not an array. Shapes that a kernel can read off its operands (B, T, S, N, M) are not repeated here.
`operands` lists the names of the primitive's operands, in order; an absent option is an absent operand.
"""

from __future__ import annotations

import dataclasses

from .rope import RopeConfig

# Cache dtypes: the public name -> bits a stored element.
KV_DTYPES = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "int4": 4, "float8_e4m3fn": 8}
INTEGER_KV_DTYPES = ("int8", "int4")
QUERY_DTYPES = ("bfloat16", "float16", "float32")
PLAN_SHAPE = (512, 8)  # int32: kMaxDecodeBlocks and kScheduleInts of ffi/core/heuristics.h


@dataclasses.dataclass(frozen=True)
class AttnSpec:
    """One attention call. `op` is attention, ragged_attention or paged_attention."""

    op: str
    operands: tuple[str, ...]
    dtype: str  # E, of query (and of linear key and value)
    out_dtype: str  # E or float32
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    is_causal: bool
    scale: float
    logits_soft_cap: float | None = None
    kv_dtype: str | None = None  # paged only, a key of KV_DTYPES
    page_size: int | None = None  # paged only, tokens
    stacked: bool = False  # the cache has a layer axis
    shared_value: bool = False  # MLA: V is the first value_dim columns of K
    cp_size: int = 1
    batch_invariant: bool = False
    max_q_len: int | None = None  # a hint: wrong values cost speed, never the result
    implementation: str | None = None

    @property
    def packed(self) -> bool:
        """Queries of all sequences in one [T, H, D] array (else [B, Q, H, D])."""
        return "q_ranges" in self.operands


@dataclasses.dataclass(frozen=True)
class AppendSpec:
    """One append of new keys and values to a paged cache."""

    operands: tuple[str, ...]
    dtype: str  # E, of key and value
    kv_dtype: str
    num_kv_heads: int
    head_dim: int
    value_dim: int
    page_size: int
    stacked: bool = False
    shared_value: bool = False
    cp_size: int = 1
    rope: RopeConfig | None = None
    implementation: str | None = None
    op: str = "append_kv"


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """The fused step: prologue of `append` and of the queries, then `attn` over what was stored."""

    operands: tuple[str, ...]
    attn: AttnSpec  # attn.operands and append.operands name the parts' own operands
    append: AppendSpec
    logn: int | None = None  # trained length in tokens
    logn_zero_based: bool = False
    op: str = "paged_attention_step"

    @property
    def implementation(self) -> str | None:
        return self.attn.implementation

    @property
    def stacked(self) -> bool:
        return self.attn.stacked


@dataclasses.dataclass(frozen=True)
class GatherSpec:
    """Pages to contiguous, dequantised keys and values."""

    operands: tuple[str, ...]
    kv_dtype: str
    out_dtype: str
    num_kv_heads: int
    head_dim: int
    value_dim: int
    page_size: int
    stacked: bool = False
    shared_value: bool = False
    implementation: str | None = None
    op: str = "gather_kv"


@dataclasses.dataclass(frozen=True)
class CopySpec:
    """Page to page copies inside one pool. `caches` names the arrays that are copied."""

    operands: tuple[str, ...]
    caches: tuple[str, ...]
    kv_dtype: str
    num_kv_heads: int
    stacked: bool = False
    implementation: str | None = None
    op: str = "copy_pages"


@dataclasses.dataclass(frozen=True)
class MergeSpec:
    """Merge of R partial results over disjoint keys."""

    operands: tuple[str, ...]
    dtype: str
    out_dtype: str
    num_q_heads: int
    value_dim: int
    implementation: str | None = None
    op: str = "merge_partials"


@dataclasses.dataclass(frozen=True)
class PlanSpec:
    """A schedule for calls of `attn`, a paged_attention without a plan, of these sizes."""

    operands: tuple[str, ...]  # of attn's
    attn: AttnSpec
    batch: int  # B
    num_tokens: int  # T, or B * Q
    max_pages: int  # M
    op: str = "make_plan"

    @property
    def implementation(self) -> str | None:
        return self.attn.implementation

    @property
    def plain(self) -> bool:
        """Lengths alone say how much work a sequence is, and how it is cut may depend on the others."""
        return not self.attn.batch_invariant and not {"cp_rank", "window", "prefix_len"} & set(self.attn.operands)


Spec = AttnSpec | AppendSpec | StepSpec | GatherSpec | CopySpec | MergeSpec | PlanSpec


def written_caches(spec: AppendSpec | StepSpec | CopySpec) -> tuple[str, ...]:
    """Names of the cache operands that the primitive also returns, aliased, as its first results."""
    if isinstance(spec, CopySpec):
        return spec.caches
    append = spec.append if isinstance(spec, StepSpec) else spec
    names = ("key_cache",) if append.shared_value else ("key_cache", "value_cache")
    if append.kv_dtype in INTEGER_KV_DTYPES:  # fp8 scales are the caller's: read, never written
        names += ("key_params",) if append.shared_value else ("key_params", "value_params")
    return names


def on_stacked_cache(spec: Spec) -> Spec:
    """The same call on a cache with a layer axis."""
    if isinstance(spec, StepSpec):
        return dataclasses.replace(spec, attn=on_stacked_cache(spec.attn), append=on_stacked_cache(spec.append))
    return dataclasses.replace(spec, stacked=True)


def with_plan(spec: AttnSpec | StepSpec) -> AttnSpec | StepSpec:
    """The same call with a plan as its last operand."""
    if isinstance(spec, StepSpec):
        return dataclasses.replace(spec, operands=(*spec.operands, "plan"), attn=with_plan(spec.attn))
    return dataclasses.replace(spec, operands=(*spec.operands, "plan"))


def without_plan(spec: Spec) -> Spec:
    """The same call, which plans for itself."""
    if "plan" not in spec.operands:
        return spec
    operands = tuple(name for name in spec.operands if name != "plan")
    if isinstance(spec, StepSpec):
        return dataclasses.replace(spec, operands=operands, attn=without_plan(spec.attn))
    return dataclasses.replace(spec, operands=operands)

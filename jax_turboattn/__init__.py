"""Attention over paged KV caches as JAX primitives."""

from .api import (
    Plan,
    append_kv,
    attention,
    copy_pages,
    gather_kv,
    make_plan,
    merge_partials,
    paged_attention,
    paged_attention_step,
    paged_decode,
    ragged_attention,
)
from .backends import ffi as _ffi
from .backends.ffi import export_disabled_checks
from .cache import PagedKVCache
from .inspection import explain
from .rope import RopeConfig
from .rotation import apply_rope

__version__ = "0.1.0"

# Now, not when a call is traced: an exported program or one from a compilation cache may be a process's first.
_ffi.load("cpu")
_ffi.load("cuda")

__all__ = [
    "PagedKVCache",
    "Plan",
    "RopeConfig",
    "append_kv",
    "apply_rope",
    "attention",
    "copy_pages",
    "explain",
    "export_disabled_checks",
    "gather_kv",
    "make_plan",
    "merge_partials",
    "paged_attention",
    "paged_attention_step",
    "paged_decode",
    "ragged_attention",
]

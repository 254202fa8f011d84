"""The JAX primitives, one file each."""

from .append_kv import append_kv_p
from .attention import attention, attention_p
from .copy_pages import copy_pages_p
from .gather_kv import gather_kv_p
from .make_plan import make_plan_p
from .merge_partials import merge_partials_p
from .paged_attention import paged_attention_p
from .paged_attention_step import paged_attention_step_p
from .ragged_attention import ragged_attention, ragged_attention_p

__all__ = [
    "append_kv_p",
    "attention",
    "attention_p",
    "copy_pages_p",
    "gather_kv_p",
    "make_plan_p",
    "merge_partials_p",
    "paged_attention_p",
    "paged_attention_step_p",
    "ragged_attention",
    "ragged_attention_p",
]

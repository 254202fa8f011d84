"""`explain`: which implementation and kernels a call of these shapes would take, and why not the others."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from .. import PagedKVCache, api
from ..inspection import explain
from ..spec import KV_DTYPES, QUERY_DTYPES
from .table import print_table

_STORAGE = ("append_kv", "gather_kv", "copy_pages")  # with a cache, without attention
_PAGED = ("paged_attention", "paged_decode", "paged_attention_step", "make_plan", *_STORAGE)
FUNCTIONS = (*_PAGED, "attention", "ragged_attention", "merge_partials")


def add_arguments(parser) -> None:
    parser.add_argument("function", choices=FUNCTIONS, nargs="?", default="paged_decode")
    parser.add_argument("--heads", type=int, default=32, help="query heads, H (default %(default)s)")
    parser.add_argument("--kv-heads", type=int, default=8, help="kv heads, K (default %(default)s)")
    parser.add_argument("--head-dim", type=int, default=128, help="D (default %(default)s)")
    parser.add_argument("--value-dim", type=int, help="Dv (default D)")
    parser.add_argument(
        "--dtype", choices=QUERY_DTYPES, default="bfloat16", help="of the queries (default %(default)s)"
    )
    parser.add_argument("--kv-dtype", choices=tuple(KV_DTYPES), help="of the cache (default: that of the queries)")
    parser.add_argument("--page-size", type=int, default=64, help="tokens a page (default %(default)s)")
    parser.add_argument("--window", type=int, help="left window, self excluded")
    parser.add_argument("--soft-cap", type=float, help="logits soft cap")
    parser.add_argument("--sinks", action="store_true")
    parser.add_argument("--alibi", action="store_true")
    parser.add_argument("--mla", action="store_true", help="shared_value cache: V is the first Dv columns of K")
    parser.add_argument("--implementation", help="force one")
    parser.add_argument("--platform", choices=("cpu", "cuda", "tpu"), help="default: this host's")


def _refuse_what_has_no_effect(args) -> None:
    paged = args.function in _PAGED
    attends = args.function not in (*_STORAGE, "merge_partials")
    given = {
        "--window": args.window is not None and not attends,
        "--soft-cap": args.soft_cap is not None and not attends,
        "--sinks": args.sinks and not attends and args.function != "merge_partials",
        "--alibi": args.alibi and not attends,
        "--kv-dtype": args.kv_dtype is not None and not paged,
        "--page-size": args.page_size != 64 and not paged,
        "--mla": args.mla and not paged,
    }
    for option, useless in given.items():
        if useless:
            raise ValueError(f"{option} must come with a function that reads it, got {args.function}")


def run(args) -> int:
    array = jax.ShapeDtypeStruct
    value_dim = args.head_dim if args.value_dim is None else args.value_dim
    _refuse_what_has_no_effect(args)
    B, T, S, M = 4, 8, 8, 4  # a kernel's choice does not depend on them
    query = array((T, args.heads, args.head_dim), args.dtype)
    key = array((T, args.kv_heads, args.head_dim), args.dtype)
    value = None if args.mla else array((T, args.kv_heads, value_dim), args.dtype)
    cache = jax.eval_shape(
        lambda: PagedKVCache.create(
            B * M,
            args.kv_heads,
            args.head_dim,
            value_dim=value_dim,
            page_size=args.page_size,
            dtype=args.kv_dtype or args.dtype,
            param_dtype=args.dtype,
            shared_value=args.mla,
        )
    )
    table, lens = array((B, M), jnp.int32), array((B,), jnp.int32)
    offsets = array((B + 1,), jnp.int32)
    options = dict(
        local_window_size=None if args.window is None else (args.window, 0),
        logits_soft_cap=args.soft_cap,
        sinks=array((args.heads,), jnp.float32) if args.sinks else None,
        alibi_slopes=array((args.heads,), jnp.float32) if args.alibi else None,
        scale=args.head_dim**-0.5 if args.mla else None,
    )
    calls = dict(
        paged_attention=((query, cache, table, lens, offsets), options),
        paged_decode=((array((B, args.heads, args.head_dim), args.dtype), cache, table, lens), options),
        paged_attention_step=((query, key, value, cache, table, lens, offsets), options),
        append_kv=((cache, key, value, table, lens, offsets), {}),
        make_plan=((array((B, args.heads, args.head_dim), args.dtype), cache, table, lens, None), options),
        gather_kv=((cache, table, lens), {}),
        copy_pages=((cache, lens, lens), {}),
        merge_partials=(
            (array((2, T, args.heads, value_dim), args.dtype), array((2, T, args.heads), jnp.float32)),
            {"sinks": options["sinks"]},
        ),
        attention=(
            (
                array((B, T, args.heads, args.head_dim), args.dtype),
                array((B, S, args.kv_heads, args.head_dim), args.dtype),
                array((B, S, args.kv_heads, value_dim), args.dtype),
            ),
            options | {"is_causal": True},
        ),
        ragged_attention=((query, key, array((T, args.kv_heads, value_dim), args.dtype), offsets, offsets), options),
    )
    arguments, keywords = calls[args.function]
    function = functools.partial(getattr(api, args.function), implementation=args.implementation)
    found = explain(function, *arguments, platform=args.platform, **keywords)
    print_table(
        ("primitive", "implementation", "", "kernels, or the reason why none"),
        [
            (c.op, c.implementation, "<- chosen" if c.chosen else "", c.reason or ", ".join(c.kernels) or "takes it")
            for c in found
        ],
    )
    return 0

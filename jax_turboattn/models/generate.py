"""`python -m jax_turboattn generate`: completes prompts with the shipped model, all at once."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time

import jax
import jax.numpy as jnp

from .. import explain
from . import corpus, weights
from .decoder import Decoder
from .serve import ProgressLine, Server

KV_DTYPES = ("bfloat16", "int8", "int4")
CONTEXT = 1024  # what the shipped model was trained on, in bytes
PAGE_SIZE = 16
# Has XLA capture the scan over layers as one CUDA graph, however few kernels are in it.
GRAPH_FLAG = "--xla_gpu_graph_min_graph_size"
DEFAULT_PROMPTS = (
    "def read_lines(path):",
    "import os\nimport sys\n\ndef main():\n    parser = argparse.ArgumentParser(",
    'class LineReader:\n    """',
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt", action="append", metavar="TEXT", help="text to complete; may be given several times"
    )
    parser.add_argument("--max-tokens", type=int, default=128, help="bytes to add to each (default %(default)s)")
    parser.add_argument("--kv-dtype", choices=KV_DTYPES, default="bfloat16", help="of the cache (default %(default)s)")
    parser.add_argument("--implementation", help="of the attention: cuda, cpu, pallas or xla (default: the best here)")
    parser.add_argument("--temperature", type=float, default=0.6, help="0 is greedy (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the draws at a temperature (default %(default)s)")
    parser.add_argument("--stats", action="store_true", help="print counts and speed at the end")


def run(args: argparse.Namespace) -> int:
    """Prints every prompt with its completion.

    Raises:
      ValueError, NotImplementedError, OSError: with a message for the user.
    """
    prompts = [prompt.encode() for prompt in args.prompt or DEFAULT_PROMPTS]
    for number, prompt in enumerate(prompts, 1):
        if not prompt:
            raise ValueError(f"--prompt must not be empty, got '' as number {number}")
    if args.max_tokens < 1:
        raise ValueError(f"--max-tokens must be >= 1, got {args.max_tokens}")
    _set_graph_flag()
    decoder = weights.load(weights.shipped(), implementation=args.implementation)
    batch = min(len(prompts), 8)
    length = min(CONTEXT, max(map(len, prompts)) + args.max_tokens)
    server = Server(
        decoder,
        num_pages=batch * -(-length // PAGE_SIZE),
        page_size=PAGE_SIZE,
        kv_dtype=args.kv_dtype,
        max_batch=batch,
        max_length=length,
        chunk=64,
        stop_token=corpus.SEPARATOR,
    )
    ids = [
        server.submit(prompt, args.max_tokens, temperature=args.temperature, seed=args.seed + index)
        for index, prompt in enumerate(prompts)
    ]
    started = time.perf_counter()
    server.warm_up()
    compile_s = time.perf_counter() - started
    progress = ProgressLine(sys.stderr)
    completions = server.run(progress)
    progress.end(server)
    runs = ", ".join(f"{op}: {name}" for op, name in _implementations(decoder, server).items())
    print(f"{runs} on {jax.devices()[0].device_kind}", file=sys.stderr)
    for number, (prompt, request) in enumerate(zip(prompts, ids), 1):
        completion = completions[request]
        print(f"--- {number}: {len(prompt)} bytes and {len(completion.tokens)} new ({completion.reason})")
        print((prompt + bytes(completion.tokens)).decode(errors="replace"))
    if args.stats:
        stats = server.stats
        print("--- statistics")
        for name, value in {
            "device": jax.devices()[0].device_kind,
            "implementation": ", ".join(dict.fromkeys(_implementations(decoder, server).values())),
            "cache": f"{args.kv_dtype}, {server.cache.nbytes_per_token} bytes a token",
            "pages": f"{stats.peak_pages} of {server.cache.num_pages} in use at most, {PAGE_SIZE} tokens each",
            "steps": stats.steps,
            "prompt tokens": f"{stats.prefill_tokens} computed, {stats.shared_tokens} shared",
            "new tokens": f"{stats.new_tokens} in {stats.seconds:.2f} s, {stats.tokens_per_second:.0f} a second",
            "compilation": f"{compile_s:.1f} s",
        }.items():
            print(f"{name:<15} {value}")
    return 0


def _set_graph_flag() -> None:
    """XLA reads its flags when it first computes: too late when something has run in this process already."""
    flags = os.environ.get("XLA_FLAGS", "")
    if GRAPH_FLAG not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {GRAPH_FLAG}=1".strip()


def _implementations(decoder: Decoder, server: Server) -> dict[str, str]:
    """What the primitives in the server's steps run on, by primitive."""
    i32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    cache = jax.eval_shape(lambda cache: cache, server.cache)
    candidates = explain(decoder.paged, i32((1,)), cache, i32((1, 1)), i32((1,)), i32((2,)))
    return {candidate.op: candidate.implementation for candidate in candidates if candidate.chosen}

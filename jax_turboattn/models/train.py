"""Trains the shipped byte-level model on Python source, through `jax_turboattn.attention`.

    python -m jax_turboattn.models.train --minutes 8 --out DIR

writes DIR/python_bytes.safetensors (the best held-out weights so far, bf16) and DIR/training.json about once a minute.
`--evaluate [FILE]` only prints the held-out loss of a weights file (default: the shipped one) beside gzip, xz and an
order-5 count model.

Float32 master weights, bf16 compute, AdamW. The learning rate follows a cosine over the time that is left, so that any
machine ends its schedule in the minutes it was given. An average of the weights over the last steps is what is
evaluated and saved: at the high learning rates of most of the schedule it is far better than the weights themselves.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import math
import platform
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from ..rope import RopeConfig
from . import corpus, weights
from .decoder import Decoder, DecoderConfig

CONFIG = DecoderConfig(  # 2.94 M parameters, 5.9 MB in bf16
    vocab_size=256,
    hidden_size=256,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    mlp_size=368,
    rope=RopeConfig(dim=64),
)
BETA1, BETA2, EPSILON = 0.9, 0.98, 1e-8
CLIP_NORM = 1.0
WARMUP_STEPS = 200
FINAL_RATE = 0.02  # of the peak
AVERAGE_DECAY = 0.998


@functools.partial(
    jax.jit, static_argnames=("graph", "batch", "context", "dropout", "decay"), donate_argnames=("state",)
)
def train_steps(graph, state, data, rates, key, *, batch, context, dropout, decay):
    """One AdamW step on random crops of `data` per entry of `rates`, all on the device.

    Args:
      state: dict of params, first and second moments, average (all like the parameters) and count (int32).
      data: uint8 stream.   rates: float32, the peak-scaled learning rates.   decay: weight decay of the matrices.
    Returns:
      state and the mean loss in bits per byte.
    """

    def loss(params, tokens, key):
        logits = nnx.merge(graph, params)(tokens[:, :-1], dropout_rate=dropout, dropout_key=key)
        chosen = jnp.take_along_axis(logits, tokens[:, 1:, None].astype(jnp.int32), -1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)

    def step(state, inputs):
        rate, key = inputs
        crop_key, dropout_key = jax.random.split(key)
        starts = jax.random.randint(crop_key, (batch, 1), 0, data.size - context)
        tokens = data[starts + jnp.arange(context + 1)]
        value, grads = jax.value_and_grad(loss)(state["params"], tokens, dropout_key)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, CLIP_NORM / norm), grads)
        count = state["count"] + 1
        first = jax.tree.map(lambda m, g: BETA1 * m + (1 - BETA1) * g, state["first"], grads)
        second = jax.tree.map(lambda v, g: BETA2 * v + (1 - BETA2) * g * g, state["second"], grads)

        def update(path, p, m, v):
            direction = (m / (1 - BETA1**count)) / (jnp.sqrt(v / (1 - BETA2**count)) + EPSILON)
            is_norm = "scale" in jax.tree_util.keystr(path)
            return p - rate * (direction + (0.0 if is_norm else decay) * p)

        params = jax.tree_util.tree_map_with_path(update, state["params"], first, second)
        keep = jnp.minimum(AVERAGE_DECAY, count / (count + 10.0))
        average = jax.tree.map(lambda a, p: keep * a + (1 - keep) * p, state["average"], params)
        state = {"params": params, "first": first, "second": second, "average": average, "count": count}
        return state, value / math.log(2)

    state, losses = jax.lax.scan(step, state, (rates, jax.random.split(key, rates.size)))
    return state, losses.mean()


@functools.partial(jax.jit, static_argnames=("graph",))
def window_bits(graph, params, tokens, scored):
    """Total bits of the scored targets. tokens: uint8 [batch, C + 1]; scored: bool [batch, C]."""
    logp = jax.nn.log_softmax(nnx.merge(graph, params)(tokens[:, :-1]))
    chosen = jnp.take_along_axis(logp, tokens[:, 1:, None].astype(jnp.int32), -1)[..., 0]
    return -jnp.sum(jnp.where(scored, chosen, 0)) / math.log(2)


def windows(files: list[bytes], context: int, batch: int) -> tuple[np.ndarray, np.ndarray]:
    """Cuts files into overlapping windows that score every byte once, each with at least C / 2 bytes before it
    (or all there are).

    Returns:
      tokens uint8 [n, batch, C + 1] and scored bool [n, batch, C].
    """
    half = context // 2
    tokens, scored = [], []
    for text in files:
        stream = corpus.join([text])
        done = 0  # targets up to this one are scored
        for end in range(min(context, stream.size - 1), stream.size + half - 1, half):
            end = min(end, stream.size - 1)
            begin = max(0, end - context)
            window = np.zeros(context + 1, np.uint8)
            window[: end + 1 - begin] = stream[begin : end + 1]
            mask = np.zeros(context, bool)
            mask[done - begin : end - begin] = True
            tokens.append(window)
            scored.append(mask)
            done = end
    pad = -len(tokens) % batch
    tokens += [np.zeros(context + 1, np.uint8)] * pad
    scored += [np.zeros(context, bool)] * pad
    return np.reshape(tokens, (-1, batch, context + 1)), np.reshape(scored, (-1, batch, context))


def held_out_bits(graph, params, files: list[bytes], context: int, batch: int) -> float:
    """Bits per byte of held-out files, the model's context starting at each file's separator."""
    tokens, scored = windows(files, context, batch)
    total = sum(float(window_bits(graph, params, t, s)) for t, s in zip(tokens, scored))
    return total / sum(len(text) for text in files)


def train(args: argparse.Namespace) -> None:
    start = time.monotonic()
    training, held_out = corpus.python_sources()
    data = jnp.asarray(corpus.join(training))
    out = Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    pool = concurrent.futures.ThreadPoolExecutor(1)
    others = pool.submit(corpus.baselines, training, held_out)

    decoder = Decoder(CONFIG, dtype=jnp.bfloat16, rngs=nnx.Rngs(args.seed))
    graph, params = nnx.split(decoder)
    count = sum(p.size for p in jax.tree.leaves(params))
    print(
        f"{count:,} parameters; {len(training)} files, {data.size:,} bytes to train on; {len(held_out)} files, "
        f"{sum(map(len, held_out)):,} bytes held out; {jax.devices()[0].device_kind}",
        flush=True,
    )
    zeros = functools.partial(jax.tree.map, jnp.zeros_like)
    state = {
        "params": params,
        "first": zeros(params),
        "second": zeros(params),
        "average": jax.tree.map(jnp.copy, params),
        "count": jnp.int32(0),
    }
    key = jax.random.key(args.seed, impl="rbg")  # the default generator takes a tenth of the step for dropout
    record = {
        "arguments": {name: value for name, value in vars(args).items() if name not in ("out", "evaluate")},
        "device": jax.devices()[0].device_kind,
        "python": platform.python_version(),
        "parameters": count,
        "training_bytes": int(data.size),
        "held_out_bytes": sum(map(len, held_out)),
        "history": [],
    }
    best, steps, evaluation_s, chunk_s = math.inf, 0, 0.0, 0.0
    next_evaluation = start + args.every
    finished = False
    while not finished:
        began = time.monotonic()
        time_for_steps = 60 * args.minutes - 1.5 * evaluation_s
        progress = min(1.0, (began - start) / time_for_steps)
        rates = args.rate * (FINAL_RATE + (1 - FINAL_RATE) * (1 + math.cos(math.pi * progress)) / 2)
        rates = rates * np.minimum(1.0, (steps + 1 + np.arange(args.steps)) / WARMUP_STEPS)
        key, chunk_key = jax.random.split(key)
        state, loss = train_steps(
            graph,
            state,
            data,
            jnp.asarray(rates, jnp.float32),
            chunk_key,
            batch=args.batch,
            context=args.context,
            dropout=args.dropout,
            decay=args.decay,
        )
        loss = float(loss)  # waits
        steps += args.steps
        now = time.monotonic()
        chunk_s = now - began if chunk_s == 0 else min(chunk_s, now - began)  # the first one compiles
        finished = now - start + chunk_s > time_for_steps
        if now < next_evaluation and not finished:
            continue
        rounded = jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(a.dtype), state["average"])
        bits = held_out_bits(graph, rounded, held_out, args.context, args.batch)
        evaluation_s = time.monotonic() - now
        next_evaluation = time.monotonic() + args.every
        entry = {
            "minutes": round((now - start) / 60, 2),
            "step": steps,
            "epochs": round(steps * args.batch * args.context / data.size, 2),
            "step_ms": round(1000 * chunk_s / args.steps, 1),
            "training_bits": round(loss, 4),
            "held_out_bits": round(bits, 4),
        }
        print("  ".join(f"{name} {value}" for name, value in entry.items()), flush=True)
        record["history"].append(entry)
        if bits < best:
            best = bits
            weights.save(out / "python_bytes.safetensors", nnx.merge(graph, rounded))
        record["held_out_bits"] = best
        if finished or others.done():
            record["others_bits"] = others.result()
        (out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    pool.shutdown()
    print_table(best, record["others_bits"])


def evaluate(args: argparse.Namespace) -> None:
    training, held_out = corpus.python_sources()
    graph, params = nnx.split(weights.load(args.evaluate, dtype=jnp.float32))
    bits = held_out_bits(graph, params, held_out, args.context, args.batch)
    print_table(bits, corpus.baselines(training, held_out))


def print_table(model: float, others: dict[str, float]) -> None:
    print("held-out bits per byte")
    for name, bits in {"this model": model, **others}.items():
        print(f"  {name:<15} {bits:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m jax_turboattn.models.train", description=__doc__.split("\n")[0])
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", metavar="DIR", help="train, and write weights and record here")
    what.add_argument(
        "--evaluate",
        metavar="FILE",
        nargs="?",
        const=weights.shipped(),
        help="only evaluate these weights (or the shipped)",
    )
    parser.add_argument("--minutes", type=float, default=8.0, help="wall-clock time in all (default %(default)s)")
    parser.add_argument("--every", type=float, default=60.0, help="seconds between evaluations (default %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="sequences a step (default %(default)s)")
    parser.add_argument("--context", type=int, default=1024, help="bytes a sequence (default %(default)s)")
    parser.add_argument("--steps", type=int, default=25, help="steps a device call (default %(default)s)")
    parser.add_argument("--rate", type=float, default=3e-3, help="peak learning rate (default %(default)s)")
    parser.add_argument("--decay", type=float, default=0.1, help="weight decay (default %(default)s)")
    parser.add_argument("--dropout", type=float, default=0.1, help="on the branches (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, crops and dropout (default %(default)s)")
    args = parser.parse_args()
    for name in ("minutes", "batch", "context", "steps"):
        if getattr(args, name) <= 0:
            parser.error(f"--{name} must be > 0, got {getattr(args, name)}")
    try:
        evaluate(args) if args.evaluate else train(args)
    except (OSError, ValueError) as error:
        print(f"{parser.prog}: error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

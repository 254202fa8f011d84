"""The CPU kernels against the plain jnp path on this host: decode speed, memory, dispatch and import time.

    python benchmarks/bench_cpu.py [--quick]

prints a table and writes benchmarks/results/<date>_<processor>_cpu.json. Runs on random data with a shuffled page table.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import os
import pathlib
import platform
import re
import resource
import subprocess
import sys
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from timing import RESULTS, median_seconds

import jax_turboattn as ta

H, K, D, PAGE = 32, 8, 128, 64


def decode_inputs(batch, length, kv_dtype, dtype=jnp.float32):
    """Query, a cache filled with `length` random tokens a sequence, a shuffled table, lengths."""
    pages = -(-length // PAGE)
    rng = np.random.default_rng(0)
    table = jnp.asarray(rng.permutation(batch * pages).reshape(batch, pages).astype(np.int32))
    cache = ta.PagedKVCache.create(batch * pages, K, D, page_size=PAGE, dtype=kv_dtype, param_dtype=dtype)
    append = jax.jit(ta.append_kv, donate_argnums=0)
    for b in range(batch):  # one sequence at a time: the pool must be the only large array alive
        new = jnp.asarray(rng.normal(size=(2, length, K, D)).astype(np.float32)).astype(dtype)
        lens, offsets = jnp.array([length], jnp.int32), jnp.array([0, length], jnp.int32)
        cache = append(cache, new[0], new[1], table[b : b + 1], lens, offsets)
    query = jnp.asarray(rng.normal(size=(batch, H, D)).astype(np.float32)).astype(dtype)
    return query, cache, table, jnp.full(batch, length, jnp.int32)


def decode(kv_dtype, implementation, batch, length, repeats):
    dtype = kv_dtype if kv_dtype in ("bfloat16", "float16") else "float32"
    inputs = decode_inputs(batch, length, kv_dtype, jnp.dtype(dtype))
    function = jax.jit(functools.partial(ta.paged_decode, implementation=implementation))
    seconds = median_seconds(function, *inputs, repeats=repeats)
    return seconds, inputs[1].nbytes_per_token * batch * length


def memory(length):
    """Peak resident MB of a decode process beyond its cache, at this context length."""
    inputs = decode_inputs(1, length, "float32")
    function = jax.jit(functools.partial(ta.paged_decode, implementation="cpu")).lower(*inputs).compile()
    reset_peak()
    before = peak_mb()
    jax.block_until_ready(function(*inputs))
    print(peak_mb() - before)


def reset_peak():
    pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM to the present resident size


def peak_mb():
    return int(re.search(r"VmHWM:\s+(\d+)", pathlib.Path("/proc/self/status").read_text())[1]) / 1024


def dispatch(repeats):
    """Host microseconds of a jitted decode on tiny shapes, and of a trivial jitted function of the same arguments."""
    query, cache, table, lens = decode_inputs(1, 1, "float32")
    step = jax.jit(functools.partial(ta.paged_decode, implementation="cpu"))
    trivial = jax.jit(lambda query, cache, table, lens: query + 1)
    times = {}
    for _ in range(5):  # interleaved: a slow moment of the host hits both
        for name, function in (("decode", step), ("trivial", trivial)):
            jax.block_until_ready(function(query, cache, table, lens))
            start = time.perf_counter()
            for _ in range(repeats):
                out = function(query, cache, table, lens)
            jax.block_until_ready(out)
            times.setdefault(name, []).append((time.perf_counter() - start) / repeats * 1e6)
    return {name: min(values) for name, values in times.items()}


def import_seconds():
    """Seconds that `import jax_turboattn` takes after `import jax`."""
    code = "import time, jax; t = time.perf_counter(); import jax_turboattn; print(time.perf_counter() - t)"
    return min(float(subprocess.check_output([sys.executable, "-c", code], text=True)) for _ in range(3))


def processor():
    text = pathlib.Path("/proc/cpuinfo").read_text()
    name = re.search(r"model name\s*: (.*)", text)
    return f"{(name[1] if name else platform.machine()).strip()} x{os.cpu_count()}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="shorter contexts, nothing is written")
    parser.add_argument("--memory", type=int, metavar="LENGTH", help=argparse.SUPPRESS)  # one process a length
    args = parser.parse_args()
    if args.memory:
        return memory(args.memory)

    batch, length, repeats = (2, 512, 3) if args.quick else (8, 4096, 7)
    rows = []
    for kv_dtype, implementation in (
        ("float32", "xla"),
        ("float32", "cpu"),
        ("bfloat16", "cpu"),
        ("int8", "xla"),
        ("int8", "cpu"),
        ("int4", "cpu"),
        ("float8_e4m3fn", "cpu"),
    ):
        seconds, nbytes = decode(kv_dtype, implementation, batch, length, repeats)
        rows.append(
            dict(kv_dtype=kv_dtype, implementation=implementation, ms=seconds * 1e3, gb_s=nbytes / seconds / 1e9)
        )
    by_name = {(r["kv_dtype"], r["implementation"]): r["ms"] for r in rows}
    lengths = (512, 2048) if args.quick else (1024, 4096, 16384)
    peaks = {
        n: float(subprocess.check_output([sys.executable, __file__, "--memory", str(n)], text=True)) for n in lengths
    }
    overhead = dispatch(200 if args.quick else 2000)
    record = dict(
        date=datetime.date.today().isoformat(),
        processor=processor(),
        jax=jax.__version__,
        decode=dict(batch=batch, length=length, heads=H, kv_heads=K, head_dim=D, page_size=PAGE, rows=rows),
        speedup_over_xla=by_name["float32", "xla"] / by_name["float32", "cpu"],
        int8_over_float32=by_name["int8", "cpu"] / by_name["float32", "cpu"],
        peak_mb_beyond_cache=peaks,
        dispatch_us=overhead,
        import_s=import_seconds(),
        max_rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    )
    print(f"decode {batch} x {length}, H {H}, K {K}, D {D}, on {record['processor']}, jax {record['jax']}")
    for r in rows:
        print(f"  {r['kv_dtype']:<14} {r['implementation']:<4} {r['ms']:8.2f} ms  {r['gb_s']:6.2f} GB/s")
    print(
        f"cpu over xla, float32: {record['speedup_over_xla']:.2f}x; int8 takes {record['int8_over_float32']:.2f} of float32"
    )
    print("peak memory beyond the cache, MB by context: " + ", ".join(f"{n}: {mb:.1f}" for n, mb in peaks.items()))
    print(f"dispatch: {overhead['decode']:.1f} us, a trivial function {overhead['trivial']:.1f} us")
    print(f"import: {record['import_s']:.3f} s beyond jax's own")
    if not args.quick:
        name = re.sub(r"[^A-Za-z0-9]+", "-", record["processor"]).strip("-").lower()
        path = RESULTS / f"{record['date']}_{name}_cpu.json"
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main()

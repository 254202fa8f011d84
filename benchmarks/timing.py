"""Times of jitted calls, host facts, and files of results: what the benchmarks share."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import pathlib
import re
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

RESULTS = pathlib.Path(__file__).parent / "results"
ROOT = RESULTS.parents[1]


class Hoisted(Exception):
    """The compiled program does not hold every call that it should: its time would mean nothing."""


def median_seconds(function: Callable, *arguments: Any, repeats: int) -> float:
    """Median wall time of `function(*arguments)` until its results are there, after one call that is not counted."""
    jax.block_until_ready(function(*arguments))
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        times.append(time.perf_counter() - start)
    return float(np.median(times))


@dataclasses.dataclass(frozen=True)
class Work:
    """What is timed: `carry = call(carry, shared, item)`.

    Attributes:
      call: one call; its result takes the place of the query, so that calls form a chain and none can be left out.
      carry: the first query (or query and cache).
      shared: arrays that all calls read.
      items: one set of inputs a call, used in turn: several, where one set would stay in the L2 cache.
      pattern: what a call looks like in the optimised HLO.
      donate: the carry is updated in place.
    """

    call: Callable[[Any, Any, Any], Any]
    carry: Any
    shared: Any
    items: tuple[Any, ...]
    pattern: str
    donate: bool = False


@dataclasses.dataclass(frozen=True)
class Times:
    """Microseconds a call.

    Attributes:
      us: `calls` of them chained in one program, with the dispatch of that program: the median.
      device_us: the same on the device: from the start of a program's first kernel to the end of its last one, by the
        profiler; None where it shows none.
      single_us: a program of one call, from the host and back; None when not asked for.
      compile_s: seconds to compile the chained program.
      kernels_us: mean duration of each kernel of the program, by name. Kernels may overlap.
    """

    us: float
    device_us: float | None
    single_us: float | None
    compile_s: float
    kernels_us: dict[str, float]


def measure(work: Work, calls: int, repeats: int = 7, single: bool = True) -> Times:
    """Times of a Work.

    Raises:
      Hoisted: the program holds fewer calls than it should.
    """
    start = time.perf_counter()
    chain = compiled_chain(work, calls)
    compile_s = time.perf_counter() - start
    us, carry = _median_us(chain, work, work.carry, repeats)
    device_us, kernels_us, carry = _device_us(chain, work, carry, repeats)
    single_us = None
    if single:
        single_us, _ = _median_us(compiled_chain(work, 1), work, carry, 3 * repeats)
    return Times(us / calls, device_us and device_us / calls, single_us, compile_s, kernels_us)


def compiled_chain(work: Work, calls: int) -> Callable:
    """`calls` calls, unrolled in one program, which XLA captures as one graph: loops of microseconds are not timed."""

    def chain(carry, shared, items):
        for i in range(calls):
            carry = work.call(carry, shared, items[i % len(items)])
        return carry

    jitted = jax.jit(chain, donate_argnums=(0,) if work.donate else ())
    compiled = jitted.lower(work.carry, work.shared, work.items).compile()
    found = len(re.findall(work.pattern, compiled.as_text()))
    if found < calls:
        raise Hoisted(f"{found} of {calls} calls are in the program (looked for {work.pattern})")
    return compiled


def _median_us(program: Callable, work: Work, carry: Any, repeats: int) -> tuple[float, Any]:
    """Median time of a program, and a carry that is still alive. The first call is not counted."""
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        result = jax.block_until_ready(program(carry, work.shared, work.items))
        times.append(time.perf_counter() - start)
        if work.donate:
            carry = result
    return float(np.median(times[1:])) * 1e6, carry


def _device_us(program: Callable, work: Work, carry: Any, repeats: int) -> tuple[float | None, dict[str, float], Any]:
    """Median time of a program on the device, or None, what its kernels take, and a carry that is still alive."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(repeats):
                result = jax.block_until_ready(program(carry, work.shared, work.items))
                if work.donate:
                    carry = result
        files = list(pathlib.Path(folder).rglob("*.xplane.pb"))
        planes = jax.profiler.ProfileData.from_file(str(files[0])).planes if files else ()
        kernels = [
            (event.start_ns, event.end_ns, event.name)
            for plane in planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if line.name.startswith("Stream")
            for event in line.events
        ]
    if not kernels or len(kernels) % repeats:
        return None, {}, carry
    kernels.sort()
    count = len(kernels) // repeats
    runs = [kernels[i : i + count] for i in range(0, len(kernels), count)]
    spans = [max(end for _, end, _ in run) - run[0][0] for run in runs]
    durations: dict[str, list[float]] = {}
    for start, end, name in kernels:
        durations.setdefault(re.sub(r"^void |[<(].*", "", name), []).append(end - start)
    return float(np.median(spans)) / 1e3, {name: float(np.mean(ns)) / 1e3 for name, ns in durations.items()}, carry


# ---- the host and its results


def facts() -> dict[str, Any]:
    """Card, driver, versions, commit. COMMIT names the commit where the tree came without its history."""
    device = jax.devices()[0]

    def output(*command):
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return "unknown"

    driver = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]
    return dict(
        date=datetime.date.today().isoformat(),
        card=device.device_kind,
        driver=driver,
        jax=jax.__version__,
        xla_flags=os.environ.get("XLA_FLAGS", ""),
        commit=os.environ.get("COMMIT") or output("git", "rev-parse", "--short", "HEAD"),
    )


def write(record: dict[str, Any], what: str) -> pathlib.Path:
    """Writes results/<date>_<card>_<what>.json, and the same file into the folder OUT when that is set."""
    card = re.sub(r"[^a-z0-9]+", "-", record["card"].lower()).strip("-")
    name = f"{record['date']}_{card}_{what}.json"
    text = json.dumps(record, indent=1) + "\n"
    for folder in filter(None, (RESULTS, os.environ.get("OUT"))):
        pathlib.Path(folder, name).write_text(text)
    return RESULTS / name

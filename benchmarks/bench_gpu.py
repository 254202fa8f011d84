"""The CUDA kernels on this host's GPU beside their peers: decode, prefill, chunked prefill and mixed batches, append.

    python benchmarks/bench_gpu.py [--quick] [--only KIND or WORD] [--peers NAME,...] [--limit SECONDS]

Prints a table of times (Times, in timing.py) with each one's ratio to the best JAX-callable peer of the same run, with
the dispatch (`x us`) and on the device, to its best outside reference (FlashAttention-2 in PyTorch, FlashInfer: JAX
cannot call them) and, for what is bound by bytes, to the read stream (decode) or the copy (append) measured in it.
Rates and ratios are of the time on the device, where the profiler shows it. Writes the same to
benchmarks/results/<date>_<card>_<what>.json, and into the folder $OUT. A peer that is missing says why.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import sys
import time
from typing import Any

sys.path.append(str(pathlib.Path(__file__).parent))  # for PYTHONSAFEPATH=1

# Before jax starts: one graph a program, however short, and while the profiler looks on; no grab at the whole memory,
# which torch needs a part of.
os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_graph_min_graph_size=1 "
    "--xla_enable_command_buffers_during_profiling=true"
).strip()
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import grid
import jax
import jax.numpy as jnp
import peers
import timing

OWN = ("cuda", "cuda:sm80", "pallas", "cuda dense")  # ours: not what we are compared with
MEMORY_SHARE = 0.85  # of the card's memory that a case may take
WARM_UP_S = 0.5  # a card without work has low clocks (345 MHz on an H200): a sum then showed 2.4 TB/s in place of 4.2
KINDS = {"decode": "read stream", "append": "copy"}  # what bounds it


def ceilings(calls: int = 4) -> dict[str, float]:
    """TB/s of a sum over 4 GiB, of an elementwise copy (read + written), and of cuDNN's dense decode of 4.3 GB."""
    found = {}
    limit = memory_limit()
    size = min(4 << 30, int(limit / 8))
    x = peers.random(0, (size // 2,))
    total = jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32))
    end = time.monotonic() + WARM_UP_S
    while time.monotonic() < end:
        jax.block_until_ready(total(x))
    seconds = timing.median_seconds(total, x, repeats=7)
    found["sum"] = size / seconds / 1e12
    seconds = timing.median_seconds(jax.jit(lambda x: x + 1), x, repeats=7)
    found["copy"] = 2 * size / seconds / 1e12
    del x
    case = next(case for case in grid.DECODE if case.name == grid.CEILING)
    if peers.memory(case) < MEMORY_SHARE * limit:
        row = measure(case, "cudnn dense", dict(peers.works(case))["cudnn dense"], calls, single=False)
        if "rate" in row:
            found["cudnn decode"] = row["rate"]
    found["read stream"] = max(found["sum"], found.get("cudnn decode", 0.0))
    return found


def memory_limit() -> float:
    """Bytes that jax may take on the first device; all of them where it does not say (CPU)."""
    statistics = jax.devices()[0].memory_stats() or {}
    return statistics.get("bytes_limit", float("inf")) if "bytes_limit" in statistics else 8 << 30


def measure(case, peer: str, make, calls: int, single: bool) -> dict:
    """One row of the results: times and rate, or the reason why there are none."""
    row = dict(kind=case.kind, case=case.name, peer=peer)
    try:
        times = timing.measure(make(), calls, single=single)
    except (peers.Absent, NotImplementedError) as reason:
        return row | dict(absent=str(reason))
    except Exception as error:  # a peer that fails must not take the others with it
        return row | dict(failed=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")
    return with_rate(row | dataclasses.asdict(times), case)


def with_rate(row: dict, case) -> dict:
    amount, unit = peers.amount(case)
    return row | dict(rate=amount / (row["device_us"] or row["us"]) * 1e6, unit=unit)


def chosen(only: str, quick: bool) -> list:
    cases = [case for case in grid.ALL if case.quick or not quick]
    kinds = {case.kind for case in cases}
    if only in kinds:
        return [case for case in cases if case.kind == only]
    return [case for case in cases if only in f"{case.kind} {case.name}"]


def add_ratios(rows: list[dict], ceiling: dict[str, float]) -> None:
    """Adds to each timed row its speed over the best peer, over the best outside reference, and over the ceiling.

    All on the device, where outside references are timed; `_us`: with the dispatch.
    """

    def best(row: dict, time: str, outside: bool) -> float | None:
        others = [
            other[time]
            for other in rows
            if other["case"] == row["case"] and other["peer"] not in OWN and other.get("outside", False) == outside
            if other.get(time)
        ]
        return min(others) / row[time] if others and row[time] else None

    for row in rows:
        if "us" in row:
            row["over_best_peer_us"] = best(row, "us", outside=False)
            row["over_best_peer"] = best(row, "device_us", outside=False)
            row["over_best_outside"] = best(row, "device_us", outside=True)
            limit = ceiling.get(KINDS.get(row["kind"], ""))
            row["of_ceiling"] = row["rate"] / limit if limit else None


def print_row(row: dict) -> None:
    """Rows appear as they are measured; what they compare with follows in the table at the end."""
    what = (
        f"{row['us']:9.1f} us {row['rate']:7.2f} {row['unit']}" if "us" in row else row.get("failed") or row["absent"]
    )
    print(f"  {row['kind']:<8} {row['case']:<32} {row['peer']:<14} {what[:100]}", flush=True)


def print_table(rows: list[dict], ceiling: dict[str, float]) -> None:
    ratios = f"{'x us':>6} {'x peer':>6} {'x outside':>9} {'x ceiling':>9}"
    print(f"\n{'case':<34} {'peer':<14} {'us':>9} {'device':>9} {'single':>9} {'rate':>7}         {ratios}")
    for row in rows:
        if "us" not in row:
            continue
        times = " ".join(f"{row[n]:9.1f}" if row[n] else " " * 9 for n in ("us", "device_us", "single_us"))
        names = ("over_best_peer_us", "over_best_peer", "over_best_outside", "of_ceiling")
        ratios = [f"{row[n]:.2f}" if row[n] else "" for n in names]
        print(
            f"{row['case']:<34} {row['peer']:<14} {times} {row['rate']:7.2f} {row['unit']:<7} "
            f"{ratios[0]:>6} {ratios[1]:>6} {ratios[2]:>9} {ratios[3]:>9}"
        )
    print("ceilings: " + ", ".join(f"{name} {rate:.2f} TB/s" for name, rate in ceiling.items()))


def summary(rows: list[dict]) -> str:
    """One line: the worst ratio of `cuda` by kind."""
    parts = []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        name = "of_ceiling" if kind in KINDS else "over_best_peer"
        ratios = [row[name] for row in rows if row["kind"] == kind and row["peer"] == "cuda" and row.get(name)]
        if ratios:
            parts.append(f"{kind} {min(ratios):.2f}..{max(ratios):.2f} of {KINDS.get(kind, 'the best peer')}")
    absent = sum("absent" in row and row["peer"] == "cuda" for row in rows)
    failed = sum("failed" in row for row in rows)
    return "; ".join(parts or ["no row of cuda"]) + f"; {absent} without a cuda kernel, {failed} failed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few rows, without the time of a single dispatched call")
    parser.add_argument("--only", default="", help="a kind of rows, or a word in their names")
    parser.add_argument("--peers", default="", help="names, separated by commas: `cuda,cudnn dense`; default all")
    limit = "seconds for all; rows that it leaves out are listed; by default the environment's LIMIT, if it is set"
    parser.add_argument("--limit", type=float, default=float(os.environ.get("LIMIT") or "inf"), help=limit)
    args = parser.parse_args()
    end = time.monotonic() + args.limit
    wanted = set(filter(None, map(str.strip, args.peers.split(","))))
    unknown = wanted - set(peers.NAMES)
    if unknown:
        print(f"no peer is called {', '.join(sorted(unknown))}: there are {', '.join(peers.NAMES)}")
        return 5
    if jax.default_backend() != "gpu":
        print(f"no GPU: jax runs on {jax.devices()[0].device_kind}; python -P -m jax_turboattn env says more")
        return 1
    cases = chosen(args.only, args.quick)
    if not cases:
        print(f"no row has {args.only!r} in its name")
        return 5
    outside = outside_rows(cases, wanted, args.quick, min(300.0, args.limit / 3))  # before jax holds memory
    record = timing.facts()
    print(f"{record['card']}, driver {record['driver']}, jax {record['jax']}, commit {record['commit']}")
    ceiling = ceilings()
    rows: list[dict] = []
    left_out = []
    for case in cases:
        if time.monotonic() > end:
            left_out.append(case.name)
            continue
        rows += measure_case(case, wanted, quick=args.quick)
        for row in outside.get(case, ()):
            rows.append(row)
            print_row(row)
    add_ratios(rows, ceiling)
    print_table(rows, ceiling)
    if left_out:
        print(f"not measured, out of time: {', '.join(left_out)}")
    what = "-".join(filter(None, ["gpu", args.only.replace(" ", "-").replace("/", "-"), args.quick and "quick"]))
    found = dict(peers=sorted(wanted) or "all", ceilings=ceiling, rows=rows, not_measured=left_out)
    path = timing.write(record | found, what)
    print(path)
    print(summary(rows))
    return 1 if any("failed" in row and row["peer"] in OWN for row in rows) else 0


def measure_case(case, wanted: set[str], quick: bool) -> list[dict]:
    """Rows of all peers of a case; the arrays of the case die with the call."""
    if peers.memory(case) > MEMORY_SHARE * memory_limit():
        row = dict(kind=case.kind, case=case.name, peer="cuda", absent=f"it needs {peers.memory(case) / 1e9:.0f} GB")
        print_row(row)
        return [row]
    calls = 16 if case.kind == "decode" else 12
    rows = []
    for peer, make in peers.works(case):
        if wanted and peer not in wanted:
            continue
        if quick and peer in ("fa3 4 splits", "xla"):
            continue
        # Plain jnp is slow to run and to compile: a short chain times it as well.
        rows.append(measure(case, peer, make, 4 if peer == "xla" else calls, single=not quick))
        print_row(rows[-1])
    return rows


def outside_rows(cases: list, wanted: set[str], quick: bool, seconds: float) -> dict[Any, list[dict]]:
    """Rows of the outside references by case; a quick run leaves FlashInfer to those that ask for it."""
    entries = [(case, peer) for case in cases for peer in peers.outside(case)]
    if wanted:
        entries = [(case, peer) for case, peer in entries if peer in wanted]
    rows: dict[Any, list[dict]] = {}
    for package in ("torch",) if quick and not wanted else ("torch", "flashinfer"):
        mine = [(case, peer) for case, peer in entries if peer.startswith(package)]
        for (case, peer), result in zip(mine, peers.outside_us(mine, seconds), strict=True):
            row = dict(kind=case.kind, case=case.name, peer=peer, outside=True)
            if isinstance(result, str):
                row |= dict(absent=result)
            else:
                row = with_rate(row | dict(us=result, device_us=result, single_us=None), case)
            rows.setdefault(case, []).append(row)
    return rows


if __name__ == "__main__":
    sys.exit(main())

"""`make gpu`: builds the package and checks it on this host's GPU, stage by stage, without network.

Needs a GPU; Python with jax (CUDA), pytest, pytest-xdist and hypothesis; for the build nvcc, cmake, ninja, nanobind and
scikit-build-core; compute-sanitizer for its stages. Environment:

    PYTHON    the interpreter (default: the one that runs this)
    PREBUILT  a folder with _cpu*.so and _cuda*.so: taken as they are, nothing is compiled
    ONLY      stages, separated by commas (`ONLY=cuda,memcheck`), or else a word that selects in every stage what is
              named so (`ONLY=decode`: pytest -k, kernel names, rows of the benchmark)
    LIMIT     seconds for everything: a stage that no longer fits is not run, and is reported so
    OUT       a folder that gets the results and the whole log too

The last lines are a table with one row a stage. The exit status is 0 only if every stage passed (or, with a word in
ONLY, has nothing of that name).
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import datetime
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("PYTHON") or sys.executable
SITE = ROOT / "build/gpu"  # what is tested: the package as it is installed
CMAKE = ROOT / "build/gpu-cmake"  # kept, so that the next build compiles only what changed
SCRATCH = ROOT / "build/gpu-results"  # what stages leave for the summary, and their logs
RESULTS = ROOT / "benchmarks/results"
SANITIZERS = ("memcheck", "racecheck", "initcheck")
NOTHING = 5  # exit status of pytest, and of the programs here, when nothing has the name that was asked for
TAIL = 12  # lines of a stage's output that are shown, of a failed one three times as many
JOBS = min(12, os.cpu_count() or 1)
# compute-sanitizer itself dies now and then (SIGSEGV, after 25 s of these programs on average, XLA's own kernels among
# them), in the middle of anything and without a word; what it finds, it sums up at the end.
STARTS = 6
FUZZ_PARTS = 28  # processes, short for the same reason; there are 28 programs

# Every process beside others on one card: none may take all of its memory at the start. -P, as a variable that workers
# inherit: the build, not the sources in the current folder.
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])]),
    "PYTHONSAFEPATH": "1",
    "PYTHONUNBUFFERED": "1",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
# One allocation a buffer, so that a sanitizer knows where each ends; nothing runs that we did not ask for.
SANITIZED = {
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "XLA_FLAGS": "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0",
}
FACTS = """
import jax, json
from jax_turboattn import _cpu, _cuda
print(json.dumps(dict(
    device_error=_cuda.device_error(), platform=jax.default_backend(), card=jax.devices()[0].device_kind,
    jax=jax.__version__, ffi=_cuda.ffi_api_version(),
    cpu_kernels=len(_cpu.kernels()), cuda_kernels=len(_cuda.kernels()))))
"""


@dataclasses.dataclass
class Stage:
    """One row of the table. `least`: seconds below which starting it makes no sense."""

    name: str
    command: list[str]
    least: int
    environment: dict[str, str] = dataclasses.field(default_factory=dict)
    missing: str | None = None  # why it cannot run here
    parts: list[list[str]] = dataclasses.field(default_factory=lambda: [[]])  # more arguments: a process each


@dataclasses.dataclass
class Outcome:
    """What became of a stage; `result` is passed, failed, out of time, not run, or none (nothing has that name)."""

    name: str
    result: str
    seconds: float = 0.0
    detail: str = ""


def main() -> int:
    os.chdir(ROOT)
    shutil.rmtree(SCRATCH, ignore_errors=True)
    SCRATCH.mkdir(parents=True)
    end = time.monotonic() + float(os.environ.get("LIMIT") or "inf")
    only = os.environ.get("ONLY", "")
    facts, built = build(end)
    outcomes = [built]
    if built.result == "passed":
        for stage in chosen_stages(only):
            outcomes.append(run(stage, end))
    report(outcomes, facts, only)
    return 0 if all(outcome.result in ("passed", "none" if only else "passed") for outcome in outcomes) else 1


def chosen_stages(only: str) -> list[Stage]:
    names = {stage.name for stage in stages("")}
    if only and set(only.split(",")) <= names:
        return [stage for stage in stages("") if stage.name in only.split(",")]
    return stages(only)


def stages(word: str) -> list[Stage]:
    """All stages, restricted to what `word` selects when it is not empty."""
    selected = ["-k", word] if word else []
    pytest = [
        PYTHON,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        "--tb=short",
        "--durations=5",
        "-o",
        "faulthandler_timeout=60",  # says in the log which test hangs
        *selected,
    ]
    parallel = ["-n", str(JOBS), "--dist", "worksteal"]  # workers keep runs of neighbours: one executable serves them
    conformance = {name: ROOT / f"tests/backends/test_conformance_{name}.py" for name in ("cuda", "pallas")}
    found = [
        Stage(
            name,
            [*pytest, *parallel, str(path)],
            60,
            missing=None if path.exists() else f"{path.relative_to(ROOT)} does not exist",
        )
        for name, path in conformance.items()
    ]
    found += [
        Stage("tests", [*pytest, *parallel, "tests/gpu", "--ignore", "tests/gpu/test_capture.py"], 60),
        Stage("capture", [*pytest, "-s", "tests/gpu/test_capture.py"], 30),  # alone: it takes times
    ]
    sanitizer = shutil.which("compute-sanitizer")
    missing = None if sanitizer else "compute-sanitizer is not on the PATH"
    cases = [PYTHON, "tests/gpu/sanitizer_cases.py", *(["--only", word] if word else [])]
    for tool in SANITIZERS:
        command = [*sanitize(sanitizer, tool), *cases]
        found.append(Stage(tool, command, 30, SANITIZED, missing))
    # 900 calls of each program: 10,800 through those that take a page table, lengths and offsets, twice that in all.
    fuzz = [*sanitize(sanitizer, "memcheck"), PYTHON, "tests/gpu/fuzz_program.py", "--sets", "100", "--calls", "9"]
    fuzz += ["--only", word] if word else []
    parts = [["--part", f"{i}/{FUZZ_PARTS}"] for i in range(FUZZ_PARTS)]
    found.append(Stage("fuzz", fuzz, 60, SANITIZED, missing, parts))
    bench = [PYTHON, "benchmarks/bench_gpu.py", "--quick", *(["--only", word] if word else [])]
    found.append(Stage("bench", bench, 45))
    return found


def sanitize(sanitizer: str | None, tool: str) -> list[str]:
    """Every kernel is watched: filters by kernel name made the sanitizer of CUDA 13.0 crash now and then."""
    if sanitizer is None:
        return []
    command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--print-limit", "20"]
    if tool == "memcheck":  # libraries probe the driver with calls that fail; only accesses count
        command += ["--report-api-errors", "no"]
    return command


def build(end: float) -> tuple[dict, Outcome]:
    """Fills SITE; returns what was built and where it runs."""
    started = time.monotonic()
    log = SCRATCH / "build.log"
    prebuilt = os.environ.get("PREBUILT")
    shutil.rmtree(SITE, ignore_errors=True)
    if prebuilt:
        modules = [*pathlib.Path(prebuilt).glob("_cpu*.so"), *pathlib.Path(prebuilt).glob("_cuda*.so")]
        shutil.copytree(
            ROOT / "jax_turboattn", SITE / "jax_turboattn", ignore=shutil.ignore_patterns("*.so", "__pycache__")
        )
        for module in modules:
            shutil.copy(module, SITE / "jax_turboattn")
        log.write_text(f"{len(modules)} modules of {prebuilt}\n")
        status = 0
    else:
        command = [PYTHON, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index"]
        command += ["--disable-pip-version-check", f"-Cbuild-dir={CMAKE}", "--target", str(SITE), "."]
        status = execute(command, log, end, {"TURBOATTN_CUDA": "ON"})
    if status == 0:
        facts_log = SCRATCH / "facts.log"
        status = execute([PYTHON, "-c", FACTS], facts_log, end)
        text = facts_log.read_text()
        log.write_text(log.read_text() + text)
        facts = json.loads(text.splitlines()[-1]) if status == 0 else {}
        if status == 0 and (facts["device_error"] or facts["platform"] != "gpu"):
            log.write_text(f"no usable GPU: {facts['device_error'] or 'jax runs on ' + facts['platform']}\n")
            status = 1
    seconds = time.monotonic() - started
    if status != 0:
        show(log, 3 * TAIL)
        return {}, Outcome("build", "out of time" if status is None else "failed", seconds, last_line(log))
    facts["commit"] = commit()
    facts["driver"] = driver()
    print(json.dumps(facts))
    kernels = f"{facts['cpu_kernels']} CPU and {facts['cuda_kernels']} CUDA kernels"
    return facts, Outcome("build", "passed", seconds, kernels + (", prebuilt" if prebuilt else ""))


def run(stage: Stage, end: float) -> Outcome:
    if stage.missing:
        return Outcome(stage.name, "not run", detail=stage.missing)
    left = end - time.monotonic()
    if left < stage.least:
        return Outcome(stage.name, "not run", detail=f"{left:.0f} s were left, it wants {stage.least} s or more")
    print(f"== {stage.name}", flush=True)
    log = SCRATCH / f"{stage.name}.log"
    started = time.monotonic()
    environment = dict(stage.environment)
    if stage.name == "bench" and end < float("inf"):
        environment["LIMIT"] = str(int(left) - 10)  # it stops in time by itself and reports what it has
    part_logs = [log if len(stage.parts) == 1 else log.with_suffix(f".{i}.log") for i in range(len(stage.parts))]

    def process(part: list[str], log: pathlib.Path) -> tuple[int | None, int]:
        """Exit status, and how often it had to be started."""
        for start in range(1, STARTS + 1):
            status = execute([*stage.command, *part], log, end, environment)
            died = stage.environment is SANITIZED and "SUMMARY" not in log.read_text(errors="replace")
            if status in (0, None) or not died:
                break
        return status, start

    with concurrent.futures.ThreadPoolExecutor(JOBS) as pool:
        outcomes = list(pool.map(process, stage.parts, part_logs))
    # The part that speaks for all: one that failed, else one that was stopped, else one that passed, else any.
    ranks = {None: 1, 0: 2, NOTHING: 3}
    worst = min(range(len(outcomes)), key=lambda i: ranks.get(outcomes[i][0], 0))
    status = outcomes[worst][0]
    said = last_line(part_logs[worst])
    if len(stage.parts) > 1:
        log.write_text("".join(part.read_text(errors="replace") for part in part_logs))
        ran = [part_status for part_status, _ in outcomes if part_status != NOTHING]
        said = f"{ran.count(0)} of {len(ran)} processes passed; {said}"
    again = sum(starts - 1 for _, starts in outcomes)
    if again > 0:
        said += f"; started again {again} times, having died without a summary"
    seconds = time.monotonic() - started
    result = {0: "passed", None: "out of time", NOTHING: "none"}.get(status, "failed")
    if "pytest" in stage.command and result == "passed" and " passed" not in last_line(log):
        result = "not run"  # every test was skipped
    show(log, TAIL if result == "passed" else 3 * TAIL)
    return Outcome(stage.name, result, seconds, said)


def execute(command: list[str], log: pathlib.Path, end: float, environment: dict[str, str] | None = None) -> int | None:
    """Exit status of `command`, its output in `log`; None when it was stopped at `end`."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=ENVIRONMENT | (environment or {}),
            start_new_session=True,  # so that its workers stop with it
        )
        try:
            return process.wait(None if end == float("inf") else max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return None


def show(log: pathlib.Path, lines: int) -> None:
    for line in log.read_text(errors="replace").splitlines()[-lines:]:
        print("  " + line[:200], flush=True)


def last_line(log: pathlib.Path) -> str:
    lines = [line.strip("= \n") for line in log.read_text(errors="replace").splitlines() if line.strip("= \n")]
    return lines[-1][:110] if lines else ""


def commit() -> str:
    """Of the tree; COMMIT names it where the tree came without its history."""
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return os.environ.get("COMMIT") or found.stdout.strip() or "unknown"


def driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"


def report(outcomes: list[Outcome], facts: dict, only: str) -> None:
    left = {path.stem: json.loads(path.read_text()) for path in sorted(SCRATCH.glob("*.json"))}
    record = dict(
        date=datetime.date.today().isoformat(),
        **facts,
        only=only,
        stages=[dataclasses.asdict(outcome) for outcome in outcomes],
        measured=left,
    )
    card = re.sub(r"[^a-z0-9]+", "-", facts.get("card", "no-gpu").lower()).strip("-")
    name = f"{record['date']}_{card}_check.json"
    text = json.dumps(record, indent=1) + "\n"
    if facts:
        (RESULTS / name).write_text(text)
    out = os.environ.get("OUT")
    if out:
        pathlib.Path(out, name).write_text(text)
        with open(pathlib.Path(out, "gpu.log"), "w") as whole:
            for outcome in outcomes:
                log = SCRATCH / f"{outcome.name}.log"
                if log.exists():
                    whole.write(f"==== {outcome.name}\n{log.read_text(errors='replace')}\n")
    print(
        f"\n{facts.get('card', 'no card')}, jax {facts.get('jax')}, commit {facts.get('commit')}"
        + (f", only {only}" if only else "")
    )
    for outcome in outcomes:
        print(f"{outcome.name:<10} {outcome.result:<11} {outcome.seconds:6.0f} s  {outcome.detail}")


if __name__ == "__main__":
    sys.exit(main())

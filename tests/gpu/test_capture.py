"""A scan over layers, captured as one CUDA graph: the same bits, no handler call on replay; times are kept."""

import functools
import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu
ROOT = pathlib.Path(__file__).resolve().parents[2]
# XLA keeps 16 captures of a call by default: the iterations of a loop of 32 would capture it again and again.
CAPTURED = "--xla_gpu_graph_min_graph_size=1 --xla_cmd_buffer_trace_cache_size=256"


@functools.cache
def run(implementation: str, flags: str) -> dict:
    command = [sys.executable, str(pathlib.Path(__file__).with_name("capture_program.py")), implementation]
    done = subprocess.run(command, env=os.environ | {"XLA_FLAGS": flags}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    calls = found["handler_calls"]
    print(f"{implementation} {flags or 'default flags'}: {found['step_us']:.1f} us a step, {calls} handler calls")
    results = ROOT / "build/gpu-results"  # tests/gpu/run.py puts what lies here into its own results
    if results.is_dir():
        name = f"capture-{implementation}-{'captured' if flags else 'default'}.json"
        (results / name).write_text(json.dumps(found))
    return found


@pytest.mark.parametrize("implementation", ["cuda", "pallas"])
def test_same_bits_captured_and_not(implementation):
    captured, plain = run(implementation, CAPTURED), run(implementation, "")
    assert captured["finite"]
    assert captured["sha256"] == plain["sha256"]


def test_no_handler_call_on_replay():
    captured, plain = run("cuda", CAPTURED), run("cuda", "")
    print(f"the captured step takes {captured['step_us'] / plain['step_us']:.2f} of the time of the other")
    assert captured["handler_calls"] == 0
    assert plain["handler_calls"] > 0  # one a layer and step: XLA does not capture the loop by default

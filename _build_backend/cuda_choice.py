"""Decides whether the CUDA module is built, for which GPUs and with which nvcc.

The build backend imports it (are compiler wheels needed?) and CMake runs it as a script: both see the same answer.
As a script it prints `key=value` lines: cuda (ON|OFF), why, archs (75;80;...), nvcc (a path or empty).
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys

# nvcc's own requirements are unpinned, so pip alone would put a 13.0 nvcc beside a newer nvvm: all five are held to one
# minor release. cccl is nobody's dependency, but cuda_fp16.h includes <nv/target> from it.
COMPILER_WHEELS = [
    f"{name}==13.0.*"
    for name in ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-runtime", "nvidia-cuda-cccl")
]
_MIN_NVCC = (12, 0)  # the first release that knows sm_90a


@dataclasses.dataclass(frozen=True)
class Choice:
    cuda: bool
    why: str
    archs: list[str]  # compute capabilities without the dot: ["90"]; ["all"] when none is named and no GPU is visible
    nvcc: str | None  # a path that ran, None when there is none


def visible_gpus() -> list[str]:
    """Compute capabilities (`"90"`) of the GPUs that the driver shows; empty without a driver or a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    found = set()
    for ordinal in range(count.value):
        device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGet(ctypes.byref(device), ordinal)
        driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
        driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)  # ..._MINOR
        found.add(major.value * 10 + minor.value)
    return [str(capability) for capability in sorted(found)]


def _works(nvcc: str) -> bool:
    """A wrapper script whose toolkit is gone is found on PATH as well: only running it tells."""
    try:
        result = subprocess.run([nvcc, "--version"], check=False, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    release = re.search(r"release (\d+)\.(\d+)", result.stdout)
    return result.returncode == 0 and release is not None and (int(release[1]), int(release[2])) >= _MIN_NVCC


def find_nvcc() -> str | None:
    """The first nvcc that runs, of: $CUDACXX, $CUDA_HOME, $CUDA_PATH, PATH, /usr/local/cuda, the compiler wheels."""
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    spec = importlib.util.find_spec("nvidia")
    wheel_folders = list(spec.submodule_search_locations or []) if spec else []
    candidates = [
        os.environ.get("CUDACXX"),
        *(os.path.join(root, "bin", "nvcc") for root in roots if root),
        shutil.which("nvcc"),
        "/usr/local/cuda/bin/nvcc",
        *(str(nvcc) for folder in wheel_folders for nvcc in pathlib.Path(folder).glob("cu1*/bin/nvcc")),
    ]
    return next((nvcc for nvcc in candidates if nvcc and os.path.isfile(nvcc) and _works(nvcc)), None)


def choose() -> Choice:
    """Reads TURBOATTN_CUDA (AUTO, ON or OFF) and TURBOATTN_CUDA_ARCHS (`80;90`, `all`)."""
    wanted = os.environ.get("TURBOATTN_CUDA", "AUTO").upper()
    if wanted not in ("AUTO", "ON", "OFF"):
        raise SystemExit(f"TURBOATTN_CUDA must be AUTO, ON or OFF, got {wanted!r}")
    if wanted == "OFF":
        return Choice(False, "CPU module alone: TURBOATTN_CUDA=OFF", [], None)
    gpus = visible_gpus()
    if wanted == "AUTO" and not gpus:
        return Choice(False, "CPU module alone: no GPU visible; TURBOATTN_CUDA=ON builds the CUDA module", [], None)
    archs = re.split(r"[;,\s]+", os.environ.get("TURBOATTN_CUDA_ARCHS", "").strip())
    if archs == [""]:
        archs = gpus or ["all"]
    for arch in archs:
        if arch != "all" and not re.fullmatch(r"[1-9]\d{1,2}", arch):
            raise SystemExit(f"TURBOATTN_CUDA_ARCHS must be compute capabilities like 80;90, or all, got {arch!r}")
    reason = "TURBOATTN_CUDA=ON" if wanted == "ON" else f"GPU visible (compute capability {', '.join(gpus)})"
    return Choice(True, f"CPU and CUDA modules: {reason}", archs, find_nvcc())


if __name__ == "__main__":
    choice = choose()
    if choice.cuda and choice.nvcc is None:
        sys.exit(
            f"{choice.why}, but no nvcc of {'.'.join(map(str, _MIN_NVCC))} or newer runs here: put one on PATH, "
            f"set CUDA_HOME, `pip install {' '.join(map(repr, COMPILER_WHEELS))}`, "
            "or set TURBOATTN_CUDA=OFF for the CPU module alone"
        )
    print(f"cuda={'ON' if choice.cuda else 'OFF'}", f"why={choice.why}", sep="\n")
    print(f"archs={';'.join(choice.archs)}", f"nvcc={choice.nvcc or ''}", sep="\n")

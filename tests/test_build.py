"""The kernel matrix and the CUDA choice, without compiling anything."""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
MATRIX = ROOT / "ffi" / "kernels" / "kernel_matrix.cmake"
# cmake of the test environment first: its scripts are not on PATH when pytest is called by its path.
CMAKE = shutil.which("cmake", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", "")]))
ROWS = re.findall(r'^\s*"([a-z0-9_]+(?:\|[a-z0-9]+){5})"$', MATRIX.read_text(), re.MULTILINE)


def list_kernels(*definitions: str, only: str = "", matrix: pathlib.Path | None = None):
    """(exit status, lines) of the configuration step that turns rows into kernels."""
    arguments = [f"-D{d}" for d in definitions] + ([f"-DMATRIX={matrix}"] if matrix else [])
    script = ROOT / "ffi" / "cmake" / "list_kernels.cmake"
    result = subprocess.run(
        [CMAKE, *arguments, "-P", str(script)],
        env=os.environ | {"TURBOATTN_ONLY": only},
        check=False,
        capture_output=True,
        text=True,
    )
    return result.returncode, result.stderr.splitlines()


def cuda_choice(**env: str):
    """(exit status, key=value dict, standard error) of the script that decides about the CUDA module."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("TURBOATTN", "CUDA"))}
    result = subprocess.run(
        [sys.executable, str(ROOT / "_build_backend" / "cuda_choice.py")],
        env=clean | env,
        check=False,
        capture_output=True,
        text=True,
    )
    return result.returncode, dict(line.split("=", 1) for line in result.stdout.splitlines()), result.stderr


def edited_matrix(tmp_path, old: str, new: str) -> pathlib.Path:
    matrix = tmp_path / "kernel_matrix.cmake"
    text = MATRIX.read_text()
    assert old in text
    matrix.write_text(text.replace(old, new, 1))
    return matrix


def test_every_row_is_a_kernel():
    status, lines = list_kernels()
    assert status == 0 and len(lines) == len(ROWS) > 0
    assert len(set(lines)) == len(lines)
    families = [row.split("|")[1] for row in ROWS]
    assert [line.split("|")[0] for line in lines] == families


@pytest.mark.parametrize(
    "row, complaint",
    [
        ("append|simt|any|any|bf16", "must have the 6 columns"),
        ("apend|simt|any|any|bf16|int8", "phase must be one of"),
        ("append|sm81|any|any|bf16|int8", "family must be one of"),
        ("append|simt|big|any|bf16|int8", "must be a positive number or `any`"),
        ("append|simt|any|any|fp64|int8", "q dtype must be one of"),
        ("append|simt|any|any|bf16|int7", "kv dtype must be one of"),
        ("append|simt|any|any|bf16|fp16", "an unquantised cache has the q dtype"),
        ("append|simt|any|any|bf16|any", "an unquantised cache has the q dtype"),
    ],
)
def test_malformed_row_stops_configuration(tmp_path, row, complaint):
    matrix = edited_matrix(tmp_path, "append|simt|any|any|bf16|int8", row)
    status, lines = list_kernels(matrix=matrix)
    text = " ".join(" ".join(lines).split())
    assert status != 0
    assert f"kernel row `{row}`" in text and complaint in text and str(matrix) in text


def test_malformed_row_is_found_although_only_leaves_it_out(tmp_path):
    matrix = edited_matrix(tmp_path, "append|simt|any|any|bf16|int8", "append|simt|any|any|bf16|int7")
    assert list_kernels(only="gather", matrix=matrix)[0] != 0


def test_only_prunes(tmp_path):
    status, lines = list_kernels(f"OUT={tmp_path}", only=r"append.*bf16\|int8")
    assert status == 0
    assert [line.split("|")[2] for line in lines] == ["append_simt_bfloat16_kvint8"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["append_simt_bfloat16_kvint8.cu", "registry_table.cc"]
    table = (tmp_path / "registry_table.cc").read_text()
    assert re.findall(r"Kernel_(\w+)\(\),", table) == ["append_simt_bfloat16_kvint8"]


def test_generated_source_names_its_row(tmp_path):
    list_kernels(f"OUT={tmp_path}", only=r"gather.*fp16\|int4")
    source = (tmp_path / "gather_simt_float16_kvint4.cu").read_text()
    assert "gather|simt|any|any|fp16|int4" in source
    assert 'KernelDesc{Phase::kGather, "simt", DType::kFloat16, DType::kInt4, 0, 0}' in source


@pytest.mark.parametrize(
    "gpus, family, targets",
    [
        ("all", "sm80", "80-real,90-real,80-virtual"),
        ("90", "sm80", "90-real"),
        ("90", "sm90", "90a-real"),
        ("90", "sm75", "75-virtual"),
        ("89", "sm80", "80-real"),
        ("89", "sm90", None),
        ("75", "sm80", None),
        ("75", "simt", "75-real"),
        ("120", "sm80", "80-virtual"),
        ("80;90", "sm80", "80-real,90-real"),
    ],
)
def test_targets_of_a_family(tmp_path, gpus, family, targets):
    matrix = edited_matrix(tmp_path, "append|simt|any|any|bf16|int8", f"append|{family}|any|any|bf16|int8")
    status, lines = list_kernels(f"ARCHS={gpus}", only=rf"append\|{family}\|any\|any\|bf16\|int8", matrix=matrix)
    assert status == 0
    assert [line.split("|")[1] for line in lines] == ([] if targets is None else [targets])


def test_better_families_come_first():
    """A handler takes the first kernel that suits a call, and the sm80 kernels suit all."""
    names = [line.split("|")[2] for line in list_kernels()[1]]
    better = [name for name in names if "_sm90_" in name and "_d192v128_" not in name]  # sm80 does not have these
    assert better
    for name in better:
        assert names.index(name) < names.index(name.replace("_sm90_", "_sm80_"))


@pytest.mark.parametrize("module", ["_cpu", "_cuda"])
def test_module_lists_its_kernels(module):
    extension = pytest.importorskip(f"jax_turboattn.{module}", reason=f"{module} was not built")
    kernels = extension.kernels()
    names = [kernel["name"] for kernel in kernels]
    assert names and len(set(names)) == len(names)
    if module == "_cuda":
        assert set(names) <= {line.split("|")[2] for line in list_kernels()[1]}


def test_choice_without_a_gpu_says_why():
    status, choice, _ = cuda_choice(TURBOATTN_CUDA="AUTO", CUDA_VISIBLE_DEVICES="")
    assert status == 0
    if choice["cuda"] == "OFF":
        assert choice["why"] == "CPU module alone: no GPU visible; TURBOATTN_CUDA=ON builds the CUDA module"


def test_choice_off():
    assert cuda_choice(TURBOATTN_CUDA="OFF")[1]["cuda"] == "OFF"


def fake_nvcc(folder: pathlib.Path, script: str) -> pathlib.Path:
    nvcc = folder / "nvcc"
    nvcc.write_text(f"#!/bin/sh\n{script}\n")
    nvcc.chmod(0o755)
    return nvcc


def test_choice_on_takes_the_named_nvcc_and_archs(tmp_path):
    nvcc = fake_nvcc(tmp_path, "echo 'Cuda compilation tools, release 13.0, V13.0.88'")
    _, choice, _ = cuda_choice(TURBOATTN_CUDA="ON", TURBOATTN_CUDA_ARCHS="80;90", CUDACXX=str(nvcc))
    assert choice["cuda"] == "ON" and choice["nvcc"] == str(nvcc) and choice["archs"] == "80;90"


@pytest.mark.parametrize("script", ["exit 127", "echo 'release 11.8, V11.8.89'"])
def test_choice_passes_over_an_nvcc_that_does_not_work(tmp_path, script):
    nvcc = fake_nvcc(tmp_path, script)
    status, choice, error = cuda_choice(TURBOATTN_CUDA="ON", CUDACXX=str(nvcc))
    assert choice.get("nvcc") != str(nvcc)
    assert status == 0 or "no nvcc of 12.0 or newer runs here" in error


@pytest.mark.parametrize("knob, value", [("TURBOATTN_CUDA", "YES"), ("TURBOATTN_CUDA_ARCHS", "sm_90")])
def test_choice_refuses_unknown_values(knob, value):
    status, _, error = cuda_choice(**{"TURBOATTN_CUDA": "ON", knob: value})
    assert status != 0 and knob in error and value in error

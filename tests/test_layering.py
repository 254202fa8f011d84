"""Who may import whom, checked on the sources: a table of rules for Python (by ast) and one for C++ (by #include)."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]

# Layers of the package, top to bottom: a module imports only from its own layer and from below. `testing` and __main__
# stand outside.
LAYERS = [
    ("nn", "models", "parallel", "commands"),
    ("api", "inspection"),
    ("primitives",),
    ("backends",),
    ("spec", "checks", "cache", "rope", "rotation", "quant"),
]
LEVEL = {name: level for level, names in enumerate(reversed(LAYERS)) for name in names}
EXTENSIONS = ("_cpu", "_cuda")

# C++: (files, includes that they must not have). Patterns match what stands between the quotes or brackets.
CPP_RULES = [
    (r"core/.*", r"kernels/|handlers/|xla/|nanobind/"),
    (r"kernels/.*", r"handlers/|xla/|nanobind/"),
    (r"handlers/.*", r"nanobind/|kernels/(?!cpu/|common/)"),
]
# Kernel folders share through common/ alone.
KERNEL_FOLDER = re.compile(r"kernels/(\w+)/")


def imported_modules(source: str, module: tuple[str, ...], is_package: bool):
    """Absolute dotted names that `source`, the text of module `module`, imports; inside functions too."""
    package = module if is_package else module[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield prefix
            yield from (f"{prefix}.{alias.name}" for alias in node.names)


def python_violations(root: pathlib.Path) -> list[str]:
    found = []
    for path in sorted((root / "jax_turboattn").rglob("*.py")):
        where = path.relative_to(root).with_suffix("")
        is_package = where.name == "__init__"
        module = where.parts[:-1] if is_package else where.parts
        part = module[1] if len(module) > 1 else ""
        for name in imported_modules(path.read_text(), module, is_package):
            target = name.split(".")
            if target[0] == "jax_turboattn":
                other = target[1] if len(target) > 1 else ""
                if other in EXTENSIONS and module != ("jax_turboattn", "backends", "ffi"):
                    found.append(f"{where}: only backends/ffi.py imports {name}")
                if part in LEVEL and other in LEVEL and LEVEL[other] > LEVEL[part]:
                    found.append(f"{where}: {part} imports {name}, a layer above")
                # The golden and the codecs are a second writing of the contract; cases may name static configurations.
                sealed = module[-1] in ("golden", "codecs") or LEVEL.get(other) != 0
                if part == "testing" and other not in ("testing", "") and sealed:
                    found.append(f"{where}: testing imports {name}")
            if part == "testing" and target[0] in ("jax", "jaxlib", "flax"):
                found.append(f"{where}: testing imports {name}")
            if target[0] == "flax" and part not in ("nn", "models"):
                found.append(f"{where}: flax outside nn and models")
    return found


def cpp_violations(root: pathlib.Path) -> list[str]:
    found = []
    ffi = root / "ffi"
    for path in sorted(ffi.rglob("*")):
        if path.suffix not in (".h", ".cc", ".cuh", ".cu", ".in"):
            continue
        where = path.relative_to(ffi).as_posix()
        own = KERNEL_FOLDER.match(where)
        for include in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', path.read_text(), re.MULTILINE):
            for files, forbidden in CPP_RULES:
                if re.fullmatch(files, where) and re.match(forbidden, include):
                    found.append(f"ffi/{where}: includes {include}")
            if include.startswith("nanobind/") and not where.startswith("module_"):
                found.append(f"ffi/{where}: nanobind outside the modules")
            if include.startswith("xla/") and not where.startswith(("module_", "handlers/")):
                found.append(f"ffi/{where}: xla outside handlers and modules")
            other = KERNEL_FOLDER.match(include)
            if own and other and other[1] not in (own[1], "common"):
                found.append(f"ffi/{where}: includes another kernel folder's {include}")
    return found


def test_python_layers():
    assert not python_violations(ROOT)


def test_cpp_layers():
    assert not cpp_violations(ROOT)


@pytest.mark.parametrize(
    "path, line, complaint",
    [
        ("backends/xla.py", "from ..primitives import attention", "a layer above"),
        ("spec.py", "from . import api", "a layer above"),
        ("primitives/paged.py", "def f():\n    from ..nn import attention", "a layer above"),
        ("api.py", "from . import _cpu", "only backends/ffi.py"),
        ("backends/xla.py", "import jax_turboattn._cuda", "only backends/ffi.py"),
        ("testing/golden.py", "import jax.numpy as jnp", "testing imports jax.numpy"),
        ("testing/golden.py", "from ..quant import encode", "testing imports jax_turboattn.quant"),
        ("testing/cases.py", "from .. import api", "testing imports jax_turboattn.api"),
        ("api.py", "import flax", "flax outside nn and models"),
    ],
)
def test_broken_python_is_found(tmp_path, path, line, complaint):
    file = tmp_path / "jax_turboattn" / path
    file.parent.mkdir(parents=True)
    file.write_text(line)
    assert any(complaint in violation for violation in python_violations(tmp_path))


@pytest.mark.parametrize(
    "path, include, complaint",
    [
        ("core/params.h", '"kernels/common/dtypes.h"', "includes kernels/common/dtypes.h"),
        ("core/status.h", '"xla/ffi/api/ffi.h"', "xla outside"),
        ("kernels/append/launch.cuh", '"handlers/operands.h"', "includes handlers/operands.h"),
        ("kernels/cpu/append.cc", "<xla/ffi/api/ffi.h>", "xla outside"),
        ("kernels/append/kernel.cuh", '"kernels/gather/traits.h"', "another kernel folder"),
        ("handlers/append_kv.cc", '"kernels/append/launch.cuh"', "includes kernels/append/launch.cuh"),
        ("handlers/append_kv.cc", '"nanobind/nanobind.h"', "nanobind outside"),
    ],
)
def test_broken_cpp_is_found(tmp_path, path, include, complaint):
    file = tmp_path / "ffi" / path
    file.parent.mkdir(parents=True)
    file.write_text(f"#include {include}\n")
    assert any(complaint in violation for violation in cpp_violations(tmp_path))


@pytest.mark.parametrize(
    "path, line",
    [
        ("backends/xla.py", "from ..spec import AttnSpec"),
        ("backends/xla.py", "import numpy"),
        ("backends/ffi.py", "from .. import _cpu, checks"),
        ("testing/cases.py", "from ..rope import RopeConfig"),
    ],
)
def test_sound_python_passes(tmp_path, path, line):
    file = tmp_path / "jax_turboattn" / path
    file.parent.mkdir(parents=True)
    file.write_text(line)
    assert not python_violations(tmp_path)

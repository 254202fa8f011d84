# make demo | test: own environment in $(VENV), built and installed from this tree (TURBOATTN_CUDA etc. are passed on to
# the build). make gpu: on a host with a GPU, nvcc and jax, without network: builds into build/gpu and checks that
# (tests/gpu/run.py says what, and what ONLY=, LIMIT= and PREBUILT= do).
PYTHON ?= python3
VENV ?= .venv
TESTS ?= tests
BIN := $(VENV)/bin
SOURCES := pyproject.toml CMakeLists.txt \
  $(shell find _build_backend ffi jax_turboattn -type f -not -name '*.so' -not -path '*/__pycache__/*')

.PHONY: demo test gpu clean

demo: $(VENV)/.installed
	$(BIN)/python -P -m jax_turboattn env
	$(BIN)/python -P -m jax_turboattn generate

test: $(VENV)/.installed
	$(BIN)/pytest -n 2 $(TESTS)

gpu:
	$(PYTHON) tests/gpu/run.py

clean:
	rm -rf build dist $(VENV)

$(VENV)/.installed: $(SOURCES)
	$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11) and 'needs Python 3.11 or newer: make PYTHON=...')"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check '.[test]'
	touch $@

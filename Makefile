# What a newcomer types: `make demo`, then `make test`. Everything happens in .venv; nothing else is installed.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
export PIP_DISABLE_PIP_VERSION_CHECK := 1

SOURCES := $(shell find csrc src metal -type f -not -name '*.so' -not -path '*/__pycache__/*' 2>/dev/null) \
           CMakeLists.txt pyproject.toml

.PHONY: help demo test test-fast test-oracles check format sanitize wheel wheel-macos metalsim clean

help:  ## show the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("lily needs Python 3.10 or newer") if sys.version_info < (3, 10) else None'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade pip

# The package, built and installed; again whenever a source changed.
$(VENV)/.installed: $(SOURCES) | $(BIN)/python
	$(PIP) install --quiet .
	@touch $@

# The same with what the tests need, once per version of pyproject.toml.
$(VENV)/.test-tools: pyproject.toml $(VENV)/.installed
	$(PIP) install --quiet '.[test,check]' cmake ninja 'nanobind==3.1.0' nanobind-backend
	@touch $@

# What runs Metal kernels in a simulator fetches a compiler from PyPI, and says so where it can't.
SIMULATED := tests/metalsim tests/metal
PORTABLE := $(addprefix --ignore=,$(SIMULATED))

demo: $(VENV)/.installed  ## build, install, and let the demo model answer
	cd / && $(CURDIR)/$(BIN)/lily generate demo "Who are you?"
	cd / && $(CURDIR)/$(BIN)/lily generate demo "What is 27 + 48?"

test: $(VENV)/.test-tools check metalsim  ## every test with light oracles (NumPy, mlx-lm)
	$(BIN)/python -m pytest -m "not oracle" $(PORTABLE)

test-fast: $(VENV)/.test-tools  ## what a developer runs between edits
	$(BIN)/python -m pytest -m "not oracle and not slow" $(PORTABLE) -x -q -n 2

test-oracles: $(VENV)/.test-tools  ## the tests that compare with transformers and PyTorch on the CPU
	$(PIP) install --quiet '.[oracles]'
	$(BIN)/python -m pytest -m oracle

metalsim: $(VENV)/.test-tools  ## the Metal backend, its kernels and the simulator that they run on
	$(BIN)/python -m pytest $(SIMULATED) -n 2

check: $(VENV)/.test-tools  ## formatting, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run --Werror $$(find csrc -name '*.h' -o -name '*.cpp')

format: $(VENV)/.test-tools  ## rewrite sources the way `check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/clang-format -i $$(find csrc -name '*.h' -o -name '*.cpp')

# What reads and writes raw memory; the tests that compare numbers at length run without sanitizers.
SANITIZED := tests/native/test_native_state.py tests/native/test_native_bad_input.py \
             tests/native/test_native_sampler.py tests/native/test_native_fuzz.py tests/native/test_native_products.py \
             tests/native/test_native_verification.py

sanitize: $(VENV)/.test-tools  ## native tests under AddressSanitizer and UndefinedBehaviorSanitizer
	$(BIN)/cmake -S . -B build/sanitize -G Ninja -DCMAKE_BUILD_TYPE=RelWithDebInfo -DLILY_SANITIZE=ON \
	  -DPython_EXECUTABLE=$(CURDIR)/$(BIN)/python -DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja
	$(BIN)/ninja -C build/sanitize
	rm -rf build/sanitize/package && mkdir -p build/sanitize/package
	cp -r src/lily_py src/lily build/sanitize/package/
	rm -f build/sanitize/package/lily_py/_core*.so
	cp build/sanitize/_core*.so build/sanitize/package/lily_py/
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libubsan.so) $$(g++ -print-file-name=libstdc++.so.6)" \
	  PYTHONPATH=build/sanitize/package $(BIN)/python -m pytest $(SANITIZED) -m "not slow" -q -p no:cacheprovider

wheel: $(BIN)/python  ## the wheel and the source distribution, into dist/
	$(PIP) install --quiet build
	$(BIN)/python -m build

wheel-macos: $(VENV)/.test-tools  ## the wheel for Apple Silicon, cross-built (fetches a compiler from PyPI), into dist/
	PYTHONPATH=tools $(BIN)/python -m metalsim wheel-macos

clean:  ## remove what was built
	rm -rf build dist $(VENV)

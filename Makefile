# Every target sets itself up in .venv, from nothing; what is already there is kept.
#
#   make demo     run the demonstration            make lint    check style and types
#   make test     run the tests (TESTS=..., PYTEST_ARGS=...)  make format  rewrite to the style
#   make zoo      the tests of whole models under torch.compile, which take six minutes by themselves
#   make build    compile and install for editing  make wheel   build dist/*.whl
#   make model    check the protocol with spin     make clean   remove what was built (distclean: .venv too)
#   make sanitize [SANITIZE_ARGS=...]   soak and tests with the extension compiled by sanitizers, ten minutes
#   make test-torch VERSION=2.14.1      run the tests that lean on torch's internals with another torch
#   make test-diffusers VERSION=0.38.0  run the tests of diffusers' models with another diffusers

# The torch that development and CI use, here and nowhere else; users may have any that pyproject.toml allows.
TORCH_VERSION := 2.13.0

PYTHON ?= python3
PYTEST_ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

CXX_SOURCES := $(wildcard csrc/*.cpp csrc/*.h)
ZOO := tests/test_zoo.py tests/test_diffusers_compiled.py
DIFFUSERS_TESTS := tests/test_diffusers.py tests/test_diffusers_compiled.py
CXX_TESTS := $(wildcard tests/core/*.cpp tests/core/*.h benchmarks/*.cpp)
COMPILE_TESTS := $(addprefix tests/test_,ops.py grouping.py grouping_graph.py projections.py lending.py \
    double_backward.py events.py compile_cache.py compile_lengths.py compositions.py zoo.py training.py examples_h3.py)

.PHONY: demo test zoo test-torch test-diffusers build lint format model sanitize wheel clean distclean

demo: build
	$(BIN)/python -m ulysses_op demo

test: TESTS ?= $(filter-out $(ZOO),$(wildcard tests/test_*.py))
test: build
	$(BIN)/python -m pytest -q $(PYTEST_ARGS) $(TESTS)

zoo: build
	$(BIN)/python -m pytest -q $(PYTEST_ARGS) $(ZOO)

# The extension includes no header of torch: the one that is built serves any torch of the same Python.
test-torch: TESTS ?= $(COMPILE_TESTS)
test-torch: build $(if $(VERSION),$(VENV)/torch-$(VERSION)/.stamp)
	$(if $(VERSION),,$(error VERSION=... says which torch))
	PYTHONPATH=$(CURDIR) $(VENV)/torch-$(VERSION)/bin/python -m pytest -q $(PYTEST_ARGS) $(TESTS)

# Beside the one that is installed, which it hides; what it depends on is there already.
test-diffusers: TESTS ?= $(DIFFUSERS_TESTS)
test-diffusers: build
	$(if $(VERSION),,$(error VERSION=... says which diffusers))
	$(PIP) install -q --no-deps --upgrade --target $(VENV)/diffusers-$(VERSION) diffusers==$(VERSION)
	PYTHONPATH=$(CURDIR)/$(VENV)/diffusers-$(VERSION) $(BIN)/python -m pytest -q $(PYTEST_ARGS) $(TESTS)

build: $(VENV)/.stamp-build

lint: $(VENV)/.stamp-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(CXX_SOURCES) $(CXX_TESTS)
	$(BIN)/mypy

format: $(VENV)/.stamp-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(CXX_SOURCES) $(CXX_TESTS)

model:
	bash tests/model/run.sh

sanitize: build
	$(BIN)/python tests/core/sanitize.py $(SANITIZE_ARGS)

# In build isolation, as a user's pip does it. A left-over build/ would put removed files into the wheel.
wheel: | $(BIN)/python
	rm -rf build/lib* build/bdist*
	$(PIP) wheel --no-deps --wheel-dir dist .

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis $(VENV)/.stamp-build $(VENV)/.stamp-lint
	rm -f ulysses_op/_C.*.so
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first, so that the extension's build finds ninja through it and pip has no version left to choose.
$(VENV)/.stamp-torch: Makefile | $(BIN)/python
	$(PIP) install -q --upgrade torch==$(TORCH_VERSION) setuptools pybind11 ninja
	touch $@

# Of the log, the line that says whether the CUDA half is compiled is shown, and warnings; all of it if the build fails.
$(VENV)/.stamp-build: $(VENV)/.stamp-torch pyproject.toml setup.py $(CXX_SOURCES)
	$(PIP) install -v --no-build-isolation -e '.[test,diffusers]' >$(VENV)/build.log 2>&1 || { cat $(VENV)/build.log; exit 1; }
	grep -E '^ *ulysses_op\._C: |: warning:' $(VENV)/build.log
	touch $@

# A torch with CUDA, 6 GB, where the index has no other. What the tests need is read from the package that is built.
$(VENV)/torch-%/.stamp: pyproject.toml | $(VENV)/.stamp-build
	$(BIN)/python -m venv $(@D)
	$(BIN)/python -c 'from importlib.metadata import requires as r; \
	    print(*(x.split(";")[0] for x in r("ulysses_op") if "\"test\"" in x), sep="\n")' >$(@D)/requirements.txt
	$(@D)/bin/python -m pip --disable-pip-version-check install -q torch==$* -r $(@D)/requirements.txt
	touch $@

$(VENV)/.stamp-lint: $(VENV)/.stamp-build
	$(PIP) install -q --no-build-isolation -e '.[test,diffusers,dev]'
	touch $@

# Three commands do everything. The machine needs Python (3.11 or later) and make.
#   make demo    set up, then answer prompts with the bundled model, with and without speculation
#   make test    set up, then run the linter, the type checker and the tests
#   make dist    a source distribution, and a wheel with the kernels of every instruction set, checked, in dist/
# Two more take longer:
#   make test-slow    the tests marked `slow`: fuzzing, real models, long loads
#   make test-share   a twelfth of these, another one at each commit, in at most 30 minutes
# And one makes a site of the documentation, with a reference from the docstrings:
#   make docs         into build/site

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow test-share docs lint dist clean

demo: $(VENV)/.installed
	$(BIN)/soothsay demo

# passive: waiting threads sleep. By default they spin, on cores that the other tests need.
test: lint
	OMP_WAIT_POLICY=passive $(BIN)/pytest -n 2 --dist worksteal

test-slow: $(VENV)/.installed-dev
	OMP_WAIT_POLICY=passive $(BIN)/pytest -m slow

test-share: $(VENV)/.installed-dev
	OMP_WAIT_POLICY=passive $(BIN)/pytest -m slow --share $$(git rev-list --count HEAD)/12 --minutes 30

docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

# the wheel is built from the source distribution
dist: $(VENV)/.installed-dev
	rm -rf dist
	SOOTHSAY_KERNELS=all $(BIN)/python -m build
	$(BIN)/twine check --strict dist/*

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

NATIVE := setup.py $(wildcard csrc/*)

$(VENV)/.installed: pyproject.toml $(NATIVE) | $(VENV)/bin/pip
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml $(NATIVE) | $(VENV)/bin/pip
	SOOTHSAY_KERNELS=all $(BIN)/pip install --quiet --editable ".[dev]"
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache

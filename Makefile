# Two commands do everything on a bare machine that has Python (3.11 or later) and make.
#   make demo    set up, then decode real prompts plainly and speculatively on the bundled model
#   make test    set up, then lint, types and tests

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint clean

demo: $(VENV)/.installed
	$(BIN)/soothsay demo

# Threads that wait sleep instead of spinning on cores that other tests need.
test: lint
	OMP_WAIT_POLICY=passive $(BIN)/pytest -n 2 --dist worksteal

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check src tests
	$(BIN)/ruff format --check src tests
	$(BIN)/mypy

$(VENV)/bin/pip:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip

NATIVE := setup.py $(wildcard csrc/*)

$(VENV)/.installed: pyproject.toml $(NATIVE) | $(VENV)/bin/pip
	$(BIN)/pip install --quiet --editable .
	touch $@

$(VENV)/.installed-dev: pyproject.toml $(NATIVE) | $(VENV)/bin/pip
	$(BIN)/pip install --quiet --editable ".[dev]"
	touch $@ $(VENV)/.installed

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache

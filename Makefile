# make setup | demo | test | lint | soak        VENV=folder puts the environment elsewhere, PYTHON=python3.12 picks an interpreter
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: setup demo test lint soak

setup: $(INSTALLED)

$(INSTALLED): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $(INSTALLED)

demo: setup
	$(BIN)/python -m evaluation demo --out build/demo

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test: lint
	$(BIN)/python -m pytest

soak: setup
	$(BIN)/python -m tests.soak --out build/soak

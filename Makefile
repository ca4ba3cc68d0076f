# The one door: `make help`. Everything runs from .venv, which `setup` makes once; a changed pyproject.toml makes it again.
PYTHON ?= python3
BIN := .venv/bin
RUN ?=
CONFIG ?= configs/tiny.yaml
SETS := $(foreach pair,$(SET),--set '$(pair)')

.PHONY: help setup demo test test-fast lint format submit status logs cancel bench

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/ready data/stdlib/tokenizer.json ## .venv with the package and its development needs; the demo's corpus

.venv/ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

data/stdlib/tokenizer.json: | .venv/ready
	$(BIN)/pithtrain build-stdlib --output data/stdlib

demo: setup ## tokenise, submit configs/tiny.yaml, wait, show the loss falling (a few minutes on two cores)
	$(BIN)/pithtrain demo

test: setup ## the whole CPU test suite
	$(BIN)/python -m pytest

test-fast: setup ## without the tests marked slow
	$(BIN)/python -m pytest -m 'not slow'

lint: setup ## ruff, ruff format, pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: setup ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

submit: setup ## CONFIG=configs/tiny.yaml [SET="a.b=1 c.d=2"] [NAME=n] [DRY=1]
	$(BIN)/pithtrain submit $(CONFIG) $(SETS) $(if $(NAME),--name $(NAME)) $(if $(DRY),--dry-run)

status: setup ## [RUN=name] one line a run
	$(BIN)/pithtrain status $(RUN)

logs: setup ## RUN=name [RANK=0] the log of a rank
	$(BIN)/pithtrain logs $(RUN) $(if $(RANK),--rank $(RANK))

cancel: setup ## RUN=name save at the next step, then stop
	$(BIN)/pithtrain cancel $(RUN)

bench: setup ## throughput on this machine
	$(BIN)/python benchmarks/throughput.py

# The one door: `make help`. Everything runs from .venv, which `setup` makes once; a changed pyproject.toml makes it again.
PYTHON ?= python3
BIN := .venv/bin
RUN ?=
CONFIG ?= configs/tiny.yaml
DEMO := data/stdlib/tokenizer.json data/stdlib/tokens/corpus.json data/stdlib/held-out/corpus.json
SETS := $(foreach pair,$(SET),--set '$(pair)')  # values without blanks; else call pithtrain itself
GRIDS := $(foreach axis,$(GRID),--grid '$(axis)')

.PHONY: help setup demo demo-slurm test test-fast lint format validate plan train submit sweep status logs save stacks \
	inspect cancel resume export-hf import-hf doctor cluster-up cluster-down cluster-status bench bench-kernels \
	bench-links bench-checkpoint

help: ## this list
	@awk -F ':.*## ' '/^[a-z -]+:.*## / {printf "  make %-24s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: .venv/ready $(DEMO) ## .venv with the package and its development needs; the demo's corpus

.venv/ready: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	touch $@

$(DEMO): | .venv/ready
	$(BIN)/python demo/stdlib.py data/stdlib

demo: setup ## tokenise, submit configs/tiny.yaml, wait, show the loss falling (a few minutes on two cores)
	set -e; n=1; while [ -e runs/demo-$$n ]; do n=$$((n + 1)); done; \
	$(BIN)/pithtrain submit configs/tiny.yaml --name demo-$$n --wait; \
	$(BIN)/python demo/summary.py runs/demo-$$n

test test-fast: export OMP_NUM_THREADS = 1  # ranks of one test share the cores; thread pools would fight for them

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

validate plan train: setup ## CONFIG=configs/tiny.yaml [SET="a.b=1 c.d=2"]
	$(BIN)/pithtrain $@ $(CONFIG) $(SETS)

submit: setup ## CONFIG=configs/tiny.yaml [SET="a.b=1 c.d=2"] [NAME=n] [DRY=1] [WAIT=1]
	$(BIN)/pithtrain submit $(CONFIG) $(SETS) $(if $(NAME),--name $(NAME)) $(if $(DRY),--dry-run) $(if $(WAIT),--wait)

sweep: setup ## CONFIG=... GRID="optimizer.lr=1e-3,2e-3 training.seed=1,2" [SET=...] [PARALLEL=n] [NAME=n] [DRY=1]
	$(BIN)/pithtrain sweep $(CONFIG) $(GRIDS) $(SETS) $(if $(PARALLEL),--max-parallel $(PARALLEL)) \
		$(if $(NAME),--name $(NAME)) $(if $(DRY),--dry-run)

status: setup ## [RUN=name] [WATCH=1] one line a run, or one run in detail
	$(BIN)/pithtrain status $(RUN) $(if $(WATCH),--watch)

logs: setup ## RUN=name [RANK=0] [ERR=1] [FOLLOW=1] the log of a rank, or the first error
	$(BIN)/pithtrain logs $(RUN) $(if $(RANK),--rank $(RANK)) $(if $(ERR),--err) $(if $(FOLLOW),-f)

save stacks: setup ## RUN=name a checkpoint now; the stacks of all ranks
	$(BIN)/pithtrain $@ $(RUN)

inspect: setup ## RUN=name [VERIFY=1] what its checkpoints hold; VERIFY reads every tensor
	$(BIN)/pithtrain inspect $(RUN) $(if $(VERIFY),--verify)

cancel: setup ## RUN=name [NOW=1] save at the next step, then stop
	$(BIN)/pithtrain cancel $(RUN) $(if $(NOW),--now)

resume: setup ## RUN=name [SET="a.b=1"] [EXCLUDE=nodes] go on from the newest checkpoint
	$(BIN)/pithtrain resume $(RUN) $(SETS) $(if $(EXCLUDE),--exclude $(EXCLUDE))

export-hf: setup ## RUN=name|checkpoint OUT=folder [DTYPE=float32] a Hugging Face folder of the newest checkpoint
	$(BIN)/pithtrain export-hf $(RUN) $(OUT) $(if $(DTYPE),--dtype $(DTYPE))

import-hf: setup ## HF=folder OUT=folder a checkpoint for init_from
	$(BIN)/pithtrain import-hf $(HF) $(OUT)

doctor: setup ## [NODES=n] what this machine, or the cluster's nodes, lack
	$(BIN)/pithtrain doctor $(if $(NODES),--nodes $(NODES))

cluster-up cluster-down cluster-status: setup ## a real Slurm on this machine, with fake GPUs
	$(BIN)/python slurm/cluster.py $(@:cluster-%=%)

demo-slurm: setup ## the local cluster: submit, preemption, requeue, resume, in three minutes
	PATH="$(CURDIR)/$(BIN):$$PATH" slurm/demo.sh

bench: setup ## CONFIG="a.yaml b.yaml" [SET=...] [STEPS=n] [PROFILE=1] [FORCED=1] [JSON=file] tokens/s, MFU, memory
	$(BIN)/python benchmarks/throughput.py $(CONFIG) $(SETS) $(if $(STEPS),--steps $(STEPS)) \
		$(if $(PROFILE),--profile) $(if $(FORCED),--force-load-balance) $(if $(JSON),--json $(JSON))

bench-kernels: setup ## [ONLY=text] [TUNE=1] [CHECK=1] [JSON=file] each kernel against its plain twin and its ceiling
	$(BIN)/python benchmarks/kernels.py $(if $(ONLY),--only $(ONLY)) $(if $(TUNE),--tune) $(if $(CHECK),--check) \
		$(if $(JSON),--json $(JSON))

bench-links: setup ## latency and bandwidth between this host's GPUs, as lines for slurm/NAME.yaml; `plan` reads them
	@$(BIN)/python benchmarks/links.py

bench-checkpoint: setup ## CONFIG=configs/tiny.yaml speed of saves and loads against the disk's own
	$(BIN)/python benchmarks/checkpoint.py --config $(CONFIG)

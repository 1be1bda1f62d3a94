# Every target works from a bare clone: the first one makes .venv. `make help` lists them.
SHELL := /bin/sh
MAKEFLAGS += --no-builtin-rules --no-print-directory
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: demo test test-latest check bench clean help

EXTRAS := hf,bench,dev
BIN    := .venv/bin
JOBS   ?= 2
ARGS   ?=
export PYTHON

demo: .venv/.made  ## serve real texts with a small Qwen3-Next, checked against Hugging Face (ARGS="--mtp-step 2")
	$(BIN)/gdn-jax demo $(ARGS)

test: .venv/.made  ## run the tests on the pinned versions (ARGS="-k conv", JOBS=2)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

test-latest: .venv-latest/.made  ## run the tests on the newest jax that pyproject.toml allows
	.venv-latest/bin/python -m pip install -qq --disable-pip-version-check --upgrade -c .venv-latest/constraints.txt jax jaxlib -e .
	@.venv-latest/bin/python -c 'import jax, jaxlib; print("jax", jax.__version__, "jaxlib", jaxlib.__version__)'
	.venv-latest/bin/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

check: .venv/.made  ## ruff, pyright, the import contracts
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/lint-imports

bench: .venv/.made  ## time the operators beside their peers (ARGS="--suite cpu")
	$(BIN)/python -m bench $(or $(ARGS),--suite cpu)

clean:  ## remove the virtual environments, builds and caches
	rm -rf .venv .venv-latest build dist .pytest_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

help:  ## this list
	@awk -F ':.*  ## ' '/^[a-z-]+:.*  ## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

.venv/.made: pyproject.toml constraints.txt
	@tools/make_venv.sh .venv $(EXTRAS)
	@touch $@

# Without the pins of jax, pip takes the newest of pyproject.toml's range.
.venv-latest/.made: pyproject.toml constraints.txt
	@tools/make_venv.sh .venv-latest $(EXTRAS) 'jax|jaxlib'
	@touch $@

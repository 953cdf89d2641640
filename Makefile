# Each verb sets up what it needs first: on a fresh machine, `make demo` or `make test` alone is enough.

PYTHON ?= python3
TRACE ?=
ARGS ?=
JOBS ?= 2

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
OUT := out

.DEFAULT_GOAL := help
.PHONY: help setup demo test soak check format bench reproduce lock clean

help:
	@echo "make setup            a working $(VENV) with everything in it"
	@echo "make demo             a real pool on this machine, merging and splitting under traffic"
	@echo "make demo TRACE=file  40 GPUs, simulated, under a trace of your own (or synth:conversation)"
	@echo "make test             the tests (make test ARGS='-k profile' for some of them)"
	@echo "make soak             a real pool under load for minutes: 100 switches, 4 x 30 kills"
	@echo "make check            format, lint, types and tests: what CI runs"
	@echo "make format           formats the code and mends what the linter can mend"
	@echo "make bench            the benchmarks, into benchmarks/results/ (JSON)"
	@echo "make reproduce        the paper's evaluation, simulated, into $(OUT)/reproduction/ (TRACE=file: the recorded trace)"
	@echo "make lock             pins the newest development packages (needs uv)"
	@echo "make clean            removes $(VENV), $(OUT)/ and caches"

setup: $(READY)

$(READY): pyproject.toml requirements-dev.lock requirements-torch.txt scripts/setup.sh
	@scripts/setup.sh "$(PYTHON)" "$(VENV)"
	@touch $@

demo: $(READY)
	@mkdir -p $(OUT)
ifeq ($(strip $(TRACE)),)
	$(BIN)/vertumnus live-demo --plot $(OUT)/demo.png --force
else
	$(BIN)/vertumnus demo "$(strip $(TRACE))" --plot $(OUT)/simulated.png --force
endif

test: $(READY)
	$(BIN)/pytest -n $(JOBS) $(ARGS)

soak: $(READY)
	timeout 600 $(BIN)/pytest -m slow tests/serve/real -rP $(ARGS)

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/pytest -n $(JOBS)

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .


reproduce: $(READY)
	$(BIN)/vertumnus reproduce -o $(OUT)/reproduction --jobs $(JOBS) $(if $(strip $(TRACE)),--trace "$(strip $(TRACE))") $(ARGS)

bench: $(READY)
	@mkdir -p benchmarks/results
	@for what in placement trie sim; do \
	    $(BIN)/vertumnus bench $$what --json > benchmarks/results/.$$what.json && \
	    mv benchmarks/results/.$$what.json benchmarks/results/bench-$$what.json || exit 1; \
	done

lock:
	uv pip compile --universal --python-version 3.10 --generate-hashes --no-emit-index-url --upgrade \
	    --custom-compile-command "make lock" --group dev pyproject.toml --output-file requirements-dev.lock

clean:
	rm -rf $(VENV) $(OUT) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# Needs Python 3.11+, Java 17+ and make; everything else goes into .venv and ~/.cache/anabranch.
BIN := .venv/bin
READY := .venv/anabranch.stamp
# Integration tests and the model: the longest files first, so that all processes end at about the same time.
LONG := $(addprefix tests/integration/test_,two_arms.py workers.py import_file_sink.py)
INTEGRATION := $(LONG) tests/model $(filter-out $(LONG),$(sort $(wildcard tests/integration/test_*.py)))
PYTEST = $(BIN)/python -m pytest -m 'not full' $(ARGS)
CODE := anabranch speed_layer batch_layer serving_layer dags tests benchmarks examples
WHAT ?= sinks
BENCHMARKS := sinks batch freshness many metadata sizing
SLOW_SUITES := $(addprefix tests/,containers deploy external failures page scale)

.PHONY: help setup demo demo-takeover test test-full lint types types-code types-tests format docs bench dist clean
.PHONY: unit model integration test-suite test-mutations soak
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*##[ ]' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(READY): uv.lock pyproject.toml conf/jvm/ivy.xml conf/jvm/jars.sha256 scripts/bootstrap
	@sh scripts/bootstrap

setup: $(READY) ## create the environment and resolve the jars

demo: $(READY) ## both layers through kills, to an exact end; VERBOSE=1; MASTER=spark://… CATALOG=postgresql+psycopg2://…
	@PYTHONPATH=examples $(BIN)/python -m demo $(if $(VERBOSE),--verbose) --master '$(MASTER)' --catalog '$(CATALOG)'

demo-takeover: $(READY) ## a file sink of Spark breaks, and its records and Kafka's become one table, each once
	@PYTHONPATH=$(CURDIR)/examples $(BIN)/python -m demo.takeover

test: $(READY) ## what CI runs: unit tests, the model, integration tests on real services; ARGS=--durations=20
	@$(BIN)/python -m compileall -q -j 0 anabranch speed_layer batch_layer serving_layer tests/support tests/unit
	@$(PYTEST) -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 $(INTEGRATION) tests/unit

test-full: $(READY) ## every test; SHARD=3/14: one of fourteen parts
	@$(BIN)/python tests/support/full_run.py $(if $(SHARD),--shard $(SHARD))

lint: $(READY) ## check format, lint, direction of imports, declared dependencies, words; changes nothing
	@$(BIN)/ruff format --check $(CODE)
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/lint-imports
	@$(BIN)/deptry --no-ansi .
	@$(BIN)/python scripts/check_words.py

types: types-code types-tests ## run mypy; -j2: on two cores

types-code: $(READY)
	@$(BIN)/mypy

types-tests: $(READY)
	@$(BIN)/mypy --config-file tests/mypy.ini tests/unit tests/integration benchmarks
	@$(BIN)/mypy --config-file tests/mypy.ini benchmarks $(SLOW_SUITES)

format: $(READY) ## format, and fix what lint can fix
	@$(BIN)/ruff format $(CODE)
	@$(BIN)/ruff check --fix $(CODE)

docs: $(READY) ## write the generated pages (commands, configuration), and build the site into site/
	@$(BIN)/python tests/support/reference_pages.py
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

bench: $(READY) ## run a benchmark: WHAT=sinks (default), batch, freshness, many, metadata or sizing; ARGS=--help
	@$(if $(filter $(WHAT),$(BENCHMARKS)),,$(error WHAT=$(WHAT): expected one of $(BENCHMARKS)))
	@PYTHONPATH=$(CURDIR)/tests/support:$(CURDIR)/tests/unit:$(CURDIR)/examples $(BIN)/python benchmarks/$(WHAT).py $(ARGS)

dist: $(READY) ## build wheel, source distribution, a zip for spark-submit --py-files, SBOM, list of licenses
	@rm -rf dist
	@$(BIN)/uv build --out-dir dist
	@for wheel in dist/*.whl; do cp "$$wheel" "$${wheel%-py3-none-any.whl}-py-files.zip"; done
	@$(BIN)/python scripts/sbom.py dist

clean: ## stop the services; remove the environment and all local data (the jars' cache stays)
	@if [ -x $(BIN)/anabranch ]; then $(BIN)/anabranch dev down --wipe || true; fi
	@rm -rf .venv .anabranch dist .pytest_cache .mypy_cache .ruff_cache .hypothesis spark-warehouse metastore_db derby.log
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Tests beside `make test`

unit: $(READY) ## unit tests alone: no JVM
	@$(BIN)/python -m pytest tests/unit

model: $(READY) ## explore the protocol's model; MODEL_WALKS=5000 MODEL_SEED=1 for more random walks
	@MODEL_WALKS=$(or $(MODEL_WALKS),400) MODEL_SEED=$(or $(MODEL_SEED),1) $(BIN)/python -m pytest tests/model

integration: $(READY) ## integration tests alone
	@$(BIN)/python -m pytest tests/integration

test-suite: $(READY) ## one of the other suites: WHAT=failures, deploy, scale, containers, page, dbt, engines, trino, …
	@$(BIN)/python tests/support/full_run.py $(or $(patsubst tests/%,%,$(wildcard tests/$(WHAT) tests/external/$(WHAT))),$(error WHAT=$(WHAT): expected a folder of tests or of tests/external))

test-mutations: $(READY) ## ten faults put into the product: make test catches each; ONLY=gate for some
	@$(BIN)/python tests/support/mutations.py $(if $(ONLY),--only '$(ONLY)')

soak: $(READY) ## everything together and faults at random: MINUTES=10 SEED=1; ONLY='backup topic' for some
	@PYTHONPATH=tests/support:examples $(BIN)/python -m soak --minutes $(or $(MINUTES),10) --seed $(or $(SEED),1) $(addprefix --only ,$(ONLY))

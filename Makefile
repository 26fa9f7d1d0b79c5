# Needs Python 3.11 or newer with python3-venv, and make. Each task makes its own virtual environment once, below .venv/.
PYTHON ?= python3
VENV := .venv

# a clean build each time: a page of a removed module would be an error
SPHINX = rm -rf docs/reference/api/generated && $(VENV)/check/bin/sphinx-build -W --keep-going -E -b html docs docs/_build/html

# set in many containers: without cached bytecode every worker and every program of a test compiles all sources again
unexport PYTHONDONTWRITEBYTECODE

# whole files per worker, sorted by name: tests of a file share a cluster; a test that hangs is run again by another worker
PARALLEL = -n auto --dist loadfile --no-loadscope-reorder --max-worker-restart 2

.DEFAULT_GOAL := help
.PHONY: help demo pipeline test chaos hostile simulate mutate soak soak-tasks soak-bank soak-service fuzz spark-cluster spark-long check coverage docs docs-layout docs-search release-check bare bench bench-check scale clean

help:
	@echo "make demo        publish and consume a real day of flights on a three-node cluster"
	@echo "make pipeline    a year of flights through Spark: topic, stream, delays, picture (needs Java 17)"
	@echo "make test        run the test suite"
	@echo "make chaos       run 200 schedules of faults and print a table of the results"
	@echo "make hostile     run hostile servers and clients and print their costs"
	@echo "make simulate    run SEEDS=500 simulated schedules of faults on all cores"
	@echo "make mutate      insert bugs into client and broker, and count the seeds and the MUTANTS=60 that tests find"
	@echo "make soak        run real processes under kill -9, SIGSTOP and cut connections for MINUTES=20"
	@echo "make soak-tasks  10,000 tasks of Celery and Taskiq while workers, nsqd and lookup are killed"
	@echo "make soak-bank   a bank of two databases while workers, relays, leaders and connections are killed, for MINUTES"
	@echo "make soak-service  outbox, delays, keys over tags, Celery and a mirror together on each cluster, for MINUTES"
	@echo "make fuzz        fuzz every parser of untrusted bytes, each for SECONDS=60"
	@echo "make spark-long  kill a streaming query ten times and check its output (needs Java 17)"
	@echo "make spark-cluster  read, write and stream on a Spark cluster while its processes are killed (needs Java 17)"
	@echo "make check       lint, types, layering, documentation"
	@echo "make coverage    run the test suite and print uncovered lines and branches"
	@echo "make docs        build the documentation into docs/_build/html"
	@echo "make docs-layout open every page in Chromium at the widths of a phone and a laptop"
	@echo "make docs-search test the search of the documentation with typical questions"
	@echo "make release-check  build, check, and test the wheel on every installed Python"
	@echo "make bare        run make demo and make test in a new minimal Debian (as root; SUITE names its suite)"
	@echo "make bench       run all benchmarks and write their page (an hour; BENCH=--help lists servers, peers and time)"
	@echo "make bench-check compare the client's CPU per message with the committed baseline (a few minutes)"
	@echo "make scale       simulate clients of 10,000 partitions on 200 nodes"
	@echo "make clean       remove the virtual environments and all build results"

demo: $(VENV)/demo/.ready
	$(VENV)/demo/bin/python -m nsqext demo

pipeline: $(VENV)/pipeline/.ready
	$(VENV)/pipeline/bin/python -m examples.flights_pipeline

test: $(VENV)/test/.ready
	$(VENV)/test/bin/python -m pytest $(PARALLEL)

chaos: $(VENV)/test/.ready
	$(VENV)/test/bin/python -m tests.campaigns.chaos --schedules 200

hostile: $(VENV)/test/.ready
	$(VENV)/test/bin/python -m tests.campaigns.hostile

SEEDS ?= 500
simulate: $(VENV)/test/.ready
	$(VENV)/test/bin/python -m tests.campaigns.simulation --seeds $(SEEDS) $(SIMULATE)

MUTANTS ?= 60
mutate: $(VENV)/test/.ready
	$(VENV)/test/bin/python -m tests.campaigns.simulation.mutate
	$(VENV)/test/bin/python -m tests.campaigns.mutation --count $(MUTANTS)
	$(VENV)/test/bin/python -m tests.campaigns.mutation --mistakes

MINUTES ?= 20
soak: $(VENV)/test/.ready
	$(VENV)/test/bin/python -m tests.campaigns.soak --minutes $(MINUTES)

soak-tasks: $(VENV)/test/.ready
	set -e; for framework in celery taskiq; do for target in embedded broker original; do \
		$(VENV)/test/bin/python -m tests.campaigns.soak.tasks --framework $$framework --target $$target; done; done

soak-bank: $(VENV)/test/.ready
	$(VENV)/test/bin/python -m tests.campaigns.soak.bank --minutes $(MINUTES)

soak-service: $(VENV)/test/.ready
	$(VENV)/test/bin/python -m tests.campaigns.soak.service --minutes $(MINUTES)

SECONDS ?= 60
fuzz: $(VENV)/fuzz/.ready
	$(VENV)/fuzz/bin/python -m tests.campaigns.fuzz --seconds $(SECONDS)

spark-long: $(VENV)/test/.ready
	$(VENV)/test/bin/python -m tests.spark.exactly_once --kills 10

spark-cluster: $(VENV)/test/.ready
	$(VENV)/test/bin/python -m tests.spark.cluster_run

check: $(VENV)/check/.ready
	$(VENV)/check/bin/ruff check .
	$(VENV)/check/bin/ruff format --check .
	$(VENV)/check/bin/codespell
	$(VENV)/check/bin/mypy
	PATH="$(CURDIR)/$(VENV)/check/bin:$$PATH" pyright --verifytypes nsqext --ignoreexternal
	PATH="$(CURDIR)/$(VENV)/check/bin:$$PATH" $(VENV)/check/bin/python -m pytest tests/test_layering.py tests/typing
	$(SPHINX) -q

coverage: $(VENV)/test/.ready
	$(VENV)/test/bin/python -m pytest $(PARALLEL) --cov --cov-report=term-missing:skip-covered

docs: $(VENV)/check/.ready
	@echo "== building the pages (minutes)"
	$(SPHINX)
	@echo "open docs/_build/html/index.html"

docs-layout: docs
	$(VENV)/check/bin/python -m tests.docs_layout docs/_build/html

docs-search: docs
	$(VENV)/check/bin/python -m tests.docs_search docs/_build/html

release-check: $(VENV)/release/.ready
	$(VENV)/release/bin/python -m tests.release_check

bare:
	.ci/bare

bench: $(VENV)/bench/.ready
	$(VENV)/bench/bin/python -m benchmarks.run $(BENCH)

bench-check: $(VENV)/bench/.ready
	$(VENV)/bench/bin/python -m benchmarks.bench_check

scale: $(VENV)/bench/.ready
	$(VENV)/bench/bin/python -m benchmarks.scale

clean:
	rm -rf $(VENV) docs/_build docs/reference/api/generated build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/demo/.ready: INSTALL = ".[broker,cli]"
$(VENV)/pipeline/.ready: INSTALL = ".[broker,cli,spark]" --group pipeline
$(VENV)/test/.ready: INSTALL = ".[all]" --group test --group coverage
$(VENV)/check/.ready: INSTALL = ".[all]" --group test --group lint --group type --group docs --group layout --group release
$(VENV)/fuzz/.ready: INSTALL = ".[broker,cli,snappy,speed]" --group fuzz
$(VENV)/release/.ready: INSTALL = "." --group release
$(VENV)/bench/.ready: INSTALL = ".[broker,celery,cli,otel,prometheus,spark,speed,transactions]" --group bench

$(VENV)/%/.ready: pyproject.toml
	@.ci/environment $(PYTHON) $(VENV)/$* $(INSTALL)
	@touch $@

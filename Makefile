# make quickstart | slurm-demo | test | test-changed | test-all | test-engine | test-launcher | test-stages | test-gpu | test-pythons | lint | format | docs | reference | bench | dist | clean
# Each target sets up what it needs in $(VENV), with uv where it is installed and pip otherwise.
VENV ?= .venv
# The newest Python on PATH or of pyenv. Its shims are left out: they also exist for Pythons that are not active.
find-python = $(firstword $(wildcard $(addsuffix /python$(1),$(filter-out %/shims,$(subst :, ,$(PATH)))) \
	$(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/$(1).*/bin/python$(1)))
PYTHON ?= $(firstword $(foreach version,3.13 3.12 3.11,$(call find-python,$(version))) python3)
CONSTRAINTS ?= constraints.txt
PYTEST_ARGS ?=
BIN := $(VENV)/bin
# Those that need nothing more. `kept_files` gives the figures in the heads of three modules of models/; `gpu` needs one.
BENCHMARKS := cli tracking launch collectives gradient_reductions train_step checkpoint preprocess context \
	residuals
SOURCES := redco_flow flows examples tests benchmarks docs

UV := $(shell command -v uv 2>/dev/null)
ifdef UV
MAKE_VENV = uv venv --quiet --seed --allow-existing --python $(PYTHON) $(VENV)
INSTALL = uv pip install --quiet --python $(BIN)/python --constraint $(CONSTRAINTS)
else
MAKE_VENV = $(PYTHON) -m venv $(VENV)
INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS)
endif

.PHONY: quickstart slurm-demo test test-changed test-all test-engine test-launcher test-stages test-gpu test-quick test-pythons lint format docs reference bench dist clean constraints plotly

quickstart: $(VENV)/.installed
	$(BIN)/redco-flow run pipelines/quickstart.yaml

# A Slurm of four nodes on this machine (apt-get install slurm-wlm munge), then the same without it.
slurm-demo: $(VENV)/.installed
	$(BIN)/python tests/cluster/profile_demo.py slurm

PYTEST = $(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)
# Three processes on two cores: many of these tests wait for a cluster, a server or a browser.
PYTEST_ALL = $(PYTEST) -n 3 -m "not gpu"

# What every machine can run, in minutes.
test: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow and not cluster and not gpu"

# The slow tests too, in one call: each worker of pytest imports and collects everything for itself.
# They need Slurm, sshd, Chromium and torch; tests of programs that are missing are skipped.
test-all: $(VENV)/.installed-dev
	$(PYTEST_ALL)

# The test files whose import closure has a file that differs from where the branch left main.
BASE ?=
test-changed: $(VENV)/.installed-dev
	files=$$($(BIN)/python .ci/changed_tests.py $(BASE)) && if [ -n "$$files" ]; then $(PYTEST_ALL) $$files; fi

# The tests of one layer, light and slow: what a change within it needs.
ENGINE_TESTS := tests/engine tests/models
LAUNCHER_TESTS := $(patsubst %,tests/%,spec tracking runtime launch orchestrate report cli cluster hosts xmanager \
	test_bounded.py test_terminal_text.py test_worker.py)
STAGES_TESTS := $(patsubst %,tests/%,stages recipes text metrics corpora hub)
test-engine test-launcher test-stages: $(VENV)/.installed-dev
test-engine:
	$(PYTEST) -m "not gpu" $(ENGINE_TESTS)
test-launcher:
	$(PYTEST) -m "not gpu" $(LAUNCHER_TESTS)
test-stages:
	$(PYTEST) -m "not gpu" $(STAGES_TESTS)

# On the first NVIDIA GPU that JAX finds (pip install 'jax[cuda13]'), beside the processor it is compared with.
test-gpu: $(VENV)/.installed-dev
	REDCO_FLOW_TEST_PLATFORMS=cuda,cpu $(PYTEST) -m gpu tests/gpu

# What most depends on the versions of JAX and Python: traced sharding rules and their collectives, train step,
# checkpoints; strict YAML; a whole run of the package as installed. About a minute of CPU time.
QUICK_TESTS := tests/spec/test_load.py tests/engine/dataflow \
	$(patsubst %,tests/engine/test_%.py,sharding two_rules rules_end traffic trainer checkpoint compiler_options model_flops)
test-quick: $(VENV)/.installed-dev
	$(PYTEST) -n 0 -m "not slow" $(QUICK_TESTS)
	$(PYTEST) -n 0 tests/test_installed.py

# The same on each of these Pythons that is found, with the newest JAX.
test-pythons: test-python-3.12 test-python-3.13
test-python-%:
	$(if $(call find-python,$*),$(MAKE) --no-print-directory test-quick PYTHON=$(call find-python,$*) \
	    VENV=build/python$*,@echo "-- Python $*: not found: skipped")

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.installed-dev
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/ruff check --fix $(SOURCES)

# The documentation as a site, build/site/index.html, which nothing from elsewhere is loaded into.
docs: $(VENV)/.installed-dev
	$(INSTALL) --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

# The generated pages of docs/reference and the files quoted in pages: committed, compared by tests/test_reference.py.
reference: $(VENV)/.installed-dev
	$(BIN)/python docs/build_reference.py

bench: $(VENV)/.installed-dev
	for name in $(BENCHMARKS); do $(BIN)/python benchmarks/$$name.py || exit 1; done

# What is released: sdist and wheel, whose README the index can show and which work where they are installed.
dist: $(VENV)/.installed-dev
	$(INSTALL) --editable '.[release]'
	rm -rf dist
	$(BIN)/python -m build --outdir dist
	$(BIN)/twine check --strict dist/*
	.ci/test_wheel dist/*.whl

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit("redco-flow needs Python 3.11 or newer" if sys.version_info < (3, 11) else 0)'
	$(MAKE_VENV)

$(VENV)/.installed: $(BIN)/python pyproject.toml $(CONSTRAINTS)
	$(INSTALL) --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) dist build *.egg-info .mypy_cache .ruff_cache .pytest_cache

# Choose the newest versions that the bounds allow; a change to commit and test on its own.
constraints:
	uv pip compile pyproject.toml $(foreach extra,dev docs release reference wandb harness optuna plan-gpu plan-tpu,--extra $(extra)) \
	    --universal --python-version 3.11 --no-header --no-annotate --no-emit-index-url --quiet --upgrade \
	    --output-file constraints.txt
	grep -v '^protobuf==' constraints.txt > .constraints-without-protobuf.txt
	uv pip compile pyproject.toml --extra dev --extra xmanager --python-version 3.11 --no-header \
	    --no-annotate --no-emit-index-url --quiet --constraint .constraints-without-protobuf.txt \
	    --output-file constraints-xmanager.txt
	rm .constraints-without-protobuf.txt

# The library that draws the charts of pages, out of its npm package.
PLOTLY ?= 4.1.1
plotly:
	mkdir -p build
	cd build && npm pack --silent plotly.js-basic-dist-min@$(PLOTLY)
	tar -xzf build/plotly.js-basic-dist-min-$(PLOTLY).tgz -C build
	cp build/package/plotly-basic.min.js redco_flow/report/assets/
	cp build/package/LICENSE redco_flow/report/assets/plotly.LICENSE

# make help   says what there is. Every target first makes .venv with what it needs, once.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO ?= demo-dir

.PHONY: help demo test lint test-all test-browser test-gpu faults fuzz data quality picture bench docs clean
.DELETE_ON_ERROR:

help:
	@echo "make demo        run the main job on an example"
	@echo "make lint        ruff, then mypy on sewa_cli"
	@echo "make test        lint, then one fast test of each promise: before each commit"
	@echo "make test-all    lint, then all tests, part by part; a part that passed is not run again"
	@echo "                 until a file changes. PART=solvers runs that part alone, of:"
	@echo "                 $(PARTS)" | fold -s -w 80 | sed '2,$$s/^/                 /'
	@echo "make test-gpu    tests that need a CUDA device"
	@echo "make docs        build the documentation as a site in docs-site/"
	@echo "make clean       remove .venv and all caches"
	@echo "One folder, quickly: $(BIN)/python -m pytest tests/solvers (--breadth: with all that test-all has)"

# with the extras that are asked for, each in its pinned version
define install
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[$(1)]"
endef
comma := ,

$(VENV)/.demo: pyproject.toml constraints.txt
	$(call install,demo)
	touch $@

$(VENV)/.tests: pyproject.toml constraints.txt
	$(call install,demo$(comma)dev)
	touch $(VENV)/.demo $@

demo: $(VENV)/.demo
	$(BIN)/sewa demo $(DEMO) --force

# tests and benchmarks are not type-checked: they are run
lint: $(VENV)/.tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# one thread each: two under contention are slower. Compiled test modules are kept for the next run
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
WORKERS := --numprocesses auto --maxprocesses 4 --dist loadfile

# compiled once, not by each process that tests start
test: lint
	$(BIN)/python -m compileall -q sewa_cli
	$(PYTEST) $(WORKERS)

# A part is a folder of tests/, or one of: `rules` the modules next to the folders, `browser` the
# page in Chromium, `sweeps` kills and failing calls at every point where files change, `fuzz`
# damaged files. The file .parts/NAME says that it passed.
FOLDERS := $(filter-out __pycache__ helpers,$(notdir $(patsubst %/,%,$(wildcard tests/*/))))
PARTS := rules $(FOLDERS) browser sweeps fuzz
PART ?= $(PARTS)
SOURCES := $(shell find sewa_cli tests benchmarks sample_configs docs README.md pyproject.toml \
	-name __pycache__ -prune -o -type f ! -path 'sample_configs/data/*' -print)

test-all: lint
	$(MAKE) --no-print-directory --keep-going $(PART:%=.parts/%)

run_rules = $(PYTEST) --breadth tests/test_*.py
run_browser = $(MAKE) --no-print-directory test-browser
run_sweeps = $(MAKE) --no-print-directory faults
run_fuzz = $(MAKE) --no-print-directory fuzz N=10000

.parts/%: $(VENV)/.tests $(SOURCES)
	$(or $(run_$*),$(PYTEST) $(WORKERS) --breadth -m "not browser and not gpu" tests/$*)
	@mkdir -p .parts && touch $@

# what needs a CUDA device, on a machine that has one; docs/how-to/scale.md says what to expect
test-gpu: $(VENV)/.tests
	$(PYTEST) --breadth -m gpu -n0

# kills, interrupts and failing calls at every point where files change, and 200 pairs of runs at
# once: the tables of docs/development/reliability.md; some half an hour
faults: $(VENV)/.tests
	PYTHONPATH=tests $(BIN)/python -m faults.run

# the page in a real browser: Debian's Chromium, and axe-core for contrast
test-browser: $(VENV)/.tests
	command -v chromium || apt-get install --yes chromium || sudo apt-get install --yes chromium
	npm install --silent --prefix $(VENV)/browser axe-core@4
	$(PYTEST) --breadth -m browser tests/present

# N damaged and forged files, each to the command that reads it; failures are kept
N ?= 100000
fuzz: $(VENV)/.tests
	$(BIN)/python tests/faults/fuzz.py --n $(N) --into fuzz-failures

# real data for the paper's three settings, into sample_configs/data/: fetched with checksums, and
# for cloning recorded from experts that are trained here (some ten minutes)
data: $(VENV)/.tests
	$(BIN)/python sample_configs/fetch.py
	$(BIN)/python sample_configs/behavior_cloning/experts.py

# the tables of docs/explanation/results.md and benchmarks/quality/results; hours, but what is done is not done again
quality: data
	$(BIN)/python benchmarks/quality --jobs 2 --into docs/explanation/results.md \
		benchmarks/quality/results/methods.md benchmarks/quality/results/regret.md
	cp quality-dir/quality.png docs/images/quality.png

# the site in docs-site/
docs: $(VENV)/.tests
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# the pictures in the README and the example of a page, from a fresh demo
picture: $(VENV)/.tests
	$(BIN)/python benchmarks/picture.py docs/images

# every table of docs/development/performance.md, docs/how-to/averaging.md, docs/how-to/saving.md, benchmarks/quality/results/solvers.md
# and docs/how-to/scale.md
bench: $(VENV)/.tests
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/average.py
	$(BIN)/python benchmarks/products.py
	$(BIN)/python benchmarks/passes.py
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/small.py
	$(BIN)/python benchmarks/saving.py
	$(BIN)/python benchmarks/ranks.py
	$(BIN)/python benchmarks/remote.py

clean:
	rm -rf $(VENV) $(DEMO) .mypy_cache .pytest_cache .ruff_cache .hypothesis .parts *.egg-info

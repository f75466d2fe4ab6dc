# make demo   set up and run the main job on an embedded default
# make test   set up and pass linters, types and tests
# Both make .venv themselves, with what they need; a second run only checks that it is there.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO ?= demo-dir

.PHONY: demo test test-browser test-gpu faults fuzz ruff types tests lint data quality picture bench clean

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

# types are checked beside the tests; what fails first does not keep the other from its end
test: ruff
	$(MAKE) --no-print-directory --jobs=2 types tests

# what needs a CUDA device, on a machine that has one; docs/gpu.md says what to expect
test-gpu: $(VENV)/.tests
	$(BIN)/python -m pytest -m gpu -n0

# kills, interrupts and failing calls at every point where files change, and 200 pairs of runs at
# once: the tables of docs/reliability.md; some half an hour
faults: $(VENV)/.tests
	PYTHONPATH=tests $(BIN)/python -m faults.run

# the page in a real browser: Debian's Chromium, and axe-core for contrast
test-browser: $(VENV)/.tests
	command -v chromium || apt-get install --yes chromium || sudo apt-get install --yes chromium
	npm install --silent --prefix $(VENV)/browser axe-core@4
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m browser

ruff: $(VENV)/.tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.tests
	$(BIN)/mypy

# one thread each: two under contention are slower. Compiled once, not by each command that tests start
tests: $(VENV)/.tests
	$(BIN)/python -m compileall -q sewa_cli
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist worksteal

lint: ruff types

# so many damaged and forged files, each to the command that reads it; failures are kept
N ?= 100000
fuzz: $(VENV)/.tests
	$(BIN)/python tests/faults/fuzz.py --n $(N) --jobs 2 --into fuzz-failures

# real data for the paper's three settings, into sample_configs/data/: fetched with checksums, and
# for cloning recorded from experts that are trained here (some ten minutes)
data: $(VENV)/.tests
	$(BIN)/python sample_configs/fetch.py
	$(BIN)/python sample_configs/behavior_cloning/experts.py

# every table of docs/results.md; hours, but what is done is not done again
quality: data
	$(BIN)/python benchmarks/quality --jobs 2 --into docs/results.md
	cp quality-dir/quality.png docs/quality.png
	cp quality-dir/windows.png docs/quality-windows.png

# the pictures in the README and the example of a page, from a fresh demo
picture: $(VENV)/.tests
	$(BIN)/python benchmarks/picture.py docs

# every table of docs/performance.md, docs/averaging.md, docs/saving.md, docs/solvers.md
# and docs/scale.md
bench: $(VENV)/.tests
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/average.py
	$(BIN)/python benchmarks/products.py
	$(BIN)/python benchmarks/passes.py
	$(BIN)/python benchmarks/growth.py
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/solver_speed.py
	$(BIN)/python benchmarks/solvers.py
	$(BIN)/python benchmarks/saving.py
	$(BIN)/python benchmarks/ranks.py

clean:
	rm -rf $(VENV) $(DEMO) .mypy_cache .pytest_cache .ruff_cache .hypothesis *.egg-info

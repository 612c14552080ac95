# Two commands do everything on a fresh machine with Python >= 3.11: `make serve` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: install serve test lint types unit clean
.DELETE_ON_ERROR:

# Images for containers like to set this. Without bytecode each process compiles all that it imports: torch takes more
# than twice as long, and the tests start hundreds of processes.
unexport PYTHONDONTWRITEBYTECODE

# The embedded model is looked for every time: the user's cache may have been emptied.
install: $(STAMP)
	@$(BIN)/python -m server.embedded

# The virtual environment and the pinned dependencies. Made again when a pin changes. Python compiles what is imported;
# of 18,000 files most never are.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "firstlight needs Python >= 3.11; run make with PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet --no-compile -c constraints.txt -e '.[gguf,dev]'
	@touch $@

serve: install
	$(BIN)/firstlight serve

test: lint types unit

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

# On two cores a third worker computes while the tests of another wait: for a server that starts, or in the soak for
# more than a minute. Files go in the order of their names, so that the soak is not the last. Then, with nothing beside
# them, the tests that measure times.
unit: install
	$(BIN)/pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder --ignore tests/end_to_end/alone
	$(BIN)/pytest tests/end_to_end/alone

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache

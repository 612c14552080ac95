# Two commands do everything on a fresh machine with Python >= 3.11: `make serve` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: install serve test lint types unit clean
.DELETE_ON_ERROR:

# The embedded model is looked for every time: the user's cache may have been emptied.
install: $(STAMP)
	@$(BIN)/python -m server.embedded

# The virtual environment and the pinned dependencies. Made again when a pin changes.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "firstlight needs Python >= 3.11; run make with PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check --quiet -c constraints.txt -e '.[gguf,dev]'
	@touch $@

serve: install
	$(BIN)/firstlight serve

test: lint types unit

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

# On both cores, and then, with nothing beside them, the tests of servers whose times are measured or whose
# processes are killed.
unit: install
	$(BIN)/pytest --numprocesses 2 --dist loadfile --ignore tests/end_to_end/alone --ignore tests/chaos
	$(BIN)/pytest tests/end_to_end/alone tests/chaos

clean:
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache

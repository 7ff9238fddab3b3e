.DEFAULT_GOAL := help
.PHONY: help demo test setup clean
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

help:
	@echo "make demo   learn a generation order on a small puzzle and compare it (a minute or two on a laptop)"
	@echo "make test   lint, types and the whole test suite"

# The virtual environment with every dependency pinned; made once, remade only when the pins or the package change.
setup: $(READY)
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check -e ".[dev]"
	touch $@

demo: $(READY)
	$(BIN)/unmask demo --force

test: $(READY)
	$(BIN)/ruff check src tests benchmarks
	$(BIN)/ruff format --check src tests benchmarks
	$(BIN)/mypy
	$(BIN)/pytest

clean:
	rm -rf .venv build dist src/*.egg-info

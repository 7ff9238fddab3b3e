.DEFAULT_GOAL := help
.PHONY: help demo test docs mutants release setup clean
PYTHON ?= python3
BIN := .venv/bin
INSTALL := PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check
READY := .venv/.ready
READY_DEV := .venv/.ready-dev

help:
	@echo "make demo      learn a generation order on a small puzzle and compare it (a minute or two on a laptop)"
	@echo "make test      lint, types and the whole test suite"
	@echo "make docs      the documentation as a site, in build/site; it needs no network to read"
	@echo "make mutants   plant mistakes and see whether the suite notices (half an hour)"
	@echo "make release   build the sdist and the wheel in dist/ and check them; nothing is uploaded"

# The virtual environment, its dependencies pinned; remade only when the pins or the package change.
setup: $(READY_DEV)
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) -e .
	touch $@
$(READY_DEV): $(READY)
	$(INSTALL) -e ".[dev]"
	touch $@

demo: $(READY)
	$(BIN)/unmask demo --force

test: $(READY_DEV)
	$(BIN)/ruff check src tests benchmarks docs
	$(BIN)/ruff format --check src tests benchmarks docs
	$(BIN)/mypy
	$(BIN)/pytest

docs: $(READY_DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site: build/site/index.html"

mutants: $(READY_DEV)
	$(BIN)/python tests/mutants.py

release: $(READY_DEV)
	rm -rf build dist
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/pytest tests/test_wheel.py -n 0

clean:
	rm -rf .venv build dist src/*.egg-info

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
INSTALLED_DEV := .venv/.installed-dev
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: test lint demo clean fresh

test: lint
	$(BIN)/pytest --numprocesses auto --dist worksteal

lint: $(INSTALLED_DEV)
	$(BIN)/ruff check .
	$(BIN)/mypy

demo: $(INSTALLED)
	$(BIN)/nextscale compare

# the wheel in fresh environments, with each extra alone: minutes, and a package index
fresh:
	$(PYTHON) -m tests.fresh_environments

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis
	find nextscale tests -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone, so that no later resolution replaces the pinned build.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt '$(TORCH)'
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(INSTALLED_DEV): $(INSTALLED) research/pyproject.toml
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]' --editable ./research
	touch $@

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
INSTALLED_DEV := .venv/.installed-dev
TORCH := $(shell grep '^torch==' constraints.txt)
# Tests start many interpreters, and pytest rewrites assertions. With cached bytecode a worker starts in 6 s of CPU time, otherwise in 15 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: test test-fast lint docs house demo clean fresh

# one worker more than cores: tests of Ray, servers and browsers wait most of their time
test: lint
	$(BIN)/pytest --numprocesses $$(($$($(BIN)/python -c 'import os; print(os.cpu_count())') + 1)) --dist worksteal

# skips slow tests (listed in tests/slow.txt by `make test PYTEST_ADDOPTS=--write-slow=110`) and tests that need a GPU, a browser or Ray
test-fast: $(INSTALLED_DEV)
	$(BIN)/pytest --numprocesses auto --dist worksteal -m "not slow and not gpu and not browser and not ray"

# prints lines, tokens, packages, hooks, commands and options with their caps
house: $(INSTALLED_DEV)
	$(BIN)/python -m tests.house

lint: $(INSTALLED_DEV)
	$(BIN)/ruff check .
	$(BIN)/mypy

# the documentation in build/site; index.html there opens without a server
docs: $(INSTALLED_DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

demo: $(INSTALLED)
	$(BIN)/nextscale compare

# tests the wheel with each extra in fresh environments; takes minutes and needs a package index
fresh:
	$(PYTHON) -m tests.fresh_environments

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis
	find nextscale tests -name __pycache__ -type d -prune -exec rm -rf {} +

# torch is installed first, so that later steps do not replace the pinned build.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt '$(TORCH)'
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(INSTALLED_DEV): $(INSTALLED) research/pyproject.toml
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]' --editable ./research
	touch $@

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
TORCH := $(shell grep '^torch==' constraints.txt)

.PHONY: test lint demo clean

test: lint
	$(BIN)/pytest --numprocesses auto

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/mypy

demo: $(INSTALLED)
	@echo 'There is no demo to run: the embedded model is not part of this version.' >&2
	@echo 'What can be done now:' >&2
	@echo '  $(BIN)/nextscale models    lists the supported models and where their authors publish the weights' >&2
	@echo '  nextscale.load(...)        in Python, loads official weights that you have fetched' >&2
	@exit 1

clean:
	rm -rf .venv build dist .pytest_cache .ruff_cache .hypothesis
	find nextscale tests -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone, so that no later resolution replaces the pinned build.
$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt '$(TORCH)'
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

# Everything a newcomer types. `make demo` and `make test` set up .venv by themselves.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PLUGINS := $(wildcard plugins/*)
PROJECTS := pyproject.toml $(addsuffix /pyproject.toml,$(PLUGINS))
STAMP := $(VENV)/.installed
# Processes that share out the test files; each takes up to 2 GB.
TEST_PROCESSES ?= 2

.PHONY: help setup demo test test-slow test-page check format clean

help:
	@echo "make demo        install into $(VENV) and answer a question with a small model"
	@echo "make test        install into $(VENV) and run the whole CPU test suite"
	@echo "make test-slow   the tests that take longer: ranks that fail in every phase, many starts"
	@echo "make test-page   the server's chat page in Chromium, which must be installed"
	@echo "make check       the quick gate: ruff, import contracts, types; prints lines of code"
	@echo "make setup       install only"
	@echo "make format      let ruff format and fix"
	@echo "make clean       remove $(VENV) and caches"

setup: $(STAMP)

$(STAMP): $(PROJECTS) constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "error: Python 3.11 or newer is needed, $(PYTHON) is %d.%d; run make with PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt pip setuptools wheel
	$(BIN)/python -m pip install --quiet --no-build-isolation -c constraints.txt -e ".[dev]" $(addprefix -e ,$(PLUGINS))
	@touch $@

demo: $(STAMP)
	$(BIN)/rapid-infer generate demo --chat --greedy -p "What is the capital of Japan?"

test: $(STAMP)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadfile -m "not slow and not browser"

test-slow: $(STAMP)
	$(BIN)/python -m pytest -m slow

test-page: $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt playwright
	$(BIN)/python -m pytest -m browser tests/server/test_page.py

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/mypy
	$(BIN)/python scripts/count_lines.py

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache .import_linter_cache

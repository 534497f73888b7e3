# Two commands do everything on a fresh machine with Python 3.11: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test docs clean

demo: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/vmoer demo --out out/demo

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q

# the site, into site/: strict, so that a broken link or a page without a module stops it; no network
docs: $(STAMP)
	$(BIN)/python docs/pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# torch first and pinned: the registry's default build would bring several gigabytes of CUDA packages
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 10 "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 10 -c constraints.txt -e ".[test]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) out site

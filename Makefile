# make demo   install into .venv and train the digits recipe on this machine
# make test   install into .venv and run the tests (under 10 minutes on 2 cores)
# make test-slow, make lint, make types, make unit, make conformance: see CONTRIBUTING.md

PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python

.PHONY: demo test test-slow unit conformance lint types clean

# The stamp is newer than what decides the installation, so nothing is installed twice.
$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "shardkit: installing into $(VENV) the versions of constraints.txt (once; a few minutes)"
	@test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	@$(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(VENV)/.installed
	@echo "shardkit: training recipes/digits-resnet.yaml (some seconds on 2 CPU cores)"
	$(RUN) -m shardkit.launch recipes/digits-resnet.yaml

test: $(VENV)/.installed
	@echo "shardkit: running the tests that are not marked slow (under 10 minutes on 2 cores)"
	$(RUN) -m pytest -q -m "not slow"

test-slow: $(VENV)/.installed
	@echo "shardkit: running the tests marked slow (under 45 minutes on 2 cores)"
	$(RUN) -m pytest -q -m slow

unit: $(VENV)/.installed
	$(RUN) -m pytest -q tests/unit

conformance: $(VENV)/.installed
	$(RUN) -m pytest -q -m "not slow" tests/conformance

lint: $(VENV)/.installed
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(VENV)/.installed
	$(RUN) -m pyright --pythonpath $(RUN)

clean:
	rm -rf $(VENV) runs dist build

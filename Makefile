# Everything starts from Python >= 3.11, pip and make. `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
PIP_ARGS ?=
ARGS ?=

VENV_PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help demo space test lint types clean

help:
	@echo "make demo    run the live demo (ARGS='--prompt ... --temperature 0.7' are passed on)"
	@echo "make space   serve the web page with the live view; prints its URL (ARGS='--port 7861' are passed on)"
	@echo "make test    lint, types and tests (ARGS='tests/test_cli.py -k ...' are passed to pytest)"
	@echo "make lint    ruff: check and format"
	@echo "make types   mypy"
	@echo "make clean   remove $(VENV) and what the tools left behind"
	@echo "Variables: PYTHON=$(PYTHON) (makes the environment), VENV=$(VENV), PIP_ARGS (for pip install), ARGS"

demo: $(INSTALLED)
	@$(VENV_PYTHON) -m hf_dspark demo $(ARGS)

space: $(INSTALLED)
	@$(VENV_PYTHON) space/app.py $(ARGS)

test: lint types
	$(VENV_PYTHON) -m pytest $(ARGS)

lint: $(INSTALLED)
	$(VENV_PYTHON) -m ruff check .
	$(VENV_PYTHON) -m ruff format --check .

types: $(INSTALLED)
	$(VENV_PYTHON) -m mypy

# The stamp is written only when everything is installed, so an interrupted set-up is simply taken up again.
$(INSTALLED): pyproject.toml constraints.txt
	@test -x $(VENV_PYTHON) || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), once; this takes a few minutes ..."
	@$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -c constraints.txt -e '.[browser,demo,dev,plot,quant,serve,space,train]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis .coverage build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

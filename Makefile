# make run · make test · make lab · make report SCALE=laptop · make torture · make test-browser

SCALE  ?= quick
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
READY  := $(VENV)/.ready

.PHONY: run test test-browser lab report torture lock

run: SCALE := quick
run: report

report: $(READY)
	$(VENV)/bin/python -m lib.execute $(SCALE)

test: $(READY)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/pytest -n 2 --dist loadgroup

# Kills thirty runs anywhere and continues them; `tests/torture.py KILLS SEED` for others.
torture: $(READY)
	$(VENV)/bin/python tests/torture.py

# The explorer in JupyterLab, with the system's Chromium; skipped where there is none.
test-browser: $(READY)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[browser]"
	$(VENV)/bin/pytest tests/test_browser.py

lab: $(READY)
	$(VENV)/bin/jupyter lab notebooks

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; name one with: make PYTHON=/path/to/python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	@touch $@

# After a change of pyproject.toml: writes what was resolved, so that the next install is the same.
lock: $(READY)
	$(VENV)/bin/pip freeze --exclude-editable | grep -v '^pip==' | sed 's/+cpu//' > constraints.txt

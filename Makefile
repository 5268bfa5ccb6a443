# `make book` builds the book, `make test` tests everything; each sets up .venv first if it is absent or out of date.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: book test zoo
.DELETE_ON_ERROR:

book: $(INSTALLED)
	$(BIN)/python book/build.py

# One thread to each of nbdev_test's workers.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/nbdev_test
	$(BIN)/python -m pytest

# Train the networks that ship with the package.
zoo: $(INSTALLED)
	$(BIN)/python -m howvits.zoo

$(INSTALLED): constraints.txt settings.ini setup.py pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { echo "The book needs Python 3.11 or later; name one: make PYTHON=python3.11"; exit 1; }
	@$(BIN)/python -c "" 2>/dev/null || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]" -c constraints.txt
	@touch $@

# `make book` builds the book, `make test` tests everything; each sets up .venv first if it is absent or out of date.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed

.PHONY: book test zoo runs measures
.DELETE_ON_ERROR:

book: $(INSTALLED)
	$(BIN)/python book/build.py

# One thread to each of nbdev_test's workers.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/nbdev_test
	$(BIN)/python -m pytest

# Train what the claims need and the record lacks: make runs CLAIM="I3 I4" PRESET=small DRY=1 JOBS=2
runs: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m howvits.sweep $(if $(CLAIM),--claim $(CLAIM)) $(if $(PRESET),--preset $(PRESET)) $(if $(JOBS),--jobs $(JOBS)) $(if $(filter-out 0,$(DRY)),--dry-run)

# Measure the recorded runs for a chapter: make measures CHAPTER=05_fourier
measures: $(INSTALLED)
	@$(if $(CHAPTER),,echo "Name the chapter: make measures CHAPTER=05_fourier"; exit 1)
	$(BIN)/python -m howvits.sweep --measure $(CHAPTER)

# Train the networks that ship with the package.
zoo: $(INSTALLED)
	$(BIN)/python -m howvits.zoo

$(INSTALLED): constraints.txt settings.ini setup.py pyproject.toml
	@$(PYTHON) -c "import sys; sys.exit(sys.version_info < (3, 11))" || { echo "The book needs Python 3.11 or later; name one: make PYTHON=python3.11"; exit 1; }
	@$(BIN)/python -c "" 2>/dev/null || $(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,sweep]" --config-settings editable_mode=compat -c constraints.txt
	@touch $@

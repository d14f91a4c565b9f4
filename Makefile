# make demo      train one model on 2 gloo ranks and on one, and compare the two
# make test      all tests but the slow ones
# make test-slow the slow ones
# make lint      ruff and pyright
# make coverage  docs/coverage.md: every architecture at every degree, compared with one device
#
# Each makes .venv on first use; it needs Python 3.11 or later and a package registry.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
BIN := .venv/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Ranks share the cores: one thread each.
export OMP_NUM_THREADS := 1

.PHONY: demo test test-slow lint coverage clean
.NOTPARALLEL:

demo: .venv/hf.stamp
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 2 examples/01_quickstart.py

test: .venv/test.stamp
	$(BIN)/python -m pytest -m "not slow" -n 2 --dist loadfile $(ARGS)

test-slow: .venv/test.stamp
	$(BIN)/python -m pytest -m slow $(ARGS)

coverage: .venv/test.stamp
	$(BIN)/python tests/coverage_page.py

# Pyright cannot follow an editable install with mapped folders, so it reads what a user installs.
lint: .venv/hf.stamp .venv/lint.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	rm -rf build
	$(INSTALL) --no-deps --target build/tree .
	$(BIN)/pyright

# Torch alone and pinned: a local CPU build of that version is preferred to the registry's.
.venv/torch.stamp: constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) $$(grep '^torch==' constraints.txt)
	touch $@

.venv/%.stamp: .venv/torch.stamp pyproject.toml
	$(INSTALL) -e ".[$*]"
	touch $@

clean:
	rm -rf .venv build *.egg-info

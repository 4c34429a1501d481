# make demo   install, then make a coding Q3_K_S of the embedded demo model
# make test   everything that CI runs
# make slow   the tests that need minutes or a real model
# make lock   write constraints.txt anew from this environment

PYTHON ?= python3
BIN    := .venv/bin
WHEELS := .venv/wheels
# Extra build options for llama.cpp, e.g. make CMAKE_ARGS="-DGGML_CUDA=on" install
CMAKE_ARGS ?= -DLLAVA_BUILD=OFF
export CMAKE_ARGS
export OMP_WAIT_POLICY := passive

.PHONY: help install dev demo test slow lint wheel lock clean
.DEFAULT_GOAL := help

help:
	@sed -n '1,4p' Makefile | sed 's/^# //'

install: .venv/installed
dev: .venv/dev-installed

.venv/installed: pyproject.toml constraints.txt tools/check_machine.sh
	@PYTHON="$(PYTHON)" sh tools/check_machine.sh
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq --upgrade -c constraints.txt pip
	@echo "building llama.cpp (once; about 4 minutes on 2 cores) ..."
	$(BIN)/pip wheel -qq --no-deps --find-links $(WHEELS) -w $(WHEELS) -c constraints.txt llama-cpp-python
	@echo "installing the other dependencies (1 to 2 minutes) ..."
	$(BIN)/pip install -qq --find-links $(WHEELS) -c constraints.txt -e '.[eval]'
	cp bitwright/eval/bitwright_lm_eval.pth "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')"
	@touch $@

.venv/dev-installed: .venv/installed
	$(BIN)/pip install -qq --find-links $(WHEELS) -c constraints.txt -e '.[dev,eval]'
	@touch $@

demo: install
	$(BIN)/bitwright run coding-q3_k_s --model demo --out runs/demo

lint: dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The wheel must work where nothing but itself and its dependencies is.
wheel: dev
	rm -rf dist build/empty
	$(BIN)/python -m build --quiet --wheel --outdir dist
	$(PYTHON) -m venv build/empty
	build/empty/bin/pip install -qq --find-links $(WHEELS) -c constraints.txt dist/*.whl
	cd build/empty && bin/bitwright workflow ls && bin/bitwright inspect demo

test: lint
	$(BIN)/pytest
	$(MAKE) wheel

slow: dev
	$(BIN)/pytest -m slow

lock: dev
	$(BIN)/pip freeze --exclude-editable | grep -v '^bitwright' > constraints.txt

clean:
	rm -rf .venv dist build runs

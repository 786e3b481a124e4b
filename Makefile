# Two commands set everything up from a fresh clone: `make demo` and `make test`. `make test-all` runs the rest, too.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
WORKERS ?= 2
BUDGET_S := 300
BUDGET_REST_S := 900
READY := $(VENV)/.ready

# bytecode of tests is kept, also where an environment says otherwise: each worker would rewrite their assertions each time
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-torch package gpu-wheels proof check bench docs engines frameworks clean

demo: $(READY)
	$(BIN)/braid demo

# compiled first: two workers would compile braid at the same time; the checks run beside the tests, which wait now and then
test: $(READY)
	@began=$$(date +%s); $(BIN)/python -m compileall -q -j 0 src benchmarks tests/support; \
	$(MAKE) check > $(VENV)/check.log 2>&1 & check=$$!; \
	$(BIN)/python -m pytest -n $(WORKERS) -m "not proof and not all"; code=$$?; \
	if wait $$check; then echo "make check passed"; else cat $(VENV)/check.log; code=1; fi; \
	echo "make test took $$(($$(date +%s) - began)) s of $(BUDGET_S) s"; exit $$code

# `make test`, then the rest of the tests: tests/tiers.py has the tiers
test-all: test
	@began=$$(date +%s); $(BIN)/python -m pytest -n $(WORKERS) -m "not proof and all"; code=$$?; \
	echo "make test-all took $$(($$(date +%s) - began)) s of $(BUDGET_REST_S) s after make test"; exit $$code

# the tests with another torch, in an environment beside: make test-torch TORCH=2.14.1
# (another Python: make test PYTHON=python3.12 VENV=.venv-3.12)
test-torch: $(VENV)-torch-$(TORCH)/.ready
	$(VENV)-torch-$(TORCH)/bin/python -m compileall -q src tests
	$(VENV)-torch-$(TORCH)/bin/python -m pytest -n $(WORKERS) -m "not proof"

$(VENV)-torch-%/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	sed '/^torch==/d; /^torchvision==/d' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --disable-pip-version-check -c $(@D)/constraints.txt 'torch==$*' -e '.[dev]'
	touch $@

proof: $(READY) engines check
	$(BIN)/python -m pytest -n $(WORKERS) -m "not frameworks" --hypothesis-profile=proof
	PYTHONPATH=.:tests $(BIN)/python tests/proof.py
	$(MAKE) frameworks

# the engines of clusters, as far as they can be installed here; tests of those that cannot are skipped with the reason
engines: $(READY)
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[ray,k8s]'
	-if [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
		apt-get update -qq; DEBIAN_FRONTEND=noninteractive \
		apt-get install -qq -y --no-install-recommends slurm-wlm munge openmpi-bin > /dev/null; fi

# other people's libraries, in an environment of their own: they bring plugins for pytest
frameworks: $(VENV)-frameworks/.ready
	$(VENV)-frameworks/bin/python -m pytest tests/frameworks
	PYTHONPATH=. $(VENV)-frameworks/bin/python tests/proof.py tp

$(VENV)-frameworks/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)-frameworks
	$(VENV)-frameworks/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,frameworks]'
	touch $@

# a wheel and an sdist in dist/, checked, and installed into an environment of their own
package: $(READY)
	rm -rf dist $(VENV)-package
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt build twine
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	$(PYTHON) -m venv $(VENV)-package
	$(VENV)-package/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt dist/*.whl
	cd dist && ../$(VENV)-package/bin/braid doctor && ../$(VENV)-package/bin/braid demo --log-dir demo

# what tests/gpu/kit.sh needs on a machine that has torch and Python 3.12, but no registry
gpu-wheels: $(READY)
	rm -rf gpu-wheels
	$(BIN)/python -m pip download --quiet --disable-pip-version-check -c constraints.txt --dest gpu-wheels \
		--only-binary :all: --python-version 3.12 --platform manylinux2014_x86_64 --platform manylinux_2_28_x86_64 \
		rich tyro msgspec psutil safetensors hypothesis pytest pytest-xdist

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

docs: $(READY)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[docs]'
	$(BIN)/python tests/pages.py
	$(BIN)/python tests/handbook_pictures.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "open site/index.html"

bench: $(READY)
	$(BIN)/braid bench comm

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $(READY)

clean:
	rm -rf $(VENV) $(VENV)-frameworks $(VENV)-torch-* runs dist build site

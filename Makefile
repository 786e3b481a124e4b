# Two commands set everything up from a fresh clone: `make demo` and `make test`.
VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
WORKERS ?= 2
BUDGET_S := 300
READY := $(VENV)/.ready

.PHONY: demo test proof check bench docs clean

demo: $(READY)
	$(BIN)/braid demo

test: $(READY)
	@began=$$(date +%s); $(MAKE) check \
	&& $(BIN)/python -m pytest -n $(WORKERS) -m "not proof"; code=$$?; \
	echo "make test took $$(($$(date +%s) - began)) s of $(BUDGET_S) s"; exit $$code

proof: $(READY) check
	$(BIN)/python -m pytest -n $(WORKERS) --hypothesis-profile=proof
	$(BIN)/python tests/proof.py

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
	rm -rf $(VENV) runs dist build site

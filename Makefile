# Two commands: `make quickstart` and `make test`. Both make the environment in .venv if it is missing.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: quickstart test check docs install lock system-packages

quickstart: install
	mkdir -p quickstart
	cd quickstart && PATH="$(abspath $(BIN)):$$PATH" archsearch run ../studies/quickstart.yaml
	cd quickstart && PATH="$(abspath $(BIN)):$$PATH" archsearch front quickstart --plot front.png
	@echo
	@echo "The picture of the front is quickstart/front.png."
	@echo "Browse it: cd quickstart && ../$(BIN)/archsearch ui"

test: install system-packages check
	$(BIN)/pytest -m "not gpu"

check: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Rewrites docs/mixers.md and its figures from the mixers.
docs: install
	$(BIN)/python docs/mixers_page.py

install: $(INSTALLED)

$(INSTALLED): pyproject.toml requirements.lock install.sh
	PYTHON="$(PYTHON)" ./install.sh "$(VENV)" dev,postgres
	touch $@

# Rewrites requirements.lock with the versions that a fresh environment resolves to.
lock:
	rm -rf .lock-venv
	PYTHON="$(PYTHON)" UNLOCKED=1 ./install.sh .lock-venv dev,postgres
	.lock-venv/bin/pip freeze --exclude-editable | sed 's/+cpu$$//' | sort -f > requirements.lock
	rm -rf .lock-venv

# The browser test drives Debian's Chromium and the storage tests start Debian's PostgreSQL.
system-packages:
	@missing=""; \
	test -x /usr/bin/chromium || missing="$$missing chromium"; \
	ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || missing="$$missing postgresql"; \
	test -z "$$missing" && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y $$missing; \
	else \
	  echo "The tests need:$$missing. Install with: sudo apt-get install$$missing" >&2; exit 1; \
	fi

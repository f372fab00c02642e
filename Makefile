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
	$(BIN)/pytest -m "not gpu" -n logical --dist loadscope

check: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

# Rewrites docs/mixers.md and its figures from the mixers.
docs: install
	$(BIN)/python docs/mixers_page.py

install: $(INSTALLED)

$(INSTALLED): pyproject.toml requirements.lock install.sh
	PYTHON="$(PYTHON)" ./install.sh "$(VENV)" dev,postgres,server
	touch $@

# Rewrites requirements.lock with the versions that a fresh environment resolves to.
lock:
	rm -rf .lock-venv
	PYTHON="$(PYTHON)" UNLOCKED=1 ./install.sh .lock-venv dev,postgres,server
	.lock-venv/bin/pip freeze --exclude-editable | sed 's/+cpu$$//' | sort -f > requirements.lock
	rm -rf .lock-venv

# Secrets of docker-compose.yml, made once.
.env: .env.example
	@test ! -e $@ || { echo ".env is older than .env.example; add what is new by hand" >&2; exit 1; }
	@umask 077; $(PYTHON) -c 'import re, secrets, sys; \
	print(re.sub("=$$", lambda _: "=" + secrets.token_hex(32), sys.stdin.read(), flags=re.M), end="")' \
	< $< > $@

# The browser tests drive Debian's Chromium, the storage tests start Debian's PostgreSQL, and the test of
# docker-compose.yml its nginx.
system-packages:
	@missing=""; \
	test -x /usr/bin/chromium || missing="$$missing chromium"; \
	test -x /usr/sbin/nginx || missing="$$missing nginx-light"; \
	ls /usr/lib/postgresql/*/bin/initdb >/dev/null 2>&1 || missing="$$missing postgresql"; \
	test -z "$$missing" && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y $$missing; \
	else \
	  echo "The tests need:$$missing. Install with: sudo apt-get install$$missing" >&2; exit 1; \
	fi

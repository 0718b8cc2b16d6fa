# Every target that needs the environment builds it first; `make setup` does nothing when it is fresh.
SHELL := /bin/bash
.DEFAULT_GOAL := help
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.stamp
MOONCAKE_VENV := .venv-mooncake
MOONCAKE_BIN := $(MOONCAKE_VENV)/bin
MOONCAKE_STAMP := $(MOONCAKE_VENV)/.stamp
ENGINES := vllm sglang
ARGS ?=
comma := ,

# The first Python that is new enough and can build a virtual environment. Override: make setup PYTHON=/path/to/python
PYTHON ?= $(shell for python in python3.11 python3; do \
	$$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$python && break; done)

.PHONY: help setup run test bench check mooncake mooncake-setup engines engines-setup install-systemd uninstall-systemd stubs format clean \
	$(ENGINES:%=engines-%) $(ENGINES:%=engines-setup-%)

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-17s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

# $(call make_venv,FOLDER): an empty environment.
define make_venv
@if [ -z "$(PYTHON)" ]; then \
	echo "hicache needs Python 3.11 or newer with its venv module: none found as python3.11 or python3." >&2; \
	echo "Install one (Debian: apt-get install python3 python3-venv) or name it: make setup PYTHON=/path/to/python3.11" >&2; \
	exit 1; fi
@echo "setting up $(1) with $(PYTHON) (a minute or two the first time)"
@[ -x $(1)/bin/python ] || $(PYTHON) -m venv $(1)
endef

# $(call build_venv,FOLDER,EXTRAS): hicache from this checkout, its extras, and the pinned versions of everything.
define build_venv
$(call make_venv,$(1))
@$(1)/bin/python -m pip install -qq --constraint constraints.txt --upgrade pip setuptools wheel
@$(1)/bin/python -m pip install -qq --constraint constraints.txt --no-build-isolation --editable '.[$(2)]'
endef

setup: $(STAMP) ## Build .venv from the pinned versions in constraints.txt
	@:

$(STAMP): pyproject.toml constraints.txt
	$(call build_venv,$(VENV),engine$(comma)bench$(comma)dev)
	@touch $@

run: setup ## Run the demo on embedded defaults; ARGS="--json -" for more
	@$(BIN)/hicache demo $(ARGS)

test: setup ## Run the tests, on all cores; ARGS="-n 0 -k keys", ARGS=--cov for coverage
	@$(BIN)/python -m pytest -q -n auto --dist worksteal $(ARGS)

bench: setup ## Run the measurements that say how fast it is, each beside its physical limit; ARGS=--quick
	@for name in store transfer lookup admission hybrid; do \
		echo "== python -m bench.$$name $(ARGS)"; $(BIN)/python -m bench.$$name $(ARGS) || exit 1; done

check: setup ## Format, lint, types, layering, generated stubs fresh
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo
	@$(BIN)/python tools/stubs.py --check

mooncake: mooncake-setup ## Run the tests against a real Mooncake store, in an environment of their own
	@HICACHE_REQUIRE_MOONCAKE=1 $(MOONCAKE_BIN)/python -m pytest -q -n 4 --dist worksteal tests/backends/test_mooncake_*.py $(ARGS)

# Fails, and says what to install, where the wheel or a library of the system that it needs cannot be had.
mooncake-setup: $(MOONCAKE_STAMP)
	@$(MOONCAKE_BIN)/python -m tools.mooncake_here

$(MOONCAKE_STAMP): pyproject.toml constraints.txt
	$(call build_venv,$(MOONCAKE_VENV),mooncake$(comma)dev)
	@touch $@

engines: $(ENGINES:%=engines-%) ## Run the tests against the real vLLM and SGLang, each in an environment of its own
	@:

# What failed beside others is run once more, alone: engines of several processes starve each other on few cores, and what
# comes too late is a miss by design. A failure that repeats alone fails the target.
$(ENGINES:%=engines-%): engines-%: engines-setup-%
	@export PATH="$(CURDIR)/.venv-$*/bin:$$PATH"; python -m pytest -q -n 2 --dist worksteal tests/engines/$* $(ARGS) || { \
		echo "== once more, alone: what failed" >&2; \
		python -m pytest -q --last-failed --last-failed-no-failures none tests/engines/$*; }

engines-setup: $(ENGINES:%=engines-setup-%)
	@:

# Fails, and says what to install, where the wheel or something of the system that it needs cannot be had.
$(ENGINES:%=engines-setup-%): engines-setup-%: .venv-%/.stamp
	@PATH="$(CURDIR)/.venv-$*/bin:$$PATH" python -m tools.engine_here $*

.venv-vllm/.stamp .venv-sglang/.stamp: .venv-%/.stamp: tests/engines/requirements-%.txt pyproject.toml
	$(call make_venv,.venv-$*)
	@.venv-$*/bin/python -m pip install -qq --no-deps --requirement $< || { \
		echo "$* CANNOT BE TESTED: a wheel of $< cannot be had here; see above" >&2; exit 1; }
	@.venv-$*/bin/python -m pip install -qq --no-deps --no-build-isolation --editable .
	@touch $@

# Where `make install-systemd` puts units, for packages with DESTDIR, and the hicached that they start.
PREFIX ?= /usr/local
SYSCONFDIR ?= /etc
UNITDIR ?= $(PREFIX)/lib/systemd/system
DOCDIR ?= $(PREFIX)/share/doc/hicache
HICACHED ?= $(PREFIX)/bin/hicached
UNITS := hicached.service hicached.socket hicached@.service hicached@.socket
install_unit = sed -e 's|@HICACHED@|$(HICACHED)|g' -e 's|@SYSCONFDIR@|$(SYSCONFDIR)|g' -e 's|@DOCDIR@|$(DOCDIR)|g' \
	systemd/$(1) | install -D -m 0644 /dev/stdin '$(DESTDIR)$(2)'

install-systemd: ## Install the units, users and folders of hicached; DESTDIR=, PREFIX=/usr/local, HICACHED=
	@case '$(HICACHED)' in /home/*|/root/*|/tmp/*) echo "$(HICACHED): the unit hides /home, /root and /tmp; install hicache elsewhere" >&2; exit 1;; esac
	@[ -n '$(DESTDIR)' ] || [ -x '$(HICACHED)' ] || { \
		echo "$(HICACHED) is not there: say HICACHED=/path/to/hicached (command -v hicached)" >&2; exit 1; }
	@$(foreach unit,$(UNITS),$(call install_unit,$(unit),$(UNITDIR)/$(unit)) &&) true
	@$(call install_unit,hicached.sysusers,$(PREFIX)/lib/sysusers.d/hicached.conf)
	@$(call install_unit,hicached.tmpfiles,$(PREFIX)/lib/tmpfiles.d/hicached.conf)
	@install -D -m 0644 docs/hicached.md '$(DESTDIR)$(DOCDIR)/hicached.md'
	@[ -e '$(DESTDIR)$(SYSCONFDIR)/hicached.toml' ] || $(call install_unit,hicached.toml,$(SYSCONFDIR)/hicached.toml)
	@echo "next: systemd-sysusers && systemd-tmpfiles --create && systemctl daemon-reload && systemctl enable --now hicached"

uninstall-systemd: ## Remove what install-systemd installed, but for the configuration and what is stored
	@rm -f $(UNITS:%='$(DESTDIR)$(UNITDIR)/%') '$(DESTDIR)$(PREFIX)/lib/sysusers.d/hicached.conf' \
		'$(DESTDIR)$(PREFIX)/lib/tmpfiles.d/hicached.conf' '$(DESTDIR)$(DOCDIR)/hicached.md'

stubs: setup ## Regenerate the gRPC stubs in hicache/wire/
	@$(BIN)/python tools/stubs.py

format: setup ## Format the code and apply the safe lint fixes
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

clean: ## Remove .venv and everything that tools leave behind
	rm -rf $(VENV) $(MOONCAKE_VENV) $(ENGINES:%=.venv-%) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis htmlcov .coverage .coverage.*
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

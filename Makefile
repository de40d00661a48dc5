# `make` lists what there is. Every target but `help` and `clean` sets up .venv first where that is not done yet.
.DEFAULT_GOAL := help
.PHONY: help demo demo-grpo demo-dpo demo-gkd demo-embed test test-all test-gpu test-twinkle test-slurm lint format bench docs venv clean

python := .venv/bin/python
pytest := $(python) -m pytest

help: ## this list
	@echo 'usage: make TARGET'
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16
	@echo
	@echo 'settings of `make demo`, for example  DATA=my.jsonl STEPS=500 make demo'
	@echo '  DATA=FILE   JSON lines to train on; default: the language reference of Python'
	@echo '  STEPS=N     optimizer steps; default: 250'
	@echo '  TP=N PP=N   tensor and pipeline parallel sizes; default: 2 and 2, so four processes'
	@echo '  HEAD=NAME   logits, or linear, which never builds them; default: by memory'
	@echo
	@echo 'settings of `make demo-grpo`: TP and PP as above, and'
	@echo '  LOSS=NAME   grpo, gspo, sapo, cispo, bnpo or dr-grpo; default: grpo'
	@echo
	@echo 'settings of `make demo-dpo`: TP and PP as above, and'
	@echo '  LOSS=NAME   dpo, simpo, cpo or orpo; default: dpo'
	@echo
	@echo 'settings of `make demo-gkd`: TP and PP as above, and'
	@echo '  BETA=N      of the divergence: 0 is KL(teacher|student), 1 KL(student|teacher); default: 0'
	@echo
	@echo 'settings of `make demo-embed`: TP and PP as above'
	@echo
	@echo '  (launch/local.sh --help lists all options of the script)'
	@echo
	@echo 'setting of every target: PYTHON=/path/to/python3.11, the interpreter that .venv is made from'

# The shell passes each setting on as one word, whatever is in it.
demo: venv ## train a small GPT, TP 2 x PP 2, four processes; the loss curve is left in runs/
	@PYTHON=$(python) launch/local.sh --tp "$${TP:-2}" --pp "$${PP:-2}" $${STEPS:+"--steps=$$STEPS"} $${HEAD:+"--head=$$HEAD"} $${DATA:+"--data=$$DATA"}

demo-grpo: venv ## train a small GPT by GRPO on what it samples, three seeds; rewards and a picture are left in runs/
	@$(python) -m launch.demo_grpo --tp "$${TP:-2}" --pp "$${PP:-2}" $${LOSS:+"--loss=$$LOSS"}

demo-dpo: venv ## train a small GPT to prefer real sentences to shuffled ones; margins and a picture are left in runs/
	@$(python) -m launch.demo_dpo --tp "$${TP:-2}" --pp "$${PP:-2}" $${LOSS:+"--loss=$$LOSS"}

demo-gkd: venv ## train a small GPT and distil it into one of half the width; losses and a picture are left in runs/
	@$(python) -m launch.demo_gkd --tp "$${TP:-2}" --pp "$${PP:-2}" $${BETA:+"--beta=$$BETA"}

demo-embed: venv ## make a small GPT an encoder that finds the text to a title; recall and a picture are left in runs/
	@$(python) -m launch.demo_embed --tp "$${TP:-2}" --pp "$${PP:-2}"

test: venv ## the tests, about 10 minutes on 2 cores
	@$(pytest) -q -n 2 -m 'not long and not alone' --ignore=tests/slurm
	@$(pytest) -q -n 2 -m 'not long and alone' tests/vocab_parallel

test-all: venv ## the tests with the long lists
	@$(pytest) -q -n 2 -m 'not alone' --ignore=tests/slurm
	@$(pytest) -q -n 2 -m alone tests/vocab_parallel

test-gpu: venv ## the tests on NCCL, with as many GPUs as there are
	@TWINKLE_TEST_DEVICE=cuda $(pytest) -q -m 'not long' --ignore=tests/slurm

test-twinkle: venv ## the tests inside a real twinkle-kit, in a second environment, about 2 minutes
	@.ci/venv-twinkle
	@.venv-twinkle/bin/python -m pytest -q tests_twinkle

test-slurm: venv ## the tests of the batch scripts on a real SLURM, where it is installed, about 10 minutes
	@$(pytest) -q tests/slurm

lint: venv ## lint, format and type checks
	@$(python) -m ruff check .
	@$(python) -m ruff format --check .
	@.venv/bin/shellcheck -x launch/local.sh launch/env.sh launch/slurm/*.sh launch/slurm/*.sbatch patches/apply.sh .ci/run .ci/venv .ci/venv-twinkle
	@$(python) -m pyright --pythonpath $(python)

format: venv ## write the format that lint asks for
	@$(python) -m ruff check --fix .
	@$(python) -m ruff format .

bench: venv ## time and memory beside Megatron-Core: of the loss, of the linear head, of sequences
	@$(python) benchmarks/token_stats.py
	@$(python) benchmarks/linear_head.py
	@$(python) benchmarks/sequences.py
	@$(python) benchmarks/divergence.py

docs: venv ## build the documentation into site/; a warning is an error
	@$(python) -c 'import material' 2>/dev/null || \
		$(python) -m pip install --quiet --no-input --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@NO_MKDOCS_2_WARNING=1 $(python) -m mkdocs build --strict --quiet
	@echo 'open site/index.html'

venv: ## set up .venv with this package and what it is tested with
	@PYTHON="$${PYTHON:-}" .ci/venv

clean: ## remove .venv, .venv-twinkle and all that tools left; runs/ stays
	rm -rf .venv .venv-twinkle build dist site *.egg-info .pytest_cache .hypothesis .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

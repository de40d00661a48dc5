#!/usr/bin/env bash
# Trains on this machine: checks the options, prepares the data, starts launch/train.py once for each process.
#
# usage: launch/local.sh [OPTION...]          launch/local.sh --help    lists the options of launch/train.py
#
#   launch/local.sh --tp 2 --pp 2                      four processes, on Python's language reference
#   launch/local.sh --tp 2 --data my.jsonl --steps 500
#   launch/local.sh --tp 2 --loss grpo --data rollouts.jsonl --init-weights policy.npz      docs/rollouts.md tells more
#   launch/local.sh --tp 2 --loss dpo --data pairs.jsonl --init-weights policy.npz          docs/pairs.md tells more
#   launch/local.sh --tp 2 --loss gkd --teacher-weights teacher.npz --hidden-size 64        docs/distillation.md tells more
#   launch/local.sh --tp 2 --loss infonce --data groups.jsonl --init-weights base.npz       docs/embeddings.md tells more
#   launch/local.sh --tp 2 --model Qwen/Qwen3-0.6B --data my.jsonl --save-model trained     docs/huggingface.md tells more
#
# environment:
#   PYTHON             the interpreter; default: .venv/bin/python of this repository, else python3
#   OMP_NUM_THREADS    threads of each process; default: 1, which is fastest for small models
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [ -z "${PYTHON:-}" ]; then
    PYTHON=$here/.venv/bin/python
    [ -x "$PYTHON" ] || PYTHON=python3
fi
export PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH}

if ! "$PYTHON" -c '' 2>/dev/null; then
    echo "$0: PYTHON=$PYTHON does not run; name an interpreter, or let 'make venv' set up .venv" >&2
    exit 1
fi
needs='"torch", "megatron", "tokenizers", "tqdm", "matplotlib"'
if ! "$PYTHON" -c "import sys, importlib.util as u; sys.exit(not all(map(u.find_spec, [$needs])))"; then
    echo "$0: $PYTHON lacks some of the packages $needs; 'make venv' sets up .venv with all of them" >&2
    exit 1
fi

for option in "$@"; do
    case $option in -h | --help) exec "$PYTHON" -m launch.prepare --help ;; esac
done

plan=$("$PYTHON" -m launch.prepare "$@")
read -r processes device dataset <<<"$plan"
[ "$device" = cuda ] || export CUDA_VISIBLE_DEVICES=''
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} # Megatron overlaps communication in this order

# --standalone: one machine, any free port
exec "$PYTHON" -m launch.processes --standalone --nproc-per-node "$processes" \
    -m launch.train "$@" --dataset "$dataset"

#!/usr/bin/env bash
# What each task of a step runs. The batch scripts start it; so may anybody: srun launch/slurm/task.sh rank my_script.py
#
# usage: task.sh agent COUNTS PROGRAM...   torchrun on this node, for as many ranks as COUNTS, such as 4(x2), says of it
#        task.sh rank PROGRAM...           this task is one rank, as SLURM numbers it
#        task.sh run PROGRAM...            as it is
#
# PROGRAM is what Python gets: FILE or -m MODULE, and its options. Everything here is read in the task, on its node.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
home=$(dirname "$(dirname "$here")")
# shellcheck source=launch/env.sh
. "$home/launch/env.sh"

if [ -z "${PYTHON:-}" ]; then
    PYTHON=$home/.venv/bin/python
    [ -x "$PYTHON" ] || PYTHON=python3
fi
export PYTHON PYTHONPATH=$home${PYTHONPATH:+:$PYTHONPATH}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} # Megatron overlaps communication in this order
[ "${LAUNCH_DEVICE:-}" != cpu ] || export CUDA_VISIBLE_DEVICES=''

# Until Python has begun to listen, this signal ends nothing; the batch script says it again.
trap '' USR1

[ $# -gt 1 ] || fail 'usage: task.sh agent COUNTS PROGRAM... | task.sh rank PROGRAM... | task.sh run PROGRAM...'
mode=$1
shift
case $mode in
    agent)
        mapfile -t counts < <(expand_counts "$1")
        shift
        set_master
        # rank 0 is on the first node, which is the master, because nodes are numbered here and not by who comes first
        exec "$PYTHON" -m launch.processes --nnodes "$SLURM_STEP_NUM_NODES" --node-rank "$SLURM_NODEID" \
            --nproc-per-node "${counts[SLURM_NODEID]}" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" \
            --no-python "$here/task.sh" run "$@"
        ;;
    rank)
        set_master
        set_ranks
        exec "$PYTHON" "$@"
        ;;
    run) exec "$PYTHON" "$@" ;;
    *) fail "the first word must be agent, rank or run, got '$mode'" ;;
esac

# shellcheck shell=bash
# The part that train.sbatch and train_srun.sbatch have in common; both source it. It runs once, on the first node.

AGAIN=85 # the exit code of a rank that has saved and wants to be run again

usage() {
    cat <<USAGE
usage: sbatch [SBATCH OPTION...] launch/slurm/$1 [OPTION...] [-- OPTION OF launch/train.py...]

  --dry-run                  print what would be run, without checking the options behind --; works without SLURM, too:
                             SLURM_JOB_NODELIST='n[1-2]' SLURM_TASKS_PER_NODE='2(x2)' bash launch/slurm/$1 --dry-run
  --script FILE              run this in place of launch/train.py, with what stands behind --; for a module -m, as in
                             --script=-m -- twinkle_megatron.run --loss chunked_cross_entropy -- pretrain_gpt.py ...
  --cpu                      no rank sees a GPU
  --no-doctor                do not look at layout, versions, network and machines before launch/train.py starts
  --grace SECONDS            how long ranks may go on when the first of them has ended; default: 30
  --srun OPTION              one more option for srun, such as --srun=--mem=0; may be repeated
  --container-image IMAGE    run in this image, by pyxis; PYTHON says which interpreter of it, default: python3
  --container-mounts LIST    more folders than that of this repository and the one of the job, FROM:TO,...
USAGE
}

# How Python's options are read here: --name VALUE and --name=VALUE.
read_options() {
    dry_run='' doctor=yes script='' grace=30 image='' mounts='' srun_more=() program=()
    while [ $# -gt 0 ]; do
        local name=${1%%=*} value=''
        case $name in
            --)
                shift
                program=("$@")
                return
                ;;
            --dry-run) dry_run=yes ;;
            --cpu) export LAUNCH_DEVICE=cpu ;;
            --no-doctor) doctor='' ;;
            --script | --grace | --srun | --container-image | --container-mounts)
                if [[ $1 == *=* ]]; then
                    value=${1#*=}
                else
                    [ $# -gt 1 ] || fail "$name needs a value"
                    value=$2
                    shift
                fi
                ;;
            *) fail "unknown option '$1'; options of launch/train.py stand behind --" ;;
        esac
        case $name in
            --script) script=$value ;;
            --srun) srun_more+=("$value") ;;
            --container-image) image=$value ;;
            --container-mounts) mounts=$value ;;
            --grace)
                grace=$value
                [[ $grace =~ ^[1-9][0-9]*$ ]] || fail "--grace must be a whole number of seconds of at least 1, got '$grace'"
                ;;
        esac
        shift
    done
}

# Of the job: its nodes, and how many ranks each of them has.
read_job() {
    nodelist=${SLURM_JOB_NODELIST:-$(uname -n)}
    master=$(master_of "$nodelist") || exit 1
    nodes=$(hosts_of "$nodelist" | wc -l)
    counts=${SLURM_TASKS_PER_NODE:-1(x$nodes)}
    if [ "$launcher" = torchrun ] && [ "$(sum "$counts")" -eq "$nodes" ] && [ "${SLURM_GPUS_ON_NODE:-0}" -gt 1 ]; then
        counts="$SLURM_GPUS_ON_NODE(x$nodes)" # one task a node was asked for, so a rank for each GPU
    fi
    ranks=$(sum "$counts")
}

sum() {
    local count total=0
    for count in $(expand_counts "$1"); do total=$((total + count)); done
    echo "$total"
}

# In `step` the command that runs task.sh in all tasks, in `alone` the one that runs it once, on the master.
make_commands() {
    local inside=(--kill-on-bad-exit=0)
    if [ -n "$image" ]; then
        inside+=("--container-image=$image" "--container-workdir=$PWD"
            "--container-mounts=$home:$home,$PWD:$PWD${mounts:+,$mounts}")
    fi
    inside+=("${srun_more[@]}")
    alone=(srun --nodes=1 --ntasks=1 "--nodelist=$master" --cpu-bind=none "${inside[@]}" "$here/task.sh" run)
    step=(srun "--nodes=$nodes" "--wait=$grace" --distribution=block)
    if [ "$launcher" = torchrun ]; then
        # the one task of a node starts all of its ranks: it needs every core and GPU
        step+=("--ntasks=$nodes" --ntasks-per-node=1 --cpu-bind=none --gpu-bind=none "${inside[@]}"
            "$here/task.sh" agent "$counts")
    else
        [[ $counts == *,* ]] || step+=("--ntasks-per-node=$((ranks / nodes))")
        step+=("--ntasks=$ranks" ${SLURM_CPUS_PER_TASK:+"--cpus-per-task=$SLURM_CPUS_PER_TASK"} --gpu-bind=none
            "${inside[@]}" "$here/task.sh" rank)
    fi
}

show() {
    printf 'nodes     %s\n' "$(hosts_of "$nodelist" | xargs)"
    printf 'ranks     %s: %s\n' "$ranks" "$(expand_counts "$counts" | xargs)"
    printf 'master    %s, port from %s on\n' "$master" "$PORT_BLOCK"
    [ -n "$script" ] || printf 'prepare   %s\n' "$(quoted "${alone[@]}" -m launch.prepare "${program[@]}")"
    printf 'run       %s\n' "$(quoted PORT_BLOCK="$PORT_BLOCK" "${step[@]}" "${what[@]}")"
}

quoted() {
    local word line=''
    for word; do
        if [[ $word =~ ^[A-Za-z0-9_./:=,%+@-]+$ ]]; then line+=" $word"; else line+=" '${word//\'/\'\\\'\'}'"; fi
    done
    echo "${line# }"
}

# Sets `what`, the program and its options, once the data is prepared.
prepare() {
    if [ -n "$script" ]; then
        what=("$script" "${program[@]}")
        return
    fi
    if [ "${SLURM_RESTART_COUNT:-0}" -ne 0 ]; then
        program+=(--resume auto) # this job has been here before
    elif [ -n "$doctor" ]; then
        program+=(--doctor)
    fi
    what=(-m launch.train "${program[@]}" --dataset 'FOLDER')
    [ -z "$dry_run" ] || return 0
    local plan processes dataset
    plan=$("${alone[@]}" -m launch.prepare "${program[@]}") || exit $?
    read -r processes _ dataset <<<"$plan"
    [ "$processes" -eq "$ranks" ] ||
        fail "--tp, --pp and --dp need $processes ranks, and the job has $ranks; give sbatch --nodes and --ntasks-per-node, or --dp"
    what=(-m launch.train "${program[@]}" --dataset "$dataset")
}

# Finds what is free where it will be bound: on the master, which is not here when srun is called on another host.
find_ports() {
    local job=${SLURM_JOB_ID:-0} find
    if [ -n "$dry_run" ]; then
        PORT_BLOCK=$(port_block "$job")
    elif [ "${SLURMD_NODENAME:-}" = "$master" ]; then
        PORT_BLOCK=$(free_port_block "$job")
    else
        # shellcheck disable=SC2016 # the task expands it
        find='. "$1" && free_port_block "$2"'
        PORT_BLOCK=$(srun --nodes=1 --ntasks=1 "--nodelist=$master" bash -c "$find" bash "$home/launch/env.sh" "$job")
    fi
    export PORT_BLOCK
}

# A signal for the ranks, by srun; again and again, as some of them may not listen yet.
told=''
forward() {
    told=$1
    [ -n "${running:-}" ] || return 0
    say "SIG$told goes to the ranks"
    kill "-$told" "$running" 2>/dev/null || true
    [ -n "${repeating:-}" ] || [ "$told" != USR1 ] || {
        while sleep 10 && kill -USR1 "$running" 2>/dev/null; do :; done &
        repeating=$!
    }
}

# Runs the step; its code is that of the rank that failed first, as those that srun ends afterwards have others.
run_step() {
    local dir
    dir=$(mktemp -d)
    mkfifo "$dir/errors"
    {
        trap '' USR1 TERM
        tee >(sed -nE 's/^srun: error: .*: tasks? [^:]*: Exited with exit code ([0-9]+).*/\1/p' >"$dir/codes") >&2
        wait $!
    } <"$dir/errors" &
    local reader=$!
    "${step[@]}" "${what[@]}" 2>"$dir/errors" &
    running=$!
    while kill -0 "$running" 2>/dev/null; do wait "$running" || true; done # a signal ends the waiting, not srun
    code=0
    wait "$running" || code=$?
    running=''
    [ -z "${repeating:-}" ] || kill "$repeating" 2>/dev/null || true
    wait "$reader" || true
    local first
    [ "$code" -eq 0 ] || { read -r first <"$dir/codes" && code=$first; } || true
    rm -rf "$dir"
}

# Whether this job should come back by itself. One that was told to end by SIGTERM comes back if SLURM wants it to.
finish() {
    if [ "$code" -ne "$AGAIN" ] || [ "$told" = TERM ]; then
        [ "$code" -eq 0 ] || say "the job ends with code $code"
        exit "$code"
    fi
    local job=$SLURM_JOB_ID
    # the id of one job of an array can be that of the whole array
    [ -z "${SLURM_ARRAY_JOB_ID:-}" ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
    say "the ranks have saved: requeues job $job"
    scontrol requeue "$job" || say "it cannot be requeued; submit it again, with --resume auto"
    exit "$AGAIN"
}

# launch torchrun|srun OPTION...
launch() {
    launcher=$1
    shift
    case ${1:-} in -h | --help)
        usage "$(basename "$0")"
        exit
        ;;
    esac
    read_options "$@"
    # of the job or of the one who submits it, and wrong for a step of another shape
    unset SLURM_NTASKS_PER_NODE SLURM_GPUS_PER_TASK SLURM_NTASKS_PER_GPU SLURM_DISTRIBUTION MASTER_ADDR MASTER_PORT
    read_job
    make_commands
    trap 'forward USR1' USR1
    trap 'forward TERM' TERM
    code=$AGAIN
    find_ports
    prepare
    [ -z "$dry_run" ] || {
        show
        exit
    }
    [ -z "$told" ] || finish # before anything was started
    run_step
    finish
}

here=$(cd "$here" && pwd)
home=$(dirname "$(dirname "$here")")
# shellcheck source=launch/env.sh
. "$home/launch/env.sh"

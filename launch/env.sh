# shellcheck shell=bash
# What a launch has to know of its hosts, its port and its ranks, in functions; launch/slurm/ sources this file.
#
# Only bash is needed: inside a container there is no scontrol.

PORTS_FROM=10240  # below the ports that systems hand out by themselves, from 32768
PORT_BLOCKS=1408  # as many blocks fit in between
PORTS_OF_A_JOB=16 # one for each step that runs at once

say() { printf 'launch: %s\n' "$*" >&2; }

fail() {
    say "$*"
    exit 1
}

# Of a node list such as `a,b[001,003],c[1-2]-ib[0-1]`, each host on a line, in the order of the list.
expand_hosts() {
    local list=$1 char item='' depth=0 i
    for ((i = 0; i < ${#list}; i++)); do
        char=${list:i:1}
        case $char in
            '[') depth=$((depth + 1)) ;;
            ']') depth=$((depth - 1)) ;;
        esac
        if [ "$char" = , ] && [ "$depth" -eq 0 ]; then
            [ -z "$item" ] || _expand_item "$item"
            item=''
        else
            item+=$char
        fi
    done
    [ "$depth" -eq 0 ] || fail "the node list must close every bracket, got '$list'"
    [ -z "$item" ] || _expand_item "$item"
}

# One item of a list: what stands before its first bracket, with everything in it, with everything behind it.
_expand_item() {
    local item=$1 before inner behind depth=1 i
    if [[ $item != *'['* ]]; then
        printf '%s\n' "$item"
        return
    fi
    before=${item%%'['*} inner=${item#*'['}
    for ((i = 0; i < ${#inner}; i++)); do
        case ${inner:i:1} in
            '[') depth=$((depth + 1)) ;;
            ']') depth=$((depth - 1)) ;;
        esac
        [ "$depth" -gt 0 ] || break
    done
    behind=${inner:i+1} inner=${inner:0:i}
    local part first last width number padded
    for part in $(expand_hosts "$inner"); do
        if [[ $part =~ ^[0-9]+-[0-9]+$ ]]; then
            first=${part%-*} last=$((10#${part#*-}))
            width=${#first}
            for ((number = 10#$first; number <= last; number++)); do
                printf -v padded '%0*d' "$width" "$number"
                _expand_item "$before$padded$behind"
            done
        else
            _expand_item "$before$part$behind"
        fi
    done
}

# The hosts of a node list: by SLURM where it is there.
hosts_of() {
    if command -v scontrol >/dev/null 2>&1; then
        scontrol show hostnames "$1" 2>/dev/null && return
    fi
    expand_hosts "$1"
}

# Of counts such as `2(x3),1`, each on a line: 2 2 2 1.
expand_counts() {
    local part i times
    for part in ${1//,/ }; do
        times=1
        if [[ $part =~ ^([0-9]+)\(x([0-9]+)\)$ ]]; then
            part=${BASH_REMATCH[1]} times=${BASH_REMATCH[2]}
        fi
        for ((i = 0; i < times; i++)); do echo "$part"; done
    done
}

# The host that all ranks meet at: the first of the node list. Never the host that srun was called on.
master_of() {
    local hosts
    mapfile -t hosts < <(hosts_of "$1")
    [ "${#hosts[@]}" -gt 0 ] || fail "the node list must name a host, got '$1'"
    if [ "${#hosts[@]}" -gt 1 ]; then
        case ${hosts[0]} in
            localhost | localhost.* | 127.0.0.1 | ::1)
                fail "the first of ${#hosts[@]} nodes must have a name that the others can reach, got '${hosts[0]}'; see NodeName in slurm.conf" ;;
        esac
    fi
    echo "${hosts[0]}"
}

# The first port of a block of a job; `turn` moves on to another block.
port_block() {
    local job=$1 turn=${2:-0}
    echo $((PORTS_FROM + (job + turn * 211) % PORT_BLOCKS * PORTS_OF_A_JOB))
}

# TCP ports in use on this host, a line each.
ports_in_use() {
    if command -v ss >/dev/null 2>&1; then
        ss -Htan 2>/dev/null | awk '{sub(/.*:/, "", $4); print $4}' | sort -u
        return
    fi
    local address rest
    while read -r _ address rest; do
        [[ $address =~ :([0-9A-F]{4})$ ]] && echo $((16#${BASH_REMATCH[1]}))
    done < <(cat /proc/net/tcp /proc/net/tcp6 2>/dev/null) | sort -u
}

# The same, but for a job whose block is in use on this host, or handed out by it: the next that is not.
free_port_block() {
    local job=$1 turn first port used lowest=32768 highest
    { read -r lowest highest </proc/sys/net/ipv4/ip_local_port_range; } 2>/dev/null || lowest=32768 highest=60999
    used=" $(ports_in_use | tr '\n' ' ')"
    for ((turn = 0; turn < PORT_BLOCKS; turn++)); do
        first=$(port_block "$job" "$turn")
        # where the system hands out all of them, being free now has to do
        if [ "$lowest" -gt $((PORTS_FROM + PORTS_OF_A_JOB)) ] && [ $((first + PORTS_OF_A_JOB)) -gt "$lowest" ] &&
            [ "$first" -le "$highest" ]; then continue; fi
        for ((port = first; port < first + PORTS_OF_A_JOB; port++)); do
            [[ $used != *" $port "* ]] || continue 2
        done
        echo "$first"
        return
    done
    fail "no $PORTS_OF_A_JOB ports side by side are free from $PORTS_FROM on"
}

# In a task of a step: the master and the port, equal in all of them. Everything is of the step: a job can hold several,
# and be larger than any of them. PORT_BLOCK is what the batch script found to be free on the master.
set_master() {
    local first step=${SLURM_STEP_ID:-0}
    [[ $step =~ ^[0-9]+$ ]] || step=0
    first=${PORT_BLOCK:-$(port_block "${SLURM_JOB_ID:?is set in a task of SLURM: start this with srun}")}
    MASTER_ADDR=$(master_of "${SLURM_STEP_NODELIST:?is set in a task of SLURM: start this with srun}") || exit 1
    MASTER_PORT=$((first + step % PORTS_OF_A_JOB))
    export MASTER_ADDR MASTER_PORT
}

# In a task that is one rank: what torch.distributed reads.
set_ranks() {
    local counts before=0 node
    mapfile -t counts < <(expand_counts "$SLURM_STEP_TASKS_PER_NODE")
    for ((node = 0; node < SLURM_NODEID; node++)); do before=$((before + counts[node])); done
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_STEP_NUM_TASKS
    export LOCAL_WORLD_SIZE=${counts[SLURM_NODEID]} GROUP_RANK=$SLURM_NODEID
    [ "$RANK" -eq $((before + LOCAL_RANK)) ] ||
        fail "tasks must be numbered node by node, got $RANK for number $LOCAL_RANK of node $SLURM_NODEID; give srun --distribution=block"
}

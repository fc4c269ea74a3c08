#!/usr/bin/env bash
# Starts one training on several hosts by ssh, and ends it on all of them when it ends on one.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launchers/hosts.sh "HOST HOST ..." CONFIG RECIPE [FLAGS OF THE RECIPE ...]

    launchers/hosts.sh "node1 node2" accelerate_configs/multi_node.yaml recipes/lm.py --train_file 'my chats/*.jsonl'

The same command runs on each host, in this directory, which must be there too (a shared file system, or a copy). The
first host has rank 0, and the others must reach it. A host is what ssh takes: a name, user@name, or one of ~/.ssh/config;
ssh must need no password. Any config works: the number of hosts and processes is given to it. Each line is printed with
its host. The failure of one host ends all, and the status is not 0.

Environment variables:
  PROCESSES_PER_HOST  one a GPU (default: the number of the first host's GPUs, or 1)
  MAIN_IP             address of the first host for the others (default: its name in the list)
  PORT                of the first host, free there and open to the others (default: 29500)
  TIMEOUT             seconds that the hosts wait for each other (default: 60)
  LAUNCH_FLAGS        more flags of accelerate launch, such as "--mixed_precision no"
  PYTHON              on each host (default: .venv/bin/python of this directory if it is there, else python3)
  SSH                 the command with its options (default: ssh)
All variables named NCCL_*, GLOO_*, CUDA_*, OMP_*, HF_*, TORCH_*, DS_* and XDG_CACHE_HOME go to each host through ssh's
input, because everybody on a host sees the command lines of all. LAUNCH_TOKEN too: the secret of the launch, a new one if
it is not set. With several networks, set NCCL_SOCKET_IFNAME=eth0 where NCCL
takes a wrong one; gloo is told the one that leads to MAIN_IP.
TEXT
}

die() {
    echo "error: $1" >&2
    exit 2
}

# Quotes that every shell reads alike, whatever the words hold.
quote() {
    local word
    for word in "$@"; do
        printf "'%s' " "${word//\'/\'\\\'\'}"
    done
}

# Becomes the ssh to a host.
run_on() {
    local rank=$1 host=$2 fifo remote
    # ssh alone would leave the command running when it is killed. So its input stays open, and says nothing: when it
    # closes, whatever the reason, the remote shell ends the command.
    fifo=$(mktemp -u)
    mkfifo "$fifo"
    exec 3<>"$fifo"
    rm "$fifo"
    printf '%s\0' "${variables[@]}" "" >&3
    remote="while IFS= read -r -d '' pair && [[ -n \$pair ]]; do export \"\$pair\"; done
exec 3<&0 </dev/null; $before_rank $rank $after_rank &
run=\$!
{ read -r _ <&3; kill \$run; } >/dev/null 2>&1 &
watch=\$!
wait \$run; status=\$?
kill \$watch 2>/dev/null
exit \$status"
    # shellcheck disable=SC2086  # SSH holds words
    exec $SSH -o BatchMode=yes -o ConnectTimeout="${TIMEOUT%.*}" -o ServerAliveInterval=5 -o ServerAliveCountMax=3 \
        "$host" "exec bash -c $(quote "$remote")" <&3
}

SSH=${SSH:-ssh} TIMEOUT=${TIMEOUT:-60}
if [[ ${1:-} == --help || ${1:-} == -h ]]; then
    usage
    exit
fi
[[ $# -ge 3 ]] || die 'hosts, a config and a recipe are needed: launchers/hosts.sh "host1 host2" CONFIG RECIPE ... (--help)'
read -ra hosts <<<"$1"
config=$2 recipe=$3
shift 3
[[ ${#hosts[@]} -gt 0 ]] || die 'the list of hosts is empty; give "host1 host2 ..." in quotes'
[[ -f $config ]] || die "$config is not there; name one of accelerate_configs/, from the directory of the repository"
[[ -f $recipe ]] || die "$recipe is not there; name a recipe, from the directory of the repository"

default_python=python3
[[ -x .venv/bin/python ]] && default_python=$PWD/.venv/bin/python
main=${hosts[0]}
if [[ -z ${PROCESSES_PER_HOST:-} ]]; then
    # shellcheck disable=SC2086
    gpus=$($SSH -o BatchMode=yes -o ConnectTimeout="${TIMEOUT%.*}" "$main" "nvidia-smi -L 2>/dev/null | grep -c ^GPU; true") ||
        die "ssh does not reach $main; try: $SSH $main true"
    PROCESSES_PER_HOST=$((gpus > 0 ? gpus : 1))
fi
export LAUNCH_TOKEN=${LAUNCH_TOKEN:-$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')}
variables=()
for name in $(compgen -e); do
    case $name in
    NCCL_* | GLOO_* | CUDA_* | OMP_* | HF_* | TORCH_* | DS_* | XDG_CACHE_HOME | LAUNCH_TOKEN) variables+=("$name=${!name}") ;;
    esac
done
all="${variables[*]}"
[[ ${#all} -lt 15000 ]] || die "the variables for the hosts are longer than 15000 characters; unset those named HF_*, ... that no host needs"
read -ra launch_flags <<<"${LAUNCH_FLAGS:-}"
before_rank="cd $(quote "$PWD") && exec $(
    quote "${PYTHON:-$default_python}" launchers/meet.py --timeout "$TIMEOUT" accelerate launch --config_file "$config" \
        --num_machines "${#hosts[@]}" --num_processes "$((${#hosts[@]} * PROCESSES_PER_HOST))" \
        --main_process_ip "${MAIN_IP:-${main#*@}}" --main_process_port "${PORT:-29500}" \
        --deepspeed_multinode_launcher standard "${launch_flags[@]}"
)--machine_rank"
after_rank=$(quote "$recipe" "$@")

pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true' EXIT
trap 'exit 143' INT TERM HUP
for rank in "${!hosts[@]}"; do
    host=${hosts[rank]}
    run_on "$rank" "$host" > >(sed -u "s|^|$host\t|") 2> >(sed -u "s|^|$host\t|" >&2) &
    pids+=($!)
done
for _ in "${pids[@]}"; do
    wait -n
done

#!/usr/bin/env bash
# Submits a training job to SLURM and prints its number:
#
#   ./launch/slurm/submit.sh CONFIG [a.b=c ...] --nodes N --gpus-per-node M --time T [option ...]
#
#   --nodes N               nodes of the job (default: 1)
#   --gpus-per-node M       GPUs per node, with one rank each; use --ranks-per-node M for nodes without GPUs
#   --engine-nodes E        additional nodes for rollout.placement=disaggregated; they run only engines, under Ray
#   --time T                time limit of one start in SLURM's format (1-00:00:00); the job continues in the next start
#   --signal-before S       request a save S seconds before the limit (default: 300)
#   --max-requeues K        maximum number of requeues (default: 20)
#   --container IMAGE       a .sif file (apptainer) or an image (pyxis); without it, .venv of this repository
#   --mounts LIST           mounts of the container in addition to this repository and the working directory: SRC:DST,SRC:DST
#   --array LIST            one job per number; %a in an override is the number: seed=%a experiment=seed-%a
#   --sweep FILE            one job per line of FILE, which contains further overrides, separated by blanks
#   --dependency LIST       dependency in sbatch's format, such as afterok:123
#   --gpu KIND              GPU model for `rlhf-mcore plan` (default: H100)
#   --no-plan               submit even if `rlhf-mcore plan` estimates that the run does not fit
#   --dry-run               print the sbatch command and submit nothing
#   --NAME=VALUE            other options are passed to sbatch: --partition=gpu --account=me --exclude=bad1
#
# A job gets the share of a node's cores and memory that matches its GPUs: half of them for 4 of 8. To change this, use
# --cpus-per-task=C (all ranks of a node are one task), --mem=SIZE or --exclusive.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../common.sh"

wrong() {
    printf 'error: %s\n' "$*" >&2
    exit 2
}

# need OPTION [VALUE]: the option has one.
need() {
    if (($# < 2)); then wrong "$1 needs a value"; fi
}

nodes=1 engine_nodes=0 ranks="" gpus="" time="" before=300 max_requeues=20 container="" mounts="" array="" sweep="" dependency="" dry_run=0 named=0
config="" overrides=() others=()
while (($#)); do
    case "$1" in
        --help | -h) show_help && exit ;;
        --nodes) need "$@" && nodes="$2" && shift 2 ;;
        --gpus-per-node) need "$@" && gpus="$2" && shift 2 ;;
        --ranks-per-node) need "$@" && ranks="$2" && shift 2 ;;
        --engine-nodes) need "$@" && engine_nodes="$2" && shift 2 ;;
        --time) need "$@" && time="$2" && shift 2 ;;
        --signal-before) need "$@" && before="$2" && shift 2 ;;
        --max-requeues) need "$@" && max_requeues="$2" && shift 2 ;;
        --container) need "$@" && container="$2" && shift 2 ;;
        --mounts) need "$@" && mounts="$2" && shift 2 ;;
        --array) need "$@" && array="$2" && shift 2 ;;
        --sweep) need "$@" && sweep="$2" && shift 2 ;;
        --dependency) need "$@" && dependency="$2" && shift 2 ;;
        --gpu) need "$@" && RLHF_MCORE_GPU="$2" && export RLHF_MCORE_GPU && shift 2 ;;
        --no-plan) export RLHF_MCORE_PLAN=0 && shift ;;
        --dry-run) dry_run=1 && shift ;;
        --exclusive) others+=("$1") && shift ;;
        --*=*) others+=("$1") && shift ;;
        -*) wrong "$1 is not an option; options of sbatch are written --name=value (see --help)" ;;
        *)
            if [[ -z "$config" ]]; then config="$1"; else overrides+=("$1"); fi
            shift
            ;;
    esac
done

[[ -n "$config" ]] || wrong "a configuration is needed: submit.sh CONFIG [a.b=c ...] --nodes N --gpus-per-node M --time T"
[[ -f "$config" ]] || wrong "no file $config"
[[ -n "$time" ]] || wrong "--time is needed: without it the run does not know when to save"
ranks="${ranks:-$gpus}"
for setting in "--nodes=$nodes" "--engine-nodes=$engine_nodes" "--gpus-per-node (or --ranks-per-node)=$ranks" "--signal-before=$before" "--max-requeues=$max_requeues"; do
    [[ "${setting#*=}" =~ ^[0-9]+$ ]] || wrong "${setting%%=*} '${setting#*=}' is not a number"
done
if ((nodes < 1 || ranks < 1)); then wrong "--nodes $nodes with $ranks ranks each: both must be at least 1"; fi

if [[ -n "$sweep" ]]; then
    [[ -z "$array" ]] || wrong "--array and --sweep exclude each other: a sweep is an array with one job per line"
    [[ -f "$sweep" ]] || wrong "no file $sweep"
    lines="$(grep -c '[^[:space:]]' "$sweep" || true)"
    if ((lines == 0)); then wrong "$sweep is empty"; fi
    array="1-$lines"
    if ! grep '[^[:space:]]' "$sweep" | grep -qv '\bexperiment='; then named=1; fi
    overrides+=("@sweep:$(realpath "$sweep")")
fi
if [[ -n "$array" && "${overrides[*]}" != *%a* && "$named" == 0 ]]; then
    wrong "the jobs of --array $array would share a run directory; tell them apart, as with experiment=seed-%a seed=%a"
fi

# What cannot fit is refused now rather than after a night in the queue. Where it can be known: not what other jobs will make.
if [[ -z "$container$array$dependency" && "${RLHF_MCORE_PLAN:-1}" == 1 && "$dry_run" == 0 ]]; then
    "$root/launch/node.sh" rlhf_mcore.cli.main plan --world-size="$((nodes * ranks))" --gpu="${RLHF_MCORE_GPU:-H100}" \
        "$config" "${overrides[@]}" >/dev/null || exit
fi

# share_of_node: "CORES MEGABYTES" of a node that go with the job's GPUs (its ranks, where there are none), where they are fewest in the
# partition. MEGABYTES 0 is all there are, as for sbatch. Nothing where SLURM knows no node with so many.
share_of_node() {
    local other partition="${SBATCH_PARTITION:-}"
    for other in "${others[@]}"; do
        if [[ "$other" == --partition=* ]]; then partition="${other#*=}"; fi
    done
    { sinfo --noheader --exact --format='%P %c %m %G' ${partition:+--partition="$partition"} 2>/dev/null || true; } \
        | awk -v partition="$partition" -v gpus="$gpus" -v ranks="$ranks" '
        function gpus_of(resources,    parts, count, n, i) { # gpu:h100:8(S:0-1),shard:16 has 8
            n = split(resources, parts, ",")
            for (i = 1; i <= n; i++) if (parts[i] ~ /^gpu:/) { sub(/\(.*/, "", parts[i]); sub(/.*:/, "", parts[i]); count += parts[i] }
            return count
        }
        {
            there = gpus ? gpus_of($4) : $2; wanted = gpus ? gpus : ranks
            if (there < wanted || (!partition && $1 !~ /\*$/)) next # the default partition has a star
            cores = int($2 * wanted / there); memory = there == wanted ? 0 : int($3 * wanted / there)
            if (!found || cores < fewest) fewest = cores
            if (!found || (memory && (!least || memory < least))) least = memory
            found = 1
        }
        END { if (found) print (fewest ? fewest : 1), least }'
}

# given NAME...: whether one of these options goes to sbatch already.
given() {
    local name other
    for name in "$@"; do
        for other in "${others[@]}"; do
            if [[ "$other" == "$name" || "$other" == "$name="* ]]; then return 0; fi
        done
    done
    return 1
}

mkdir -p outputs/slurm # sbatch does not make the folder of its log
number="%j"
if [[ -n "$array" ]]; then number="%A_%a"; fi
export RLHF_MCORE_ENGINE_NODES="$engine_nodes"
command=(sbatch --parsable --nodes="$((nodes + engine_nodes))" --ntasks-per-node=1 --time="$time" --signal="B:USR1@$before"
    --output="outputs/slurm/%x-$number.out")
if [[ "${others[*]}" != *--job-name=* ]]; then command+=(--job-name="$(basename "${config%.*}")"); fi
read -r cores memory < <(share_of_node) || true
if [[ -z "$gpus" ]]; then cores="$ranks"; fi
if given --exclusive; then memory=0; fi
if [[ -n "${cores:-}" ]] && ! given --cpus-per-task --cpus-per-gpu --exclusive; then command+=(--cpus-per-task="$cores"); fi
if [[ -n "${memory:-}" ]] && ! given --mem --mem-per-cpu --mem-per-gpu; then command+=(--mem="$memory"); fi
if [[ -n "$gpus" ]]; then command+=(--gpus-per-node="$gpus"); fi
if [[ -n "$array" ]]; then command+=(--array="$array"); fi
if [[ -n "$dependency" ]]; then command+=(--dependency="$dependency" --kill-on-invalid-dep=yes); fi
command+=("${others[@]}" "$root/launch/slurm/train.sbatch" "$root" "$ranks" "$max_requeues" "$container" "$mounts" "$config" "${overrides[@]}")

if ((dry_run)); then
    printf '%q ' "${command[@]}"
    printf '\n'
    exit 0
fi
"${command[@]}"

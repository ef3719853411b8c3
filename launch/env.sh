# Environment of every command of this repository on one machine. Sourced by the other scripts; a value that is already set wins.
# shellcheck shell=bash

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"                    # ranks fill the cores; spinning threads slow them tenfold
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"  # the tokenizer's threads do not survive a fork
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"                      # models are local directories; a typo must not become a download
export VLLM_NO_USAGE_STATS="${VLLM_NO_USAGE_STATS:-1}"            # nothing is reported to anybody
export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-nobind}" # several ranks share the cores; let the scheduler place them
export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"              # one machine: no socket on a public interface, no host name to resolve
export RAY_USAGE_STATS_ENABLED="${RAY_USAGE_STATS_ENABLED:-0}"    # as above
export PYTHONNOUSERSITE="${PYTHONNOUSERSITE:-1}"                  # packages of the user's home must not shadow the locked ones

# Environment of every command of this repository, on one machine and on many. Sourced by the other scripts; a value that is
# already set wins.
# shellcheck shell=bash

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"                    # ranks fill the cores; spinning threads slow them tenfold
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"  # the tokenizer's threads do not survive a fork
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"                      # models are local directories; a typo must not become a download
export VLLM_NO_USAGE_STATS="${VLLM_NO_USAGE_STATS:-1}"            # nothing is reported to anybody
export VLLM_CPU_OMP_THREADS_BIND="${VLLM_CPU_OMP_THREADS_BIND:-nobind}" # several ranks share the cores; let the scheduler place them
if [[ "${RLHF_MCORE_ONE_MACHINE:-1}" == 1 ]]; then                # launch/node.sh says 0: there the agent picks the interface
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-lo}"          # one machine: no socket on a public interface, no host name to resolve
fi
export RAY_USAGE_STATS_ENABLED="${RAY_USAGE_STATS_ENABLED:-0}"    # as above
export PYTHONNOUSERSITE="${PYTHONNOUSERSITE:-1}"                  # packages of the user's home must not shadow the locked ones
export MALLOC_ARENA_MAX="${MALLOC_ARENA_MAX:-4}"                  # glibc gives threads arenas of their own, which never shrink: host memory of many ranks
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}" # Megatron overlaps tensor-parallel traffic by the order of launches
export CUDA_MODULE_LOADING="${CUDA_MODULE_LOADING:-LAZY}"         # kernels are loaded when used: seconds and hundreds of MB per rank
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF-${PYTORCH_ALLOC_CONF:-expandable_segments:True}}" # microbatches of many shapes leave no holes; vLLM's memory is allocated without
export TORCHINDUCTOR_COMPILE_THREADS="${TORCHINDUCTOR_COMPILE_THREADS:-1}" # a rank compiles a few small kernels; torch would start up to 32 processes for each
export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"                           # the reason of a failed link is printed, and nothing else
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-1}" # a rank whose peer is gone ends instead of waiting for ever
export TORCH_NCCL_DUMP_ON_TIMEOUT="${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}" # after a timeout it is known which rank did not come to which collective

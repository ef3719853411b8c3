#!/usr/bin/env bash
# Resolves requirements/*.in to the hashed lock files. Run it after editing an .in file, and look at the difference.
#
#   ./launch/lock.sh             keeps the versions that are locked already
#   ./launch/lock.sh --upgrade   takes the newest; any other option of `uv pip compile` works as well
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

[[ -x "$venv/bin/uv" ]] || fail "run ./launch/setup.sh first: it installs uv"
export_index_settings
backend=()
if [[ -z "${UV_FIND_LINKS:-}" ]]; then backend=(--torch-backend cpu); fi
cd "$root"
compile=("$venv/bin/uv" pip compile --quiet --python "$venv/bin/python" --generate-hashes --custom-compile-command ./launch/lock.sh)
"${compile[@]}" "$@" requirements/bootstrap.in --output-file requirements/bootstrap.lock
# torch is left out because setup.sh installs it beforehand.
"${compile[@]}" "${backend[@]}" "$@" --override requirements/overrides.txt --no-emit-package torch \
    requirements/cpu.in --output-file requirements/cpu.lock
# Without dependencies: only modules that need none of them are loaded (tests/oracles/published.py).
"${compile[@]}" "$@" --no-deps requirements/oracles.in --output-file requirements/oracles.lock
"${compile[@]}" "$@" --no-deps requirements/bench.in --output-file requirements/bench.lock
"${compile[@]}" "$@" requirements/docs.in --output-file requirements/docs.lock
# The GPU stack is for the Python and the platform of NVIDIA's container. vLLM is a lock of its own because it is built last.
for_container=(--python-version 3.12 --python-platform x86_64-manylinux_2_28)
"${compile[@]}" "$@" "${for_container[@]}" --override requirements/gpu-overrides.txt --no-emit-package vllm \
    requirements/gpu.in --output-file requirements/gpu.lock
grep -m 1 '^vllm==' requirements/gpu.in | "${compile[@]}" "$@" "${for_container[@]}" --no-deps - \
    --output-file requirements/vllm.lock
# The Megatron-core of the GPU stack for tests on the CPU stack (launch/setup.sh --with megatron-latest), and what it imports.
grep -m 1 '^megatron-core==' requirements/gpu.in | "${compile[@]}" "$@" --python-version 3.12 --no-deps - \
    --output-file requirements/megatron-latest.lock
"${compile[@]}" "$@" --no-deps requirements/triton.in --output-file requirements/triton.lock

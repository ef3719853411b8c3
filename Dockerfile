# syntax=docker/dockerfile:1
#
#   docker build -t rlhf-mcore .                        the GPU image (the last stage)
#   docker build -t rlhf-mcore:cpu --target cpu .       the CPU image, which continuous integration uses
#
# Both do what launch/setup.sh does and nothing else, so an image and a checkout cannot differ.

# Python of the lock files: 3.11 for the CPU stack; the PyTorch container has 3.12, torch 2.13, Transformer Engine and apex.
ARG CPU_BASE=python:3.11-slim-bookworm
ARG GPU_BASE=nvcr.io/nvidia/pytorch:26.07-py3

# ------------------------------------------------------------------------------------------------------------------ cpu
FROM ${CPU_BASE} AS cpu
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# vLLM compiles small kernels when it starts and allocates through tcmalloc; numactl tells it where memory lies.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git libnuma1 libtcmalloc-minimal4 numactl \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 10001 rlhf
WORKDIR /opt/rlhf_mcore
ENV RLHF_MCORE_STACK=cpu UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1
# What setup.sh reads comes first: a change of the code alone does not install everything again.
COPY setup.py pyproject.toml README.md ./
COPY rlhf_mcore/__init__.py rlhf_mcore/
COPY contrib/__init__.py contrib/
COPY requirements requirements
COPY launch launch
RUN ./launch/setup.sh
COPY . .
ENV PATH=/opt/rlhf_mcore/.venv/bin:$PATH
# A user that cannot change the code; runs are written to a volume.
RUN install --directory --owner rlhf /workspace
USER 10001
WORKDIR /workspace
VOLUME /workspace
HEALTHCHECK --interval=5m --timeout=30s --start-period=30s CMD ["rlhf-mcore", "doctor", "--quick", "--run-dir", "/workspace"]
CMD ["rlhf-mcore", "--help"]

# ------------------------------------------------------------------------------------------------------------------ gpu
FROM ${GPU_BASE} AS gpu
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
# The container's Python is Ubuntu's, which comes without venv and ensurepip; setup.sh makes a virtual environment over it. The others are
# for a vLLM that is built from source.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 10001 rlhf
WORKDIR /opt/rlhf_mcore
# Where vLLM's wheel does not load beside the container's torch, it is compiled for these devices (A100, H100 and H200, B200), by so many compilers at a time (each takes a few GB).
# The container sets TORCH_CUDA_ARCH_LIST itself, and such a variable wins over an ARG of its name.
ARG CUDA_ARCHITECTURES="8.0 9.0 10.0"
ARG MAX_JOBS=16
ENV RLHF_MCORE_STACK=gpu UV_NO_CACHE=1 PIP_NO_CACHE_DIR=1 TORCH_CUDA_ARCH_LIST="${CUDA_ARCHITECTURES}"
COPY setup.py pyproject.toml README.md ./
COPY rlhf_mcore/__init__.py rlhf_mcore/
COPY contrib/__init__.py contrib/
COPY requirements requirements
COPY launch launch
RUN ./launch/setup.sh
COPY . .
ENV PATH=/opt/rlhf_mcore/.venv/bin:$PATH
# Kernels that vLLM, DeepGEMM, FlashInfer and Triton compile are kept on a volume, so the next container need not compile them.
ENV VLLM_CACHE_ROOT=/cache/vllm FLASHINFER_WORKSPACE_BASE=/cache TRITON_CACHE_DIR=/cache/triton
RUN install --directory --owner rlhf /workspace /cache
USER 10001
WORKDIR /workspace
VOLUME /workspace
VOLUME /cache
HEALTHCHECK --interval=5m --timeout=30s --start-period=30s CMD ["rlhf-mcore", "doctor", "--quick", "--run-dir", "/workspace"]
CMD ["rlhf-mcore", "--help"]

#!/usr/bin/env bash
# Installs what is missing, makes a small model and its data, and trains it with GRPO on two processes of this machine.
# Where there are GPUs and a Python with the stack for them (the image of Dockerfile, or RLHF_MCORE_PYTHON), it trains on up to two of them.
#
#   ./launch/quickstart.sh                        about five minutes on two cores once installed
#   ./launch/quickstart.sh trainer.num_steps=5    further arguments override keys of configs/quickstart/grpo.yaml
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

python="$venv/bin/python"
train=("$venv/bin/rlhf-mcore" train)
fits=() # the configuration is for two processes, and each takes a GPU
devices=0
if has_gpu; then
    for candidate in "${RLHF_MCORE_PYTHON:-}" "$venv/bin/python" "$(command -v python3 || true)"; do
        if ((!devices)) && [[ -n "$candidate" ]]; then
            python="$candidate"
            devices="$(cuda_devices "$python")"
        fi
    done
fi
if ((devices)); then
    export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
    train=("$python" -m rlhf_mcore.cli.main train)
    if ((devices == 1)); then fits=(actor.layout.tp=1 trainer.world_size=1); fi
else
    if has_gpu; then
        say "this machine has a GPU, but no Python with torch for CUDA, Megatron-core and vLLM, so the quickstart runs on the CPU. To use the" \
            "GPU, run this script in the image of Dockerfile (docs/get-started/install.md#images), or set RLHF_MCORE_PYTHON=/path/to/such/a/python"
    fi
    python="$venv/bin/python"
    RLHF_MCORE_STACK="${RLHF_MCORE_STACK:-cpu}" "$root/launch/setup.sh"
fi
source "$root/launch/env.sh"
# In the image the code is not the user's: model, data and run directory are made in the working directory there.
config=configs/quickstart/grpo.yaml tool=tools/make_quickstart.py
if [[ -w "$root" ]]; then
    cd "$root"
elif [[ -w . ]]; then
    config="$root/$config" tool="$root/$tool"
else
    fail "neither $root nor $PWD can be written; change to a directory that can (in the image /workspace)"
fi

heading "quickstart: model and data"
if [[ -d quickstart ]]; then
    say "reusing quickstart/ (delete the folder to build it again)"
else
    # Made under another name and renamed, so that an interrupted run leaves nothing that looks finished.
    partial=outputs/quickstart.partial
    rm -rf "$partial"
    mkdir -p outputs
    "$python" "$tool" --out "$partial"
    mv "$partial" quickstart
fi

heading "quickstart: GRPO"
"${train[@]}" "$config" "${fits[@]}" "$@"
say "try next        .venv/bin/rlhf-mcore train configs/quickstart/grpo.yaml experiment=pipeline actor.layout.tp=1 actor.layout.pp=2"

#!/usr/bin/env bash
# Installs what is missing, makes a small model and its data, and trains it with GRPO on two processes of this machine.
#
#   ./launch/quickstart.sh                        about five minutes on two cores once installed
#   ./launch/quickstart.sh trainer.num_steps=5    further arguments override keys of configs/quickstart/grpo.yaml
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

"$root/launch/setup.sh"
source "$root/launch/env.sh"
cd "$root"

heading "quickstart: model and data"
if [[ -d quickstart ]]; then
    say "reusing quickstart/ (delete it to make it again)"
else
    # Made under another name and renamed, so that an interrupted run leaves nothing that looks finished.
    partial=outputs/quickstart.partial
    rm -rf "$partial"
    mkdir -p outputs
    "$venv/bin/python" tools/make_quickstart.py --out "$partial"
    mv "$partial" quickstart
fi

heading "quickstart: GRPO"
"$venv/bin/rlhf-mcore" train configs/quickstart/grpo.yaml "$@"
say "try next        .venv/bin/rlhf-mcore train configs/quickstart/grpo.yaml experiment=pipeline actor.layout.tp=1 actor.layout.pp=2"

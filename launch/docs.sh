#!/usr/bin/env bash
# Builds the documentation as a site, with mkdocs-material in a folder of its own. A link that leads nowhere is an error.
#
#   ./launch/docs.sh            builds outputs/site/index.html
#   ./launch/docs.sh serve      shows it on http://127.0.0.1:8000 and follows changes
#   ./launch/docs.sh install    installs what that needs, and stops
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

action="${1:-build}"
case "$action" in install | build | serve) ;; *) fail "docs.sh $action: it is build, serve or install" ;; esac
[[ -x "$venv/bin/uv" ]] || fail "there is no $venv/bin/uv; run ./launch/setup.sh first"
cd "$root"
if ! cmp --silent requirements/docs.lock "$venv/docs/docs.lock"; then
    heading "docs: mkdocs-material"
    export_index_settings
    rm -rf "$venv/docs"
    "$venv/bin/uv" pip install --quiet --python "$venv" --require-hashes --target "$venv/docs" -r requirements/docs.lock
    cp requirements/docs.lock "$venv/docs/docs.lock"
fi
if [[ "$action" == install ]]; then exit 0; fi
PYTHONPATH="$venv/docs" NO_MKDOCS_2_WARNING=1 "$venv/bin/python" -m mkdocs --quiet "$action" --strict
if [[ "$action" == build ]]; then say "outputs/site/index.html"; fi

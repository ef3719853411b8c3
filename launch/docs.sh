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
# Diagrams are drawn by Mermaid in the browser. The script is part of the site, so that nothing is asked of a network when it is read.
mermaid=11.17.2
script="$venv/docs/mermaid.min.js"
is_mermaid() { sha256sum --check --status <<<"581ed7d74bd9048d0e3a91363927d72ef22942d7722546b27f7cc29e35390eb8  $1"; }
if [[ ! -f "$script" ]] || ! is_mermaid "$script"; then
    folder="$(mktemp -d)"
    trap 'rm -rf "$folder"' EXIT
    if command -v npm >/dev/null && npm pack --silent --pack-destination "$folder" "mermaid@$mermaid" >/dev/null 2>&1; then
        tar -xzf "$folder/mermaid-$mermaid.tgz" -C "$folder" package/dist/mermaid.min.js
        is_mermaid "$folder/package/dist/mermaid.min.js" || fail "mermaid@$mermaid is not the file that launch/docs.sh knows"
        mv "$folder/package/dist/mermaid.min.js" "$script"
    else
        say "npm cannot get mermaid@$mermaid here: diagrams of the site will be their text"
    fi
fi
if [[ "$action" == install ]]; then exit 0; fi
PYTHONPATH="$venv/docs" NO_MKDOCS_2_WARNING=1 "$venv/bin/python" -m mkdocs --quiet "$action" --strict
if [[ "$action" == build ]]; then say "outputs/site/index.html"; fi

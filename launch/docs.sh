#!/usr/bin/env bash
# Builds the documentation as a site, with mkdocs-material in a folder of its own. A link that leads nowhere is an error.
#
#   ./launch/docs.sh            builds outputs/site/index.html
#   ./launch/docs.sh serve      serves the site on http://127.0.0.1:8000 and follows changes
#   ./launch/docs.sh install    installs only the tools for the site
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
# Scripts of the site itself, so that nothing is asked of a network when it is read: Mermaid draws diagrams in the browser, and
# iframe-worker lets the search work on pages that are opened from the disk.
from_npm() { # PACKAGE VERSION FILE SHA256 NAME WITHOUT: fetch a file of a package into $venv/docs
    local script="$venv/docs/$5" folder
    is_known() { sha256sum --check --status <<<"$1  $2"; }
    if [[ -f "$script" ]] && is_known "$4" "$script"; then return; fi
    folder="$(mktemp -d)"
    if command -v npm >/dev/null && npm pack --silent --pack-destination "$folder" "$1@$2" >/dev/null 2>&1; then
        tar -xzf "$folder/$1-$2.tgz" -C "$folder" "package/$3"
        is_known "$4" "$folder/package/$3" || fail "$1@$2: the downloaded file has another digest than in launch/docs.sh"
        mv "$folder/package/$3" "$script"
    else
        say "npm cannot download $1@$2: $6"
    fi
    rm -rf "$folder"
}
from_npm mermaid 11.17.2 dist/mermaid.min.js 581ed7d74bd9048d0e3a91363927d72ef22942d7722546b27f7cc29e35390eb8 mermaid.min.js \
    "diagrams of the site will be their text"
from_npm iframe-worker 1.0.4 shim/index.js e8e412dbcfea9b7e31b5ffa288d7b6035915e714c542f4176a0cdbe262fc9609 iframe-worker.js \
    "the search will need a server (launch/docs.sh serve)"
if [[ "$action" == install ]]; then exit 0; fi
PYTHONPATH="$venv/docs" NO_MKDOCS_2_WARNING=1 "$venv/bin/python" -m mkdocs --quiet "$action" --strict
if [[ "$action" == build ]]; then say "outputs/site/index.html"; fi

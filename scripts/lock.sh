#!/bin/sh
# Write requirements/serve.txt, dev.txt and optional.txt anew: sh scripts/lock.sh [--upgrade]
#
# They have the hashes of all files of each package, for every Python from 3.10 on and every system. pip installs a file
# without looking for further packages: a file has all that its packages need beyond the files before it. A release stays
# as it is unless --upgrade is given. pyproject.toml names what uv leaves out or replaces: torch is in torch.txt, and what
# it needs is here.
set -eu
cd "$(dirname "$0")/.."
python3 -m venv build/lock
build/lock/bin/python -m pip install --quiet uv==0.13.8
all=build/lock/all.txt
serve='filelock fsspec jinja2 networkx setuptools>=77 sympy typing-extensions'  # torch needs them
dev='--extra dev --extra documents --extra evaluate --extra codecs --extra valkey --extra embedders'
optional='--extra integrations --extra ray --extra cloud --extra moto'

compile() {  # 'PACKAGES BESIDE THOSE OF setup.cfg' OPTIONS...
    printf '%s\n' $1 > build/lock/more.in
    shift
    build/lock/bin/uv pip compile --quiet --universal --python-version 3.10 --generate-hashes --no-annotate --no-header \
        setup.cfg build/lock/more.in "$@"
}

further() {  # FILE... LAST: the requirements of LAST that no other file has for the same machines
    for last; do :; done
    awk -v last="$last" '/^[^ ]/ { known = $0 in seen; if (FILENAME != last) seen[$0] } FILENAME == last && !known' "$@"
}

# First the releases that fit each other, then the part of each file.
cat requirements/serve.txt requirements/dev.txt requirements/optional.txt > "$all"
compile "$serve llama-index-llms-openai-like" $dev $optional --output-file "$all" "$@"
compile "$serve" --constraint "$all" --output-file build/lock/serve.txt
compile '' --constraint "$all" $dev --output-file build/lock/dev.txt
compile llama-index-llms-openai-like --constraint "$all" $optional --output-file build/lock/optional.txt
cp build/lock/serve.txt requirements/serve.txt
further build/lock/serve.txt build/lock/dev.txt > requirements/dev.txt
further build/lock/serve.txt build/lock/dev.txt build/lock/optional.txt > requirements/optional.txt

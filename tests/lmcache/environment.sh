#!/usr/bin/env bash
# Makes the environment of the LMCache tests: LMCache on the CPU, in a virtual environment of its own beside the checkout.
#   tests/lmcache/environment.sh [DIRECTORY]    (default .venv-lmcache; 0.7 GB and a minute, more where torch is fetched)
# Exit code 3: this machine's package index has no torch for the CPU, or no LMCache, so that it cannot be had here.
# LMCache 0.5.6 goes into the environment, the candidate of 0.5.7 beside it. Torch is that of the vLLM tests where their
# environment (.venv-vllm) has been made. What is there already is kept.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
target=${1:-.venv-lmcache}
python=${PYTHON:-python3.11}
torch=2.13.0+cpu
stamp="$target/.made-$(cat tests/lmcache/environment.sh tests/lmcache/requirements.txt | sha256sum | cut -c1-12)"
[ -e "$stamp" ] && exit 0

command -v "$python" >/dev/null || { echo "error: the LMCache environment needs $python; name another: PYTHON=..." >&2; exit 1; }
echo "making $target: LMCache for the CPU"
"$python" -m venv --clear "$target"
pip=("$target/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --prefer-binary)
cannot() { cat "$target/pip.log" >&2; echo "error: $1" >&2; exit 3; }

site=$(echo "$target"/lib/python*/site-packages)
lender=$(echo "$PWD"/.venv-vllm/lib/python3.11/site-packages)
if [ -d "$lender/torch-$torch.dist-info" ] && [ "${python##*/}" = python3.11 ]; then
    for part in torch torchgen functorch "torch-$torch.dist-info"; do ln -s "$lender/$part" "$site/$part"; done
elif ! "${pip[@]}" --no-deps "torch==$torch" 2>"$target/pip.log"; then
    cannot "pip finds no torch==$torch; add PyTorch's index of CPU wheels (PIP_EXTRA_INDEX_URL)"
fi
"${pip[@]}" --no-deps -r tests/lmcache/requirements.txt
# Its own list of dependencies names CUDA packages, which the server does not need without a GPU.
"${pip[@]}" --no-deps "lmcache==0.5.6" 2>"$target/pip.log" || cannot "pip finds no lmcache==0.5.6"
"${pip[@]}" --no-deps --target "$target/lmcache-0.5.7" "lmcache==0.5.7rc2" 2>"$target/pip.log" ||
    cannot "pip finds no lmcache==0.5.7rc2"
"${pip[@]}" --no-deps -e .
# A server starts in half the time where modules are compiled; environments often forbid writing them at the import.
"$target/bin/python" -m compileall -q -j 0 "$site" "$target/lmcache-0.5.7" >/dev/null || true
touch "$stamp"

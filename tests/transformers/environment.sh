#!/usr/bin/env bash
# Makes the environment of the Transformers tests: Transformers over torch for the CPU.
#   tests/transformers/environment.sh [DIRECTORY]     (default .venv-transformers)
# Exit code 3: this machine's package index has no torch for the CPU. What is there already is kept.
# Where the engine environment is there, it has both, and nothing is downloaded; otherwise about 1.5 GB are.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
target=${1:-.venv-transformers}
base=.venv-vllm
python=${PYTHON:-python3.11}
stamp="$target/.made-$(cat tests/transformers/environment.sh | sha256sum | cut -c1-12)"
[ -e "$stamp" ] && "$target/bin/python" -c 'import torch, rewarm' 2>/dev/null && exit 0

echo "making $target: Transformers for the CPU"
if compgen -G "$base/.made-*" >/dev/null; then
    "$base/bin/python" -m venv --clear --without-pip "$target"
    site=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    packages="$(pwd)/$base/lib/$(basename "$(dirname "$site")")/site-packages"
    echo "import site; site.addsitedir('$packages')" >"$site/base.pth"
else
    command -v "$python" >/dev/null || { echo "error: it needs $python; name another: PYTHON=..." >&2; exit 1; }
    "$python" -m venv --clear "$target"
    pip=("$target/bin/python" -m pip install --quiet --disable-pip-version-check --prefer-binary)
    if ! "${pip[@]}" "torch==2.13.0+cpu" 2>"$target/torch.log"; then
        cat "$target/torch.log" >&2
        echo "error: pip finds no torch==2.13.0+cpu; add PyTorch's index of CPU wheels (PIP_EXTRA_INDEX_URL)" >&2
        exit 3
    fi
    "${pip[@]}" "transformers==5.19.0" -e '.[testing]'
fi
touch "$stamp"

#!/usr/bin/env bash
# Makes the environment of the peers: LMCache 0.5.6, NIXL 1.5.1 and vLLM's fs_io_C, on the CPU, beside the checkout.
#   benchmarks/peers/environment.sh [DIRECTORY]     (default .venv-peers; 0.3 GB, half a minute)
# torch and vLLM come from the engine environment: make engine-env first. Exit code 3: it is not there.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
target=${1:-.venv-peers}
python=${PYTHON:-python3.11}
stamp="$target/.made-$(sha256sum benchmarks/peers/environment.sh | cut -c1-12)"
[ -e "$stamp" ] && exit 0

engine=$(ls -d "$PWD"/.venv-vllm/lib/python*/site-packages 2>/dev/null) ||
    { echo "error: no engine environment, whose torch and vLLM the peers use: make engine-env first" >&2; exit 3; }
echo "making $target: LMCache and NIXL for the CPU"
"$python" -m venv --clear "$target"
pip=("$target/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --prefer-binary --no-deps)
# Without their lists of dependencies, which name CUDA, cloud and tracing packages that reading from a disk does not need.
"${pip[@]}" "lmcache==0.5.6" "lmcache_rust_raw_block_io==0.5.7rc2" "nixl-cu12==1.5.1"
"${pip[@]}" aiofile caio aiofiles "numpy<=2.2.6" xxhash "opentelemetry-api<=1.40.0" "opentelemetry-sdk<=1.40.0" \
    opentelemetry-semantic-conventions "opentelemetry-exporter-prometheus<=0.61b0" importlib-metadata zipp redis
# Everything else is there already. What lies in this environment comes first.
echo "$engine" >"$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/engine.pth"
touch "$stamp"

#!/usr/bin/env bash
# Makes the environment of the SGLang tests: SGLang's own package over torch for the CPU, without its GPU libraries.
#   tests/sglang/environment.sh [DIRECTORY]     (default .venv-sglang; about 250 MB over the engine environment)
# Exit code 3: this machine's package index has no torch for the CPU. What is there already is kept.
# The engine itself needs a GPU. Its storage interface, its factory and its host pools run here as they are.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
target=${1:-.venv-sglang}
base=.venv-vllm
stamp="$target/.made-$(cat tests/sglang/environment.sh tests/engine/environment.sh | sha256sum | cut -c1-12)"
[ -e "$stamp" ] && exit 0

tests/engine/environment.sh "$base"
echo "making $target: SGLang over $base, about a minute"
"$base/bin/python" -m venv --clear --without-pip "$target"
pip=("$base/bin/python" -m pip --python "$target/bin/python" install -qq --disable-pip-version-check --no-compile --no-deps)
site=$("$target/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
# torch, transformers and the rest come from the engine environment; so does Rewarm.
echo "import site; site.addsitedir('$(cd "$base" && pwd)/lib/$(basename "$(dirname "$site")")/site-packages')" >"$site/base.pth"
"${pip[@]}" "sglang==0.5.23" "orjson>=3.10" "IPython>=9" "traitlets>=5" "gguf>=0.17"
# It is imported at the top of a module and used for images only; the one on the index does not fit this torch.
mkdir -p "$site/torchvision"
cat >"$site/torchvision/__init__.py" <<'STUB'
"""Stands in for torchvision, which nothing of what is tested here uses."""
import importlib.machinery, sys, types


class _Any(type):
    def __getattr__(cls, name):
        return name


class _Nothing(types.ModuleType):
    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Any(name, (), {})


for _name in ("io", "ops", "transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional"):
    _module = _Nothing(f"torchvision.{_name}")
    _module.__spec__ = importlib.machinery.ModuleSpec(_module.__name__, None, is_package=True)
    sys.modules[_module.__name__] = _module
    if "." not in _name:
        globals()[_name] = _module
__version__ = "0.0.0"
STUB
"$target/bin/python" -m compileall -q -j 0 "$site/sglang/srt" >/dev/null || true
touch "$stamp"

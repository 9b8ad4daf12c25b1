"""The rules of the house, read from the syntax trees and the text of the repository.

Each rule is a function from source to a list of complaints. The repository must have none, and a small bad example
must have one, so that no rule can pass by not looking.
"""

from __future__ import annotations

import ast
import functools
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import rewarm

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "rewarm"

FUNCTION_LINES_MAX, MODULE_LINES_MAX, README_LINES_MAX = 60, 400, 150
PUBLIC_NAMES_MAX = 20

BASE = {"errors", "units"}
ALLOWED_IMPORTS: dict[str, set[str]] = {
    "errors": set(),
    "units": {"errors"},
    "geometry": BASE,
    "store": BASE,
    "tiers": BASE | {"store", "geometry"},
    "workload": BASE | {"geometry"},
    "connectors": BASE | {"geometry", "tiers", "store", "workload.recorder"},
    "bench": BASE | {"workload", "tiers", "store", "geometry"},
    "plan": BASE | {"workload", "geometry"},
    "report": BASE | {"bench.result", "plan.result"},
    "testing": BASE | {"store", "tiers"},
    "__init__": {"errors", "store.contract", "tiers.opening"},
    "__main__": {"cli"},
}
"""What each room may import from the others; an entry with a dot means that module only. cli may import anything."""

THIRD_PARTY_HOMES = {
    "click": "cli", "rich": "cli", "prometheus_client": "cli", "jinja2": "report",
    "pytest": "testing", "hypothesis": "testing", "httptools": "bench", "ray": "bench",
}  # fmt: skip
"""Packages that one room alone may import; every other one must be a plain dependency."""

BROAD_HANDLERS: dict[tuple[str, str], str] = {
    ("connectors/lmcache/waiting.py", "_run"): "LMCache's listeners run inside; every task waits for this thread",
    ("store/loop.py", "fulfil"): "another thread waits for the result, and gets the exception instead",
    ("store/loop.py", "_run"): "the end of a thread: a defect must give every caller a verdict, not a wait for ever",
    ("tiers/dispatcher.py", "_run"): "the end of a thread, as in the store's loops",
}
"""(path below src/rewarm, function) -> why this handler may catch everything."""


def room_of(path: str) -> str:
    """The room of a path below src/rewarm: `store/index.py` -> `store`, `units.py` -> `units`."""
    return path.split("/")[0].removesuffix(".py")


def imported_modules(tree: ast.Module, path: str) -> Iterator[tuple[int, str]]:
    """(line, dotted module) of every import, wherever it stands; `from m import n` gives `m.n`."""
    parts = ["rewarm", *path.removesuffix(".py").split("/")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parts[: -node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def import_complaints(tree: ast.Module, path: str) -> list[str]:
    """Imports of a module that the table of rooms does not allow."""
    room = room_of(path)
    if room == "cli":
        return []
    allowed = ALLOWED_IMPORTS[room] | {room}
    complaints = []
    for line, module in imported_modules(tree, path):
        first, _, inner = module.partition(".")
        if first != "rewarm" or any(f"{inner}.".startswith(f"{name}.") for name in allowed):
            continue
        complaints.append(f"{path}:{line} {room} may not import {module}")
    return complaints


def third_party_complaints(tree: ast.Module, path: str) -> list[str]:
    """Imports of packages that are no dependency, or that belong to another room."""
    core = {name.replace("-", "_") for name in dependency_names("core")}
    complaints = []
    for line, module in imported_modules(tree, path):
        first = module.partition(".")[0]
        if first == "rewarm" or first in sys.stdlib_module_names:
            continue
        home = THIRD_PARTY_HOMES.get(first)
        if home != room_of(path) if home else first not in core:
            complaints.append(f"{path}:{line} {room_of(path)} may not import {first}")
    return complaints


def size_complaints(source: str, tree: ast.Module, path: str) -> list[str]:
    """Functions and modules over the limits."""
    lines = len(source.splitlines())
    complaints = [f"{path}: {lines} lines, at most {MODULE_LINES_MAX}"] if lines > MODULE_LINES_MAX else []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES_MAX:
                complaints.append(f"{path}:{node.lineno} {node.name}: {length} lines, at most {FUNCTION_LINES_MAX}")
    return complaints


CLI_ONLY_CALLS = {"print", "input", "exit", "quit"}
CLI_ONLY_NAMES = {
    "os.environ",
    "os.environb",
    "os.getenv",
    "os.putenv",
    "sys.exit",
    "sys.argv",
    "sys.stdout",
    "sys.stderr",
}
CLI_ONLY_IMPORTS = {"argparse", "optparse", "getopt", *CLI_ONLY_NAMES}


def cli_only_complaints(tree: ast.Module, path: str) -> list[str]:
    """Printing, reading the environment or arguments, and exiting, anywhere but in cli."""
    if room_of(path) in ("cli", "__main__"):
        return []
    found = [(line, name) for line, name in imported_modules(tree, path) if _starts_with(name, CLI_ONLY_IMPORTS)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CLI_ONLY_CALLS:
            found.append((node.lineno, node.func.id))
        elif isinstance(node, ast.Attribute) and ast.unparse(node) in CLI_ONLY_NAMES:
            found.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.Name) and node.id == "SystemExit":
            found.append((node.lineno, node.id))
    return [f"{path}:{line} {name} belongs to cli" for line, name in found]


def _starts_with(name: str, modules: set[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def broad_handlers(tree: ast.Module, path: str) -> list[tuple[str, str]]:
    """(path, innermost function) of every handler that catches everything."""
    found: list[tuple[str, str]] = []

    def visit(node: ast.AST, function: str) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        if isinstance(node, ast.ExceptHandler):
            caught = (
                {"BaseException"}
                if node.type is None
                else {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)}
            )
            if caught & {"Exception", "BaseException"}:
                found.append((path, function))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(tree, "<module>")
    return found


def docstring_complaints(tree: ast.Module, path: str) -> list[str]:
    """Modules, public classes, functions and methods without a docstring. A file without code needs none, and a test
    of the kit has its promise in its name."""
    complaints = [f"{path}: the module has no docstring"] if tree.body and not ast.get_docstring(tree) else []

    def visit(owner: ast.Module | ast.ClassDef, prefix: str) -> None:
        for node in owner.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
                continue
            if not ast.get_docstring(node) and not _is_repeat(node) and not node.name.startswith("test_"):
                complaints.append(f"{path}:{node.lineno} {prefix}{node.name} has no docstring")
            if isinstance(node, ast.ClassDef):
                visit(node, f"{node.name}.")

    visit(tree, "")
    return complaints


def _is_repeat(node: ast.AST) -> bool:
    """Overloads and setters: the docstring stands at their first or last definition."""
    decorators = [ast.unparse(d) for d in getattr(node, "decorator_list", [])]
    return any(d.endswith(("overload", ".setter")) for d in decorators)


FORBIDDEN_TEXT = {  # written in pieces, so that this file does not hold what it forbids
    "a path of one machine": re.compile(r"(?<![\w.])/(?:wo" r"rk|opt/wh" r"eels|opt/py" r"pi)\b(?!-)"),
    "a folder outside the repository": re.compile(
        r"(?<![\w/-])shar" r"ed/(?:design|style|io|engines|planning|sharedfs|samples|traces|reference|hooks)\b"
    ),
    "the host of a package registry": re.compile(
        r"py" r"pi\.org|python" r"hosted\.org|npm" r"js\.org|deb\.deb" r"ian\.org"
    ),
}


def text_complaints(text: str, path: str) -> list[str]:
    """Text that means something on one machine only."""
    return [
        f"{path}:{number} names {what}: {match[0]}"
        for number, line in enumerate(text.splitlines(), start=1)
        for what, pattern in FORBIDDEN_TEXT.items()
        if (match := pattern.search(line))
    ]


def link_complaints(text: str, path: Path) -> list[str]:
    """Relative links of a Markdown file that lead nowhere."""
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    local = [target for target in targets if not re.match(r"[a-z]+:", target)]
    return [
        f"{path.name}: the link to {target} leads nowhere" for target in local if not (path.parent / target).exists()
    ]


@functools.cache
def dependency_names(group: str = "all") -> list[str]:
    """Names of the dependencies in pyproject.toml: `core`, or `all` with the extras and the build backend."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    requirements = list(project["project"]["dependencies"])
    if group == "all":
        requirements += [r for extra in project["project"]["optional-dependencies"].values() for r in extra]
        requirements += project["build-system"]["requires"]
    names = [re.split(r"[\s\[<>=!~;]", requirement)[0] for requirement in requirements]
    return sorted({name for name in names if name != "rewarm"})


def sources(*folders: str) -> list[Path]:
    """The Python files below folders of the repository."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def parsed(path: Path) -> ast.Module:
    """The syntax tree of a file, parsed once."""
    return ast.parse(path.read_text())


def package_complaints(rule: Callable[[ast.Module, str], list[str]]) -> list[str]:
    """What a rule says about the whole package."""
    paths = sources("src/rewarm")
    assert paths
    return [c for p in paths for c in rule(parsed(p), p.relative_to(PACKAGE).as_posix())]


def tracked_texts() -> Iterator[tuple[Path, str]]:
    """Every text file that git tracks."""
    command = ["git", "ls-files", "-z"]
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("no git, or not a checkout: which files belong to the repository is unknown")
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    for name in sorted(filter(None, listed.stdout.decode().split("\0"))):
        path = ROOT / name
        raw = path.read_bytes() if path.is_file() else b""
        if b"\0" not in raw[:4096]:
            yield path, raw.decode("utf-8", errors="replace")


@pytest.mark.parametrize(
    "rule",
    [import_complaints, third_party_complaints, cli_only_complaints, docstring_complaints],
    ids=lambda r: r.__name__,
)
def test_the_package_follows(rule: Callable[[ast.Module, str], list[str]]) -> None:
    assert package_complaints(rule) == []


def test_no_function_and_no_module_is_too_long() -> None:
    texts = [(p, p.read_text()) for p in sources("src", "tests", "benchmarks", "examples")]
    assert [c for p, t in texts for c in size_complaints(t, parsed(p), p.relative_to(ROOT).as_posix())] == []


def test_broad_handlers_are_those_of_the_list() -> None:
    found = [h for p in sources("src") for h in broad_handlers(parsed(p), p.relative_to(PACKAGE).as_posix())]
    assert sorted(found) == sorted(BROAD_HANDLERS)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= README_LINES_MAX


def test_at_most_twenty_public_names_and_all_of_them_exist() -> None:
    assert len(rewarm.__all__) <= PUBLIC_NAMES_MAX
    assert [name for name in rewarm.__all__ if not hasattr(rewarm, name)] == []
    assert set(dir(rewarm)) == set(rewarm.__all__)
    assert not hasattr(rewarm, "no_such_name")


def test_no_file_names_one_machine() -> None:
    assert [c for path, text in tracked_texts() for c in text_complaints(text, path.relative_to(ROOT).as_posix())] == []


def test_links_of_the_documents_lead_somewhere() -> None:
    assert [c for path, text in tracked_texts() if path.suffix == ".md" for c in link_complaints(text, path)] == []


def test_every_dependency_is_a_recorded_decision() -> None:
    decisions = "\n".join(path.read_text() for path in (ROOT / "docs" / "decisions").glob("0*.md"))
    assert [name for name in dependency_names() if f"`{name}`" not in decisions] == []


def test_markers_makefile_and_ci_name_the_same_suites() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    markers = [marker.split(":")[0] for marker in options["markers"]]
    makefile = re.search(r"^SUITES\s*:=(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    ci = re.search(r"^for suite in (.*); do$", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert makefile
    assert ci
    assert sorted(markers) == sorted(makefile[1].split()) == sorted(ci[1].split())
    assert all(f"not {marker}" in options["addopts"] for marker in markers)


LINE = "    x = 1\n"


@pytest.mark.parametrize(
    ("rule", "path", "bad", "good"),
    [
        (import_complaints, "store/a.py", "from rewarm.geometry import model", "from rewarm.store import segments"),
        (import_complaints, "store/a.py", "def f():\n    import rewarm.bench.job", "import rewarm.units"),
        (import_complaints, "store/a.py", "from rewarm import geometry", "from rewarm import errors"),
        (import_complaints, "store/a.py", "from ..geometry import model", "from .segments import Segment"),
        (import_complaints, "store/a.py", "import rewarm", "import os"),
        (
            import_complaints,
            "report/a.py",
            "from rewarm.bench.replay import run",
            "from rewarm.bench.result import Cell",
        ),
        (import_complaints, "units.py", "import rewarm.store", "from rewarm.errors import ConfigError"),
        (third_party_complaints, "store/a.py", "import click", "import numpy as np"),
        (third_party_complaints, "bench/a.py", "import requests", "import httptools"),
        (cli_only_complaints, "store/a.py", "print(1)", "log.print(1)"),
        (cli_only_complaints, "store/a.py", "import os\nos.environ['A']", "import os\nos.fsync(1)"),
        (cli_only_complaints, "store/a.py", "from os import getenv", "from os import fsync"),
        (cli_only_complaints, "store/a.py", "import sys\nsys.exit(1)", "import sys\nsys.byteorder"),
        (cli_only_complaints, "store/a.py", "raise SystemExit(2)", "raise ValueError(2)"),
        (cli_only_complaints, "store/a.py", "from argparse import ArgumentParser", "import ast"),
        (docstring_complaints, "a.py", "x = 1", '"""Says what."""\nx = 1'),
        (docstring_complaints, "a.py", '"""M."""\ndef f(): pass', '"""M."""\ndef _f(): pass'),
        (
            docstring_complaints,
            "a.py",
            '"""M."""\nclass C:\n    """C."""\n    def f(self): pass',
            '"""M."""\nclass _C: pass',
        ),
        (
            lambda t, p: [*map(str, broad_handlers(t, p))],
            "a.py",
            "try: pass\nexcept: pass",
            "try: pass\nexcept OSError: pass",
        ),
        (
            lambda t, p: [*map(str, broad_handlers(t, p))],
            "a.py",
            "try: pass\nexcept (OSError, Exception): pass",
            "try: pass\nfinally: pass",
        ),
    ],
)
def test_a_rule_sees_what_is_bad(rule: Callable[[ast.Module, str], list[str]], path: str, bad: str, good: str) -> None:
    assert len(rule(ast.parse(bad), path)) == 1
    assert rule(ast.parse(good), path) == []


@pytest.mark.parametrize(
    ("bad", "good"),
    [
        (f"def f():\n{FUNCTION_LINES_MAX * LINE}", f"def f():\n{(FUNCTION_LINES_MAX - 1) * LINE}"),
        ((MODULE_LINES_MAX + 1) * "x = 1\n", MODULE_LINES_MAX * "x = 1\n"),
    ],
)
def test_the_size_rule_sees_what_is_long(bad: str, good: str) -> None:
    assert len(size_complaints(bad, ast.parse(bad), "a.py")) == 1
    assert size_complaints(good, ast.parse(good), "a.py") == []


@pytest.mark.parametrize("pieces", [("see /wo", "rk/main"), ("shar", "ed/design.md"), ("https://py", "pi.org/simple")])
def test_the_text_rule_sees_one_machine(pieces: tuple[str, str]) -> None:
    assert len(text_complaints("fine\n" + "".join(pieces), "a.md")) == 1
    assert text_complaints("the network/work/load, a shared/ folder, /workload", "a.md") == []


def test_the_link_rule_sees_a_dead_link() -> None:
    assert len(link_complaints("[a](nowhere.md#x)", ROOT / "README.md")) == 1
    assert link_complaints("[a](LICENSE) [b](https://example.org/x)", ROOT / "README.md") == []

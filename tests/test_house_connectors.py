"""A rule of the house beside those of `test_house.py`: how small the translators for the other engines stay."""

from __future__ import annotations

import ast
import io
import tokenize

import pytest
from tests.test_house import sources

CONNECTOR_LINES_MAX = {
    "lmcache": 400,
    "sglang": 400,
    "transformers": 460,  # 400 is the aim, and is not reached: it may shrink only
}
"""Lines of code of a connector, as `code_lines` counts, without what `rewarm connect` prints and tries."""
CONNECT_MODULES = {"launch.py", "checks.py"}
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(source: str) -> int:
    """Lines that hold code: neither blank, nor only a comment, nor part of a docstring or of another bare string."""
    strings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - strings)


@pytest.mark.parametrize("name", CONNECTOR_LINES_MAX)
def test_a_connector_is_small(name: str) -> None:
    modules = [path for path in sources(f"src/rewarm/connectors/{name}") if path.name not in CONNECT_MODULES]
    assert modules
    assert sum(code_lines(path.read_text()) for path in modules) < CONNECTOR_LINES_MAX[name]


def test_code_lines_are_counted_without_comments_and_docstrings() -> None:
    source = '"""M.\n\nMore.\n"""\n\n# Why.\nx = (\n    1,  # one\n)\n"""What x is."""\ny = """a\nb"""\n'
    assert code_lines(source) == 5

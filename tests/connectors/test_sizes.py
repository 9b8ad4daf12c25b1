"""How much code an engine loads with a connector."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

import pytest

import rewarm

PACKAGE = Path(rewarm.__file__).parent
CONNECTOR_LINES_MAX = 400
"""Lines of code of what an engine loads: no blank lines, comments or docstrings, and not `rewarm connect`'s side."""
CONNECT_SIDE = ("launch.py", "checks.py")


def code_lines(source: str) -> int:
    """Lines with code on them: no blank lines, comments, or strings that stand alone."""
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type not in skipped]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


@pytest.mark.parametrize("engine", ["lmcache", "sglang", "transformers"])
def test_no_connector_is_too_long(engine: str) -> None:
    files = [file for file in (PACKAGE / "connectors" / engine).glob("*.py") if file.name not in CONNECT_SIDE]
    assert files
    assert sum(code_lines(file.read_text()) for file in files) < CONNECTOR_LINES_MAX


def test_code_is_counted_without_what_explains_it() -> None:
    assert code_lines('"""What.\n\nWhy.\n"""\n\nx = (  # one\n    1,\n)\n\n# two\n"""Of x."""\ny = """a\nb"""\n') == 5

"""Reads a report as a browser would find it: elements in order, with their attributes and text."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "link", "br", "img", "input", "hr"}


@dataclass
class Element:
    """An element of the page; `text` is its own and that of everything inside."""

    tag: str
    attributes: dict[str, str]
    text: str = ""
    inside: list[Element] = field(default_factory=list)

    def all(self, tag: str, **attributes: str) -> list[Element]:
        """Descendants of a tag with these attributes, in order."""
        found = []
        for element in self.inside:
            if element.tag == tag and all(element.attributes.get(k) == v for k, v in attributes.items()):
                found.append(element)
            found += element.all(tag, **attributes)
        return found

    def with_attribute(self, name: str) -> list[Element]:
        """Descendants that carry an attribute."""
        return [e for child in self.inside for e in [child] * (name in child.attributes) + child.with_attribute(name)]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Element("page", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].inside.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].inside.append(Element(tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        for element in self.open:
            element.text += data


def read_page(html: str) -> Element:
    """Parse a page. Every element must be closed in order."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    assert len(reader.open) == 1, f"not closed: {[element.tag for element in reader.open]}"
    return reader.open[0]


def script_json(page: Element, identity: str) -> Any:
    """The JSON inside a script element."""
    (script,) = page.all("script", id=identity)
    assert script.attributes["type"] == "application/json"
    return json.loads(script.text)


def resolve(sources: list[Any], pointer: str) -> Any:
    """What a pointer of the page (`document:/json/pointer`) stands for in the results."""
    document, _, path = pointer.partition(":")
    found = sources[int(document)]
    for step in path.split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        found = found[int(step)] if isinstance(found, list) else (found or {}).get(step)
    return found


UNITS = {
    "us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "B/s": 1, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9,
    "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40, "PiB": 2**50, "USD": 1, "×": 1, "%": 0.01,
    "MB": 1e6, "GB": 1e9, "TB": 1e12, "years": 1, "days": 86400, "": 1,
}  # fmt: skip


def check_text(text: str, value: Any) -> None:
    """A figure as it is written must be the value, as far as its digits go."""
    if value is None:
        assert text in ("–", "failed", "any"), text
    elif isinstance(value, bool):
        assert text in (("yes",) if value else ("no", "no, within noise")), text
    elif isinstance(value, (int, float)) and text != str(value):
        number = text.replace(",", "").replace("%", " %")
        digits, _, unit = number.partition(" ")
        shown, decimals = float(digits), len(digits.partition("e")[0].partition(".")[2])
        precision = 0.51 * 10.0**-decimals
        expected = value / UNITS[unit]
        assert math.isclose(shown, expected, rel_tol=5e-3, abs_tol=precision), f"{text!r} stands for {value}"
    elif isinstance(value, str):
        assert text in (value, value.replace("_", " ")), text

"""`rewarm erase URL --namespace N`: remove every block of one namespace, whoever wrote it. Asks first."""

from __future__ import annotations

import dataclasses
import difflib
import sys

import click
import msgspec

from rewarm.cli.output import Output, output_options
from rewarm.cli.parameters import STORE_URL
from rewarm.cli.pools import media_urls, open_pool, require_pool
from rewarm.cli.render import print_struct
from rewarm.errors import ConfigError
from rewarm.store.contract import resolve_namespace
from rewarm.store.inspection import NamespaceFacts, inspect_pool
from rewarm.store.opening import parse_url
from rewarm.store.raw.inspection import inspect_raw

DIGEST_PREFIX_MIN = 8
"""Fewer leading digits of a digest are too easily a slip of the pen."""


class Erased(msgspec.Struct, frozen=True):
    """What was removed: `blocks` were there before, bytes are those on disk."""

    namespace: str
    digest: str
    blocks: int
    freed_bytes: int


@dataclasses.dataclass(frozen=True)
class KnownNamespace:
    """A namespace that the pool holds, as `rewarm.open` takes it."""

    digest: bytes
    description: str

    def describe(self) -> str:
        """The readable copy that the pool keeps."""
        return self.description


@click.command()
@click.argument("url", type=STORE_URL)
@click.option("--namespace", required=True, metavar="N", help="Its name, or 8 or more digits of its digest.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@output_options
def command(output: Output, url: str, namespace: str, yes: bool) -> None:
    """Remove every block of one namespace from the pool at URL; `rewarm inspect` lists the namespaces."""
    require_pool(url)
    with output.progress("reading logs"):
        there = [one for medium in media_urls(url) for one in _namespaces(medium)]
        found = find_namespace(namespace, merged(there), url)
    if not yes:
        _ask(found, url)
    known = KnownNamespace(bytes.fromhex(found.digest), found.describe)
    with open_pool(url, namespace=known) as store, output.progress("erasing"):
        freed = store.erase()
    result = Erased(found.describe, found.digest, found.blocks, freed)
    output.answer(result, lambda console: print_struct(console, result))


def _namespaces(url: str) -> list[NamespaceFacts]:
    location = parse_url(url)
    if location.scheme != "block":
        return inspect_pool(url).namespaces
    return [NamespaceFacts(digest, "", 1, count) for digest, count in inspect_raw(location.path).namespaces.items()]


def merged(known: list[NamespaceFacts]) -> list[NamespaceFacts]:
    """One entry for each namespace of several drives."""
    found: dict[str, NamespaceFacts] = {}
    for one in known:
        before = found.get(one.digest)
        blocks, writers = (before.blocks, before.writers) if before else (0, 0)
        found[one.digest] = msgspec.structs.replace(one, blocks=one.blocks + blocks, writers=one.writers + writers)
    return list(found.values())


def find_namespace(text: str, known: list[NamespaceFacts], url: str) -> NamespaceFacts:
    """The namespace that a name or the beginning of a digest means. Raises `ConfigError`."""
    digest, _ = resolve_namespace(text)
    found = [one for one in known if text == one.describe or one.digest == digest.hex()]
    if not found and len(text) >= DIGEST_PREFIX_MIN:
        found = [one for one in known if one.digest.startswith(text.lower())]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(f"{text!r} means {len(found)} namespaces in {url}; give one's digest, see `rewarm inspect`")
    near = difflib.get_close_matches(text, [one.describe for one in known], n=1)
    names = ", ".join(repr(one.describe or one.digest) for one in known) or "it holds none"
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {names}"
    raise ConfigError(f"no namespace {text!r} in {url}; {hint}")


def _ask(found: NamespaceFacts, url: str) -> None:
    if not _interactive():
        raise ConfigError("erase asks before it removes anything, and nobody can answer here; add --yes")
    click.confirm(f"Remove {found.blocks:,} blocks of {found.describe!r} from {url}?", abort=True, err=True)


def _interactive() -> bool:
    return sys.stdin.isatty()

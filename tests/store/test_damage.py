"""Any byte of any file of a pool may change: never a wrong byte, never an exception, never more lost than was hit.

Hypothesis damages one or several places of a small pool. A block may miss only if its own bytes, or those of the frame
that names it, are not what they were; everything else must still be a hit, so a store that gave up would fail here.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.lengths import repeated
from tests.store.damaged_pool import Template, build, load, open_pool, save

from rewarm.errors import ConfigError
from rewarm.store.contract import Outcome
from rewarm.store.layout import PAGE

Damage = tuple[str, float, float, int, int]
"""(what, where, where else, how many bytes, which bit or byte); places are shares of the file."""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Template:
    return build(tmp_path_factory.mktemp("damage") / "pool")


@pytest.fixture
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rewarm-damage-") as folder:
        yield Path(folder)


fractions = st.floats(0, 1, exclude_max=True)
lengths = st.one_of(st.integers(1, 64), st.sampled_from([512, PAGE, 2 * PAGE, 50_000]))


@st.composite
def damages(draw: st.DrawFn) -> Damage:
    what = draw(st.sampled_from(["flip", "zero", "fill", "swap", "truncate", "append", "page", "copy"]))
    return what, draw(fractions), draw(fractions), draw(lengths), draw(st.integers(0, 255))


def apply(content: bytearray, damage: Damage) -> None:
    """Change `content` in place."""
    what, where, other, length, value = damage
    at, there = int(where * len(content)), int(other * len(content))
    if what == "flip":
        content[at] ^= 1 << value % 8
    elif what == "zero":
        content[at : at + length] = bytes(len(content[at : at + length]))
    elif what == "fill":
        content[at : at + length] = bytes([value]) * len(content[at : at + length])
    elif what == "swap":
        _swap(content, at, there, length)
    elif what == "truncate":
        del content[at:]
    elif what == "append":
        content += bytes([value]) * length
    elif what == "page":
        _swap(content, at // PAGE * PAGE, there // PAGE * PAGE, PAGE)
    else:
        piece = content[there : there + length]
        content[at : at + len(piece)] = piece[: len(content) - at]


def _swap(content: bytearray, at: int, there: int, length: int) -> None:
    length = min(length, len(content) - at, len(content) - there)
    content[at : at + length], content[there : there + length] = (
        content[there : there + length],
        content[at : at + length],
    )


def damage_files(template: Template, root: Path, suffix: str, pick: int, many: list[Damage]) -> set[bytes]:
    """Damage one file of a copied pool; returns the keys that may be lost."""
    names = sorted(name for name in template.files if name.endswith(suffix))
    name = names[pick % len(names)]
    before = (template.root / name).read_bytes()
    content = bytearray(before)
    for damage in many:
        if content:
            apply(content, damage)
    (root / name).write_bytes(content)
    return template.files[name].lost(before, bytes(content))


def hold_to_the_promise(template: Template, root: Path, may_miss: set[bytes]) -> None:
    """Only what was hit may miss; saving again repairs it, for good."""
    with open_pool(root) as store:
        store.lookup(template.keys)
        missed = load(store, template.keys)
        assert missed <= may_miss, f"{len(missed - may_miss)} blocks were lost beside the damage"
        assert not (missed & {key for key in template.keys if key in store}), "a damaged copy is still offered"
        outcomes = save(store, template.keys)
        assert outcomes.count(Outcome.STORED) == len(missed)
        assert load(store, template.keys) == set()
    with open_pool(root) as store:
        assert store.lookup(template.keys).leading == len(template.keys)
        assert load(store, template.keys) == set(), "the damage came back after a restart"


QUICK = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
LONG = settings(max_examples=repeated(100, 300), suppress_health_check=[HealthCheck.function_scoped_fixture])
"""The long form runs with the crash suite."""


def _one_example(template: Template, suffix: str, pick: int, many: list[Damage]) -> None:
    with tempfile.TemporaryDirectory(prefix="rewarm-damage-") as folder:
        root = template.copy_to(Path(folder) / "pool")
        hold_to_the_promise(template, root, damage_files(template, root, suffix, pick, many))


picks = st.integers(0, 63)
several = st.lists(damages(), min_size=1, max_size=3)


@QUICK
@given(pick=picks, many=several)
@example(pick=0, many=[("zero", 0.0, 0.0, PAGE, 0)])
@example(pick=0, many=[("truncate", 0.0, 0.0, 1, 0)])
def test_damage_to_a_segment_costs_its_blocks(template: Template, pick: int, many: list[Damage]) -> None:
    _one_example(template, ".seg", pick, many)


@QUICK
@given(pick=picks, many=several)
@example(pick=0, many=[("zero", 0.0, 0.0, PAGE, 0)])
@example(pick=0, many=[("truncate", 0.0, 0.0, 1, 0)])
def test_damage_to_a_log_costs_its_frames(template: Template, pick: int, many: list[Damage]) -> None:
    _one_example(template, ".log", pick, many)


@pytest.mark.crash
@LONG
@given(suffix=st.sampled_from([".seg", ".log"]), pick=picks, many=several)
def test_damage_at_length(template: Template, suffix: str, pick: int, many: list[Damage]) -> None:
    _one_example(template, suffix, pick, many)


@pytest.mark.parametrize("suffix", [".seg", ".log"])
def test_a_file_that_is_gone_costs_its_blocks(template: Template, scratch: Path, suffix: str) -> None:
    for index, name in enumerate(sorted(name for name in template.files if name.endswith(suffix))):
        root = template.copy_to(scratch / str(index))
        (root / name).unlink()
        hold_to_the_promise(template, root, {key for _, _, keys in template.files[name].spans for key in keys})


def test_files_in_each_others_place(template: Template, scratch: Path) -> None:
    segments = sorted(name for name in template.files if name.endswith(".seg"))
    root = template.copy_to(scratch / "pool")
    first, second = (root / segments[0]), (root / segments[-1])
    one, other = first.read_bytes(), second.read_bytes()
    first.write_bytes(other)
    second.write_bytes(one)
    may_miss = template.files[segments[0]].lost(one, other) | template.files[segments[-1]].lost(other, one)
    hold_to_the_promise(template, root, may_miss)


def test_a_writer_that_is_gone_costs_its_blocks(template: Template, scratch: Path) -> None:
    root = template.copy_to(scratch / "pool")
    log = next(name for name in template.files if name.endswith(".log"))
    shutil.rmtree(root / Path(log).parent)
    hold_to_the_promise(template, root, {key for _, _, keys in template.files[log].spans for key in keys})


@QUICK
@given(pick=picks, many=several)
def test_the_readable_copy_of_a_namespace_is_worth_nothing(template: Template, pick: int, many: list[Damage]) -> None:
    folder = "namespaces"
    assert any(name.startswith(folder) for name in template.files)
    with tempfile.TemporaryDirectory(prefix="rewarm-damage-") as scratch:
        root = template.copy_to(Path(scratch) / "pool")
        for name in [name for name in template.files if name.startswith(folder)]:
            content = bytearray((root / name).read_bytes())
            for damage in many:
                if content:
                    apply(content, damage)
            (root / name).write_bytes(content)
        hold_to_the_promise(template, root, set())


@settings(QUICK, max_examples=30)
@given(many=several)
@example(many=[("truncate", 0.0, 0.0, 1, 0)])
@example(many=[("zero", 0.0, 0.0, 50_000, 0)])
def test_a_damaged_pool_file_is_a_clear_error_or_harmless(template: Template, many: list[Damage]) -> None:
    with tempfile.TemporaryDirectory(prefix="rewarm-damage-") as scratch:
        root = template.copy_to(Path(scratch) / "pool")
        path = root / "pool.json"
        content = bytearray(path.read_bytes())
        for damage in many:
            if content:
                apply(content, damage)
        path.write_bytes(content)
        refusal = ""
        try:
            with open_pool(root) as store:
                assert load(store, template.keys) == set()
        except ConfigError as error:
            refusal = str(error)
        assert not refusal or "pool.json" in refusal
        assert not refusal or path.read_bytes() == content, "a refused pool is left as it is"


def test_damage_is_found_and_repaired_by_check(template: Template, scratch: Path) -> None:
    for suffix in (".seg", ".log"):
        root = template.copy_to(scratch / f"pool{suffix}")
        may_miss = damage_files(template, root, suffix, 0, [("fill", 0.3, 0.0, 6_000, 255)])
        assert may_miss
        with open_pool(root) as store:
            report = store.check()
            assert not report.clean
            assert report.findings
            assert all(finding.where and finding.what and not finding.fixed for finding in report.findings)
            fixed = store.check(fix=True)
            assert all(finding.fixed for finding in fixed.findings), fixed.findings
            assert store.check().clean
            assert load(store, template.keys) <= may_miss
        with open_pool(root) as store:
            assert store.check().clean

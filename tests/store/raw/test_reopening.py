"""A device that goes and comes back is used again by the same handles, without a restart; another one is left alone."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.store.raw.devices import loop_over, make_file, open_as

from rewarm.store.contract import Outcome
from rewarm.store.raw.formatting import format_device
from rewarm.store.raw.store import RawStore
from rewarm.testing.kit.base import load, save
from rewarm.testing.payload import make_keys

BLOCK = 16 << 10
CAPACITY = 4 << 20
BOUND_S = 20.0


@pytest.fixture
def device(tmp_path: Path) -> Path:
    return make_file(tmp_path / "device", CAPACITY, "a")


def until(condition: Callable[[], object], what: str) -> None:
    """Polls the product, which polls its device: there is nothing to wait on."""
    end_s = time.monotonic() + BOUND_S
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.01)


def take_away(device: Path) -> Path:
    """What a removed controller does to a device file: what is open answers nothing, the name is gone."""
    kept = shutil.copyfile(device, device.with_name("kept"))
    os.truncate(device, 0)
    device.unlink()
    return kept


def notes(store: RawStore) -> str:
    return "; ".join(store.stats().notes)


def test_owner_and_reader_go_on_when_the_device_is_back(device: Path) -> None:
    keys = make_keys(40)
    with open_as(device, "a") as owner, open_as(device, "b") as reader:
        assert save(owner, keys[:20], BLOCK) == [Outcome.STORED] * 20
        reader.refresh()
        former = owner.owner
        kept = take_away(device)
        for store in (owner, reader):
            until(lambda store=store: "could not be read" in notes(store), "it is noticed")
            assert Outcome.HIT not in load(store, keys[:20], BLOCK)
            until(lambda store=store: "does not exist" in notes(store), "it is looked for")
        assert Outcome.STORED not in save(owner, keys[20:25], BLOCK)
        kept.rename(device)
        for store in (owner, reader):
            until(lambda store=store: load(store, keys[:20], BLOCK) == [Outcome.HIT] * 20, "all blocks are back")
        until(lambda: owner.owner is not former and not owner.read_only, "it owns anew")
        assert save(owner, keys[25:], BLOCK) == [Outcome.STORED] * 15
        reader.refresh()
        assert load(reader, keys[25:], BLOCK) == [Outcome.HIT] * 15
        assert not notes(owner)
        assert reader.read_only


def test_two_handles_of_one_process_share_the_owner_anew(device: Path) -> None:
    with open_as(device, "a") as one, open_as(device, "a") as other:
        former = one.owner
        take_away(device).rename(device)
        until(lambda: one.owner is not former and one.owner is other.owner, "both have the same new owner")
        for store, key in zip((one, other), make_keys(2), strict=True):
            until(lambda store=store: not store.read_only, "it owns")
            assert save(store, [key], BLOCK) == [Outcome.STORED]
        assert one.owner is other.owner
        assert not one.owner.lost if one.owner else False


def test_another_pool_and_an_older_state_are_left_alone(device: Path) -> None:
    keys = make_keys(80)
    older = shutil.copyfile(device, device.with_name("older"))
    with open_as(device, "a") as owner, open_as(device, "b") as reader:
        for key in keys:  # 80 frames of a page do not fit into one half of the log
            assert save(owner, [key], 4096) == [Outcome.STORED]
        reader.refresh()
        kept = take_away(device)
        other = make_file(device.with_name("other"), CAPACITY, "a")
        before = other.read_bytes()
        assert owner.owner is not None
        owner.owner.lost = True  # It would be in half a lease, and then would want to own what is there.
        for wrong, said in ((other, "another pool now"), (older, "an older state of this pool now")):
            wrong.rename(device)
            until(lambda said=said: said in notes(reader) and said in notes(owner), said)
            assert Outcome.HIT not in load(reader, keys[:4], 4096)
            assert Outcome.STORED not in save(owner, make_keys(1, said), 4096)
            if wrong is other:
                assert device.read_bytes() == before, "nothing was written to it"
        kept.rename(device)
        for store in (owner, reader):
            until(lambda store=store: load(store, keys, 4096) == [Outcome.HIT] * 80, "the right one is taken")


def test_a_handle_whose_device_is_gone_closes(device: Path) -> None:
    with open_as(device, "a") as owner:
        take_away(device)
        until(lambda: "does not exist" in notes(owner), "it is looked for")
        began_s = time.monotonic()
    assert time.monotonic() - began_s < BOUND_S


def test_a_link_that_leads_to_another_device_file_is_followed(tmp_path: Path, device: Path) -> None:
    link = tmp_path / "by-id"
    link.symlink_to(device)
    keys = make_keys(10)
    with open_as(link, "a") as owner:
        assert save(owner, keys, BLOCK) == [Outcome.STORED] * 10
        kept = take_away(device)
        link.unlink()
        link.symlink_to(kept)
        until(lambda: load(owner, keys, BLOCK) == [Outcome.HIT] * 10, "all blocks are back")


@pytest.mark.crash
def test_a_loop_device_goes_and_another_comes(tmp_path: Path) -> None:
    backing, link, keys = tmp_path / "backing", tmp_path / "by-id", make_keys(40)
    with backing.open("wb") as file:
        file.truncate(8 << 20)
    with loop_over(backing) as first:
        format_device(str(first), host="a")
        link.symlink_to(first)
        with open_as(link, "a") as owner, open_as(link, "b") as reader:
            assert save(owner, keys[:20], BLOCK) == [Outcome.STORED] * 20
            owner.flush()
            reader.refresh()
            # A loop device in use cannot be detached: it loses all its bytes instead.
            kept = shutil.copyfile(backing, tmp_path / "kept")
            os.truncate(backing, 0)
            subprocess.run(["losetup", "--set-capacity", str(first)], timeout=30, check=True)
            until(lambda: "holds no raw pool now" in notes(reader), "it is gone")
            assert Outcome.HIT not in load(reader, keys[:20], BLOCK)
            with loop_over(kept) as second:
                link.unlink()
                link.symlink_to(second)
                for store in (owner, reader):
                    until(lambda store=store: load(store, keys[:20], BLOCK) == [Outcome.HIT] * 20, "all are back")
                until(lambda: not owner.read_only, "it owns anew")
                assert save(owner, keys[20:], BLOCK) == [Outcome.STORED] * 20
                reader.refresh()
                assert load(reader, keys[20:], BLOCK) == [Outcome.HIT] * 20
                for store in (owner, reader):
                    store.close()

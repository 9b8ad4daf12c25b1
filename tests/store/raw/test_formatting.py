"""`format` refuses whatever may hold something, and says what; geometry and header pages hold what the page says."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from tests.store.raw.devices import make_file, open_as

from rewarm.errors import ConfigError, FormatError, PoolInUse
from rewarm.store.layout import PAGE
from rewarm.store.opening import open_store
from rewarm.store.raw.formatting import SIGNATURES, format_device
from rewarm.store.raw.header import HEADER_OFFSETS, decode_header, encode_header, newest, plan_header

SIZE = 16 << 20


def blank(path: Path, size: int = SIZE) -> Path:
    with path.open("wb") as file:
        file.truncate(size)
    return path


@pytest.mark.parametrize(("at", "magic", "name"), SIGNATURES, ids=[f"{name} {at}" for at, _, name in SIGNATURES])
def test_what_carries_something_is_refused(tmp_path: Path, at: int, magic: bytes, name: str) -> None:
    device = blank(tmp_path / "device")
    with device.open("r+b") as file:
        file.seek(at)
        file.write(magic)
    before = device.read_bytes()
    with pytest.raises(FormatError, match="holds"):
        format_device(str(device))
    assert device.read_bytes() == before, "a refused format changes nothing"
    assert format_device(str(device), force=True).slots >= 4


def test_a_raw_pool_is_refused_and_forced(tmp_path: Path) -> None:
    device = blank(tmp_path / "device")
    first = format_device(str(device))
    with pytest.raises(FormatError, match=f"raw pool .{first.pool_id}"):
        format_device(str(device))
    assert format_device(str(device), force=True).pool_id != first.pool_id


@pytest.mark.parametrize("other", ["a", "b"])
def test_a_living_owner_is_refused_even_with_force(tmp_path: Path, other: str) -> None:
    device = make_file(tmp_path / "device", 4 << 20, "a")
    with open_as(device, "a"), pytest.raises(PoolInUse, match="a owns now"):
        format_device(str(device), force=True, host=other)


def test_only_format_makes_a_pool(tmp_path: Path) -> None:
    device = blank(tmp_path / "device")
    with pytest.raises(ConfigError, match="rewarm format"):
        open_store(f"block://{device}")
    assert not any(device.read_bytes())
    with pytest.raises(ConfigError, match="does not exist"):
        format_device(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="neither a block device"):
        format_device(str(tmp_path))
    with pytest.raises(ConfigError, match="too few"):
        format_device(str(blank(tmp_path / "small", 1 << 20)))


def test_a_torn_header_leaves_the_other_copy(tmp_path: Path) -> None:
    header = plan_header(SIZE, bytes(range(16)), "home")
    later = msgspec.structs.replace(header, counter=1)
    pages = bytearray(encode_header(header) + encode_header(later))
    assert newest(pages) == later
    assert decode_header(pages[:PAGE]) == header
    pages[HEADER_OFFSETS[1] + 100] ^= 1
    assert newest(pages) == header
    pages[100] ^= 1
    assert newest(pages) is None


def test_a_shrunken_device_is_refused(tmp_path: Path) -> None:
    device = make_file(tmp_path / "device", 4 << 20)
    with device.open("r+b") as file:
        file.truncate(4 << 20)
    with pytest.raises(FormatError, match="was made with"):
        open_store(f"block://{device}")

"""Sizes, rates and durations: what is read, what is refused, and what the refusal says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewarm.errors import ConfigError
from rewarm.units import (
    format_duration,
    format_rate,
    format_size,
    parse_duration,
    parse_rate,
    parse_size,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        (4096, 4096),
        ("2TiB", 2 * 1024**4),
        ("500GB", 500 * 1000**3),
        (" 1.5 KiB ", 1536),
        ("1e3kB", 10**6),
        ("9007199254740993", 9007199254740993),  # not a float
        ("0.1GB", 10**8),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "rate"), [("6.9GB/s", 6.9e9), ("100Gb/s", 12.5e9), ("1GiB/s", 2.0**30), ("10.5GB", 10.5e9), (5.0, 5.0)]
)
def test_rates(text: str | float, rate: float) -> None:
    assert parse_rate(text) == pytest.approx(rate)


@pytest.mark.parametrize(
    ("text", "seconds"), [("1.5s", 1.5), ("50ms", 0.05), ("2h", 7200), ("3", 3), ("10us", 1e-5), ("5min", 300), (2, 2)]
)
def test_durations(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("parse", "text", "says"),
    [
        (parse_size, "", "for example '2TiB'"),
        (parse_size, "-1GB", "cannot read '-1GB' as a size"),
        (parse_size, -1, "not negative"),
        (parse_size, "2tib", "did you mean 'TiB'?"),
        (parse_size, "2 parsecs", "one of B, KiB"),
        (parse_size, "1.5", "whole number of bytes"),
        (parse_size, "5GB/s", "is a rate"),
        (parse_size, "9EBB", "unknown unit"),
        (parse_size, "1e99", "larger than any file"),
        (parse_size, "8EiB", "larger than any file"),
        (parse_size, "1e999999999", "cannot read"),
        (parse_rate, "fast", "for example '6.9GB/s'"),
        (parse_rate, float("nan"), "finite"),
        (parse_rate, "3 miles/s", "unknown unit 'miles'"),
        (parse_duration, "1s/s", "is a rate"),
        (parse_duration, "-1s", "cannot read"),
        (parse_duration, float("inf"), "finite"),
        (parse_duration, "1 MS", "did you mean 'ms'?"),
    ],
)
def test_what_is_refused_says_what_would_be_right(parse: Callable[[object], float], text: object, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert says in str(caught.value)


@given(st.text(max_size=20))
def test_any_text_is_a_number_or_a_config_error(text: str) -> None:
    for parse in (parse_size, parse_rate, parse_duration):
        with contextlib.suppress(ConfigError):
            assert parse(text) >= 0


@given(st.integers(min_value=0, max_value=2**63 - 1))
def test_a_size_in_bytes_is_kept_exactly(size: int) -> None:
    assert parse_size(str(size)) == parse_size(f"{size}B") == size


def test_formats() -> None:
    assert [format_size(n) for n in (0, 1023, 1536, 2**40, 3 * 2**60)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "1.0 TiB",
        "3072.0 PiB",
    ]
    assert [format_rate(r) for r in (12, 4.2e3, 6.94e6, 6.94e9)] == ["12 B/s", "4.20 kB/s", "6.94 MB/s", "6.94 GB/s"]
    assert [format_duration(s) for s in (12e-6, 0.0123, 1.5, 300, 9000)] == [
        "12 us",
        "12.3 ms",
        "1.50 s",
        "5.0 min",
        "2.5 h",
    ]

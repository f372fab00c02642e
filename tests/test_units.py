"""Quantities as people write them: read, written, and read back."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from archsearch import units


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("64", 64),
        ("180k", 180_000),
        ("180K", 180_000),
        ("1.5M", 1_500_000),
        ("2 M", 2_000_000),
        ("7B", 7_000_000_000),
        ("4Ki", 4096),
        (" 3 ", 3),
    ],
)
def test_counts_are_read(text: str, value: int) -> None:
    assert units.parse_count(text) == value


@pytest.mark.parametrize(
    ("text", "value"),
    [("512KiB", 524_288), ("1MB", 1_000_000), ("2GiB", 2**31), ("4096", 4096), ("0.3KiB", 307)],
)
def test_bytes_are_read(text: str, value: int) -> None:
    assert units.parse_bytes(text) == value


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30m", 1800.0),
        ("1h30m", 5400.0),
        ("90s", 90.0),
        ("1h 30m", 5400.0),
        ("1.5h", 5400.0),
        ("500ms", 0.5),
        ("2d", 172_800.0),
        ("1m500ms", 60.5),
    ],
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("parse", "text", "said"),
    [
        (units.parse_count, "2x", "unknown unit 'x'"),
        (units.parse_count, "2m", "did you mean 'M'?"),
        (units.parse_count, "0.5", "not a whole number"),
        (units.parse_count, "-3", "not a quantity"),
        (units.parse_count, "", "not a quantity"),
        (units.parse_count, "1e999999999", "not a quantity"),
        (units.parse_bytes, "512K", "512KiB"),
        (units.parse_bytes, "512kib", "did you mean 'KiB'?"),
        (units.parse_bytes, "0.5", "0.5, which is not a whole number"),
        (units.parse_duration, "30", "written like 90s"),
        (units.parse_duration, "30x", "unknown unit 'x'"),
        (units.parse_duration, "30m1h", "out of order"),
        (units.parse_duration, "1h1h", "out of order"),
        (units.parse_duration, "0s", "no time at all"),
        (units.parse_duration, "-5m", "not a duration"),
    ],
)
def test_what_cannot_be_read_says_how_to_write_it(parse, text: str, said: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        parse(text)
    assert f"'{text}'" in str(caught.value)
    assert "written like" in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (units.format_count(180_000), "180k"),
        (units.format_count(999), "999"),
        (units.format_count(999_999), "1M"),
        (units.format_count(1_234_567), "1.23M"),
        (units.format_bytes(524_288), "512KiB"),
        (units.format_bytes(1023), "1023B"),
        (units.format_duration(5400), "1h30m"),
        (units.format_duration(90), "1m30s"),
        (units.format_duration(59.96), "1m"),
        (units.format_duration(0.5), "500ms"),
        (units.format_duration(90_061), "1d1h"),
    ],
)
def test_quantities_are_written_shortly(text: str, said: str) -> None:
    assert text == said


# Three significant digits: the last kept digit is off by at most half of 1 in 100.
ROUNDING = 0.005


@given(st.integers(0, 10**20))
def test_written_counts_and_bytes_read_back(value: int) -> None:
    for write, parse in (
        (units.format_count, units.parse_count),
        (units.format_bytes, units.parse_bytes),
    ):
        assert abs(parse(write(value)) - value) <= ROUNDING * value


@given(st.floats(0.001, 10**9))
def test_written_durations_read_back(seconds: float) -> None:
    back = units.parse_duration(units.format_duration(seconds))
    # Two units are kept, so at worst half an hour of a day is rounded away.
    assert abs(back - seconds) <= 0.021 * seconds


@given(st.text(max_size=12))
def test_any_text_is_read_or_refused_with_a_value_error(text: str) -> None:
    for parse, pattern in (
        (units.parse_count, units.COUNT_PATTERN),
        (units.parse_bytes, units.BYTES_PATTERN),
        (units.parse_duration, units.DURATION_PATTERN),
    ):
        try:
            parse(text)
        except ValueError:
            continue
        assert re.search(pattern, text.strip()), "the schema's pattern is narrower than the reader"

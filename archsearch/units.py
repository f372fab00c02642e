"""Quantities as people write them: counts (`2M`), bytes (`512KiB`), durations (`1h30m`).

Reads and writes text, nothing else; knows nothing of studies. Every `parse_*` raises ValueError
with a sentence that names what was found and how to write it. `format_*` keeps three significant
digits, and what it writes can be read back.
"""

import re
from fractions import Fraction

_COUNT_UNITS = {
    "": 1,
    "k": 10**3,
    "K": 10**3,
    "M": 10**6,
    "G": 10**9,
    "B": 10**9,
    "T": 10**12,
    "Ki": 2**10,
    "Mi": 2**20,
    "Gi": 2**30,
    "Ti": 2**40,
}
_BYTE_UNITS = {
    "": 1,
    "B": 1,
    "kB": 10**3,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SECOND_UNITS = {
    "d": Fraction(86400),
    "h": Fraction(3600),
    "m": Fraction(60),
    "s": Fraction(1),
    "ms": Fraction(1, 1000),
}

_NUMBER = r"[0-9]{1,18}(?:\.[0-9]{1,18})?"
_QUANTITY = re.compile(rf"({_NUMBER})\s*([A-Za-z]*)")
_DURATION = re.compile(rf"(?:{_NUMBER}\s*[A-Za-z]+\s*)+")
_DURATION_PART = re.compile(rf"({_NUMBER})\s*([A-Za-z]+)")

COUNT_PATTERN = r"^[0-9]+(\.[0-9]+)?\s*([kKMGBT]|[KMGT]i)?$"
BYTES_PATTERN = r"^[0-9]+(\.[0-9]+)?\s*(B|[kKMGT]B|[KMGT]iB)?$"
DURATION_PATTERN = r"^([0-9]+(\.[0-9]+)?\s*(d|h|ms|m|s)\s*)+$"
"""Regular expressions of what the three `parse_*` accept, for a JSON Schema."""


def parse_count(text: str) -> int:
    """Read a count such as `64`, `180k`, `2M` or `4Ki` (k = 1000, Ki = 1024)."""
    how = "a count is written like 64, 180k or 2M"
    return _whole(text, _parse(text, _COUNT_UNITS, how), how)


def parse_bytes(text: str) -> int:
    """Read a number of bytes such as `4096`, `512KiB`, `1MB` or `2GiB`; rounded to whole bytes."""
    how = "bytes are written like 4096, 512KiB, 1MB or 2GiB"
    value = _parse(text, _BYTE_UNITS, how)
    return _whole(text, value, how) if value < 1 else round(value)


def parse_duration(text: str) -> float:
    """Read a duration such as `90s`, `30m`, `1h30m` or `500ms`; return seconds, more than 0."""
    how = "a duration is written like 90s, 30m, 1h30m or 2d"
    if _DURATION.fullmatch(text.strip()) is None:
        raise ValueError(f"'{text}' is not a duration; {how}")
    total, units = Fraction(0), list(_SECOND_UNITS)
    for number, unit in _DURATION_PART.findall(text):
        if unit not in _SECOND_UNITS:
            raise ValueError(f"'{text}' has an unknown unit '{unit}'; {how}")
        if unit not in units:
            raise ValueError(f"'{text}' has its units out of order; {how}")
        units = units[units.index(unit) + 1 :]
        total += Fraction(number) * _SECOND_UNITS[unit]
    if total == 0:
        raise ValueError(f"'{text}' is no time at all; {how}")
    return float(total)


def _parse(text: str, units: dict[str, int], how: str) -> Fraction:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"'{text}' is not a quantity; {how}")
    number, unit = match.groups()
    if unit not in units:
        same = [name for name in units if name.casefold() == unit.casefold()]
        hint = f"; did you mean '{same[0]}'?" if same else ""
        raise ValueError(f"'{text}' has an unknown unit '{unit}'{hint}; {how}")
    return Fraction(number) * units[unit]


def _whole(text: str, value: Fraction, how: str) -> int:
    if value.denominator != 1:
        raise ValueError(f"'{text}' is {float(value):g}, which is not a whole number; {how}")
    return int(value)


def format_count(value: int) -> str:
    """Write a count with three significant digits: 180000 -> `180k`."""
    return _scaled(value, (("T", 10**12), ("G", 10**9), ("M", 10**6), ("k", 10**3)), "")


def format_bytes(value: int) -> str:
    """Write bytes with three significant digits, in powers of 1024: 524288 -> `512KiB`."""
    return _scaled(value, (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)), "B")


def _scaled(value: int, units: tuple[tuple[str, int], ...], smallest: str) -> str:
    for unit, factor in units:
        # Rounded before it is compared, or 999999 would come out as 1000k.
        shown = float(f"{value / factor:.3g}")
        if shown >= 1:
            return f"{shown:.15g}{unit}"
    return f"{value}{smallest}"


def format_duration(time_s: float) -> str:
    """Write seconds: 5400 -> `1h30m`, 12.34 -> `12.3s`, 0.5 -> `500ms`; the two largest units."""
    if time_s < 0.9995:
        return f"{float(f'{time_s * 1000:.3g}'):.15g}ms"
    if time_s < 59.95:
        return f"{float(f'{time_s:.3g}'):g}s"
    rest, parts = round(time_s), []
    if rest >= 86400:
        rest = round(rest / 3600) * 3600
    elif rest >= 3600:
        rest = round(rest / 60) * 60
    for unit in ("d", "h", "m", "s"):
        size = int(_SECOND_UNITS[unit])
        whole, rest = divmod(rest, size)
        if whole:
            parts.append(f"{whole}{unit}")
    return "".join(parts[:2])

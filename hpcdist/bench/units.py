"""Bytes, times and rates as people read them: sizes in powers of 1,024, rates in powers of 1,000 as links have them."""

from __future__ import annotations


def amount(num_bytes: int) -> str:
    """`8 B`, `1 KiB`, `1.5 MiB`."""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.4g} {unit}"


def seconds(time_s: float) -> str:
    """`8.3 µs`, `120 ms`, `2.5 s`."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if time_s * factor < 999.5:
            return f"{_short(time_s * factor)} {unit}"
    return f"{_short(time_s)} s"


def rate(*bytes_per_s: float) -> str:
    """`1.30 GB/s`, `25.1 MB/s`; of several in the unit of the greatest: `0.980 / 1.30 GB/s`."""
    units = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s"))
    factor, unit = next((unit for unit in units if max(bytes_per_s) >= 0.9995 * unit[0]), units[-1])
    return f"{' / '.join(_short(value / factor) for value in bytes_per_s)} {unit}"


def times(factor: float) -> str:
    """`1.6×`, `6×`, `23×`: two digits, since nothing here is more precise."""
    return f"{float(f'{factor:.2g}'):g}×"


def _short(value: float) -> str:
    """Three significant digits, and all digits before the point."""
    return f"{value:.0f}" if value >= 999.5 else f"{value:#.3g}".rstrip(".")

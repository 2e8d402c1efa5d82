"""Format sizes (in powers of 1,024), times, and rates (in powers of 1,000, as for network links)."""

from __future__ import annotations


def amount(num_bytes: int) -> str:
    """Format a size, such as `8 B` or `1.5 MiB`."""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    return f"{value:.4g} {unit}"


def seconds(time_s: float) -> str:
    """Format a duration, such as `8.3 µs` or `120 ms`."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if time_s * factor < 999.5:
            return f"{_short(time_s * factor)} {unit}"
    return f"{_short(time_s)} s"


def rate(*bytes_per_s: float) -> str:
    """Format rates in the unit of the largest, such as `25.1 MB/s` or `0.980 / 1.30 GB/s`."""
    units = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s"))
    factor, unit = next((unit for unit in units if max(bytes_per_s) >= 0.9995 * unit[0]), units[-1])
    return f"{' / '.join(_short(value / factor) for value in bytes_per_s)} {unit}"


def times(factor: float) -> str:
    """Format a factor with two significant digits, such as `1.6×`."""
    return f"{float(f'{factor:.2g}'):g}×"


def _short(value: float) -> str:
    """Format three significant digits and all digits before the decimal point."""
    return f"{value:.0f}" if value >= 999.5 else f"{value:#.3g}".rstrip(".")

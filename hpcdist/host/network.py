"""Bandwidths of collective operations, and the format of sizes, times and rates."""


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


def _short(value: float) -> str:
    """Format three significant digits and all digits before the decimal point."""
    return f"{value:.0f}" if value >= 999.5 else f"{value:#.3g}".rstrip(".")


def bandwidths(operation: str, num_bytes: int, time_s: float, num_ranks: int) -> tuple[float, float]:
    """Return the algorithm and the bus bandwidth of an operation, in bytes/s, as nccl-tests defines them.

    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md: `num_bytes` is the size of all data, the parts
    of all ranks together. The bus bandwidth is the rate of the busiest link, which can be compared between operations
    and world sizes.
    """
    algbw = num_bytes / time_s
    share = (num_ranks - 1) / num_ranks
    if operation == "all_reduce":
        return algbw, algbw * 2 * share
    if operation in ("all_gather", "all_to_all", "gather", "reduce_scatter", "scatter"):
        return algbw, algbw * share
    return algbw, algbw

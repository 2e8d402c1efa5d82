"""Bandwidths of collective operations, and the format of sizes, times and rates."""

_KIB = 1024
#: From here on, a number is 1000 when it is rounded to three digits.
_ROUNDED_UP_TO_1000 = 999.5


def amount(num_bytes: int) -> str:
    """Format a size, such as `8 B` or `1.5 MiB`."""
    value, unit = float(num_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < _KIB or unit == "GiB":
            break
        value /= _KIB
    return f"{value:.4g} {unit}"


def seconds(time_s: float) -> str:
    """Format a duration, such as `8.3 µs` or `120 ms`."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if time_s * factor < _ROUNDED_UP_TO_1000:
            return f"{_short(time_s * factor)} {unit}"
    return f"{_short(time_s)} s"


def rate(*bytes_per_s: float) -> str:
    """Format rates in the unit of the largest, such as `25.1 MB/s` or `0.980 / 1.30 GB/s`."""
    largest = max(bytes_per_s)
    units = ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1.0, "B/s"))
    # `_short` rounds 0.9995 to 1.00.
    fitting = [unit for unit in units if largest >= 0.9995 * unit[0]]
    factor, unit = fitting[0] if fitting else units[-1]
    numbers = " / ".join(_short(value / factor) for value in bytes_per_s)
    return f"{numbers} {unit}"


def _short(value: float) -> str:
    """Format three significant digits and all digits before the decimal point."""
    if value >= _ROUNDED_UP_TO_1000:
        return f"{value:.0f}"
    return f"{value:#.3g}".rstrip(".")


def bandwidths(operation: str, num_bytes: int, time_s: float, num_ranks: int) -> tuple[float, float]:
    """Return the algorithm and the bus bandwidth of an operation, in bytes/s, as nccl-tests defines them.

    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md: `num_bytes` is the size of all data, the parts
    of all ranks together. The bus bandwidth is the rate of the busiest link, which can be compared between operations
    and world sizes.
    """
    algorithm = num_bytes / time_s
    share = (num_ranks - 1) / num_ranks
    if operation == "all_reduce":
        return algorithm, algorithm * 2 * share
    if operation in ("all_gather", "all_to_all", "gather", "reduce_scatter", "scatter"):
        return algorithm, algorithm * share
    return algorithm, algorithm

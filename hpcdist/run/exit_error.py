"""The error of code that exits with a number: the exit status, and the last line that the code has printed."""

_LAST_LINE = "; its last line: "


def with_last_line(status: str, line: str) -> str:
    """Return the error of an exit; `line` may be empty."""
    if not line:
        return status
    return f"{status}{_LAST_LINE}{line}"


def without_last_line(error: str) -> str:
    """Return an error without the last line, which may contain anything: the time, a rank, or the word NCCL."""
    return error.partition(_LAST_LINE)[0]


def last_line_of(error: str) -> str:
    """Return the last line in an error; empty without one."""
    return error.partition(_LAST_LINE)[2]

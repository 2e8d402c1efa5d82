"""Values and records in the output of Slurm's commands. Pure functions."""

from __future__ import annotations

import re
import time

_MEMORY = re.compile(r"([0-9]{1,18})([KMGT]?)B?", re.IGNORECASE)
_MB = {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}
#: The name of a job may contain anything; the key after it is the same in all releases.
_JOB_NAME = re.compile(r"(JobId=.*?)JobName=(.*?) (UserId=\S+\([0-9]+\) .*)")
#: Texts that Slurm prints for an empty value.
_EMPTY = ("", "(null)", "None", "None assigned", "N/A", "Unknown")


def parse_record(line: str) -> dict[str, str]:
    """Return the `Key=value` words that `scontrol --oneliner` prints; a value is cut at its first space.

    Free text may contain words of this form: the name of a job, and the texts at the end of a record (`Command=`,
    `SubmitLine=`, `Comment=`). Names are taken whole, later texts are ignored, and the first value of a key counts.
    """
    before, name, after = line, {}, ""
    if match := _JOB_NAME.match(line):
        before, after = match[1], match[3]
        name = {"JobName": match[2]}
    text, _, command = f"{before}{after}".partition(" Command=")
    words = [*text.split(), *(f"Command={word}" for word in command.split()[:1])]
    return dict(word.split("=", 1) for word in reversed(words) if "=" in word) | name


def parse_records(text: str) -> list[dict[str, str]]:
    """Return the records of `scontrol --oneliner`, one per line. A heterogeneous job has one for each component."""
    return [parse_record(line) for line in text.splitlines() if line.strip()]


def parse_settings(text: str) -> dict[str, str]:
    """Return the settings that `scontrol show config` prints."""
    pairs = (line.split("=", 1) for line in text.splitlines() if "=" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def parse_text(text: str | None) -> str:
    """Return a value; empty if Slurm prints `(null)`, `N/A` and the like."""
    return "" if text is None or text in _EMPTY else text


def parse_count(text: str) -> int | None:
    """Return a count of up to 18 digits; None for anything else, such as `UNLIMITED`."""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else None


def parse_time(text: str | None) -> float | None:
    """Return a local time (`2026-11-20T07:05:00`) in seconds since the epoch; None for `Unknown` and the like."""
    try:
        return time.mktime(time.strptime(text or "", "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return None


def parse_minutes(text: str) -> float | None:
    """Return a time limit (`1-00:00:00`, `30:00`) in minutes; None for `UNLIMITED` and the like."""
    days, dash, clock = text.rpartition("-")
    try:
        parts = [int(part) for part in clock.split(":")]
        num_days = int(days) if dash else 0
    except ValueError:
        return None
    if len(parts) < 3 and not dash:
        parts = [0, *parts]  # minutes, or minutes and seconds
    hours, minutes, seconds = (*parts, 0, 0)[:3]
    return num_days * 1440 + hours * 60 + minutes + seconds / 60


def parse_seconds(text: str) -> int | None:
    """Return a duration of a setting (`30 sec`, `2 min`, `30`) in seconds; None for anything else."""
    match = re.fullmatch(r"([0-9]{1,18})(?: (sec|min))?", text.strip())
    return int(match[1]) * (60 if match[2] == "min" else 1) if match else None


def parse_memory_mb(text: str) -> float | None:
    """Return a memory size of sbatch (`64G`, `2000`) in MiB; None for anything else."""
    match = _MEMORY.fullmatch(text.strip())
    return int(match[1]) * _MB[match[2].upper()] if match else None

"""What a benchmark leaves for people beside its `results.json`: the report, all points as CSV, and the pictures."""

from __future__ import annotations

import logging
from pathlib import Path

from hpcdist.bench import plots
from hpcdist.bench.bottleneck import bottleneck
from hpcdist.bench.report import as_csv, as_text
from hpcdist.bench.results import Results
from hpcdist.files.atomic import write_atomic

log = logging.getLogger(__name__)


def leave(results: Results, folder: Path) -> None:
    """Write `report.txt`, `results.csv` and PNGs into the folder where `results.json` is, and log the bottleneck."""
    for sentence in bottleneck(results):
        log.info("bottleneck: %s", sentence)
    write_atomic(folder / "report.txt", as_text(results))
    write_atomic(folder / "results.csv", as_csv(results))
    try:
        plots.draw(results, folder)
    except ImportError as error:
        log.warning("no pictures: %s (the extra `train` has matplotlib)", error)

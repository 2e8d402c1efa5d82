"""Files of a benchmark besides `results.json`: the report, all measurements as CSV, and the plots."""

from __future__ import annotations

import logging
from pathlib import Path

from hpcdist.bench import plots
from hpcdist.bench.bottleneck import bottleneck
from hpcdist.bench.report import as_csv, as_text
from hpcdist.bench.results import Results
from hpcdist.files.atomic import write_atomic

log = logging.getLogger(__name__)


def write_files(results: Results, folder: Path) -> None:
    """Write `report.txt`, `results.csv` and the plots into the folder of `results.json`, and log the bottleneck."""
    for sentence in bottleneck(results):
        log.info("bottleneck: %s", sentence)
    write_atomic(folder / "report.txt", as_text(results))
    write_atomic(folder / "results.csv", as_csv(results))
    try:
        plots.draw(results, folder)
    except ImportError as error:
        log.warning("no plots: %s (install matplotlib with the extra `train`)", error)

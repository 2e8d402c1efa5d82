"""A script, and a trainer of one's own, that leaves its files to the end of the process.

    python ending.py FOLDER [RANK_THAT_FAILS]

`params` of the trainer: `folder`.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hpcdist

kept: list[Any] = []


def leave_work(folder: Path, rank: int) -> None:
    """Leave a function of atexit, a thread, an idle pool and a buffered file, each of which has a file to write."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s of my own: %(message)s", force=False)
    logging.getLogger("mine").info("rank %d", rank)
    print(f"printed by rank {rank}", flush=True)
    atexit.register(lambda: (folder / f"atexit-{rank}").write_text("written"))
    main = threading.main_thread()

    def outlive() -> None:
        main.join(0.5)
        hpcdist.log({"late": 1.0}, 1)
        (folder / f"thread-{rank}").write_text("written")

    threading.Thread(target=outlive).start()
    pool = ThreadPoolExecutor(1)
    buffered = open(folder / f"buffer-{rank}", "w")  # noqa: SIM115
    buffered.write("written")
    kept.extend((pool, pool.submit(int), buffered))


def train(ctx: Any, cfg: Any) -> None:
    leave_work(Path(cfg.params["folder"]), ctx.rank)
    sys.exit()


def run_script(folder: str, failing: str = "") -> None:
    sys.modules["kept_alive"] = sys.modules["__main__"]  # a library has a reference to this module
    rank = int(os.environ["RANK"])
    leave_work(Path(folder), rank)
    if failing == str(rank):
        threading.Thread(target=threading.Event().wait, name="endless upload").start()
        raise ValueError("a mistake")


if __name__ == "__main__":
    run_script(*sys.argv[1:])

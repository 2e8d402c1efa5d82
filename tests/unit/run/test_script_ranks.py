"""Scripts that start their own ranks, recognised by their source."""

from pathlib import Path

import pytest

from hpcdist.config.loading import load_config
from hpcdist.run.script_ranks import find_spawn

RUN = """\
import os
import torch.distributed as dist
import torch.multiprocessing as mp

def setup(rank, size):
    os.environ["MASTER_PORT"] = "29500"
    dist.init_process_group("gloo", rank=rank, world_size=size)

def run(rank, size):
    setup(rank, size)
"""
#: The ends of scripts that start their own ranks: the function that they call, and their text after RUN.
STARTING = {
    "spawn": ("torch.multiprocessing.spawn", "mp.spawn(run, (2,), nprocs=2)"),
    "whole name": ("torch.multiprocessing.spawn", "import torch\ntorch.multiprocessing.spawn(fn=run, args=(2,))"),
    "imported function": (
        "torch.multiprocessing.start_processes",
        "from torch.multiprocessing import start_processes as start\nstart(run, (2,), nprocs=2)",
    ),
    "processes": (
        "torch.multiprocessing.Process",
        "from torch import multiprocessing\nmultiprocessing.Process(target=run, args=(0, 2))",
    ),
    "context": (
        "multiprocessing.Process",
        "import multiprocessing as mp\ncontext = mp.get_context('spawn')\ncontext.Process(target=run)",
    ),
    "function as argument": (
        "torch.multiprocessing.spawn",
        "def demo(f, size):\n    mp.spawn(f, (size,), nprocs=size)\ndemo(run, 2)",
    ),
    "wrapper": (
        "torch.multiprocessing.spawn",
        "def wrap(rank, f): f(rank, 2)\nmp.spawn(wrap, (run,), nprocs=2)",
    ),
    "also in one process": (
        "torch.multiprocessing.spawn",
        "if 2 > 1:\n    mp.spawn(run, (2,), nprocs=2)\nelse:\n    run(0, 1)",
    ),
    "RPC": (
        "torch.multiprocessing.spawn",
        "import torch.distributed.rpc as rpc\ndef work(rank): rpc.init_rpc(f'worker{rank}')\nmp.spawn(work, nprocs=2)",
    ),
    "class of processes": (
        "multiprocessing.Process",
        "from multiprocessing import Process\nclass Rank(Process):\n    def run(self):\n        setup(0, 2)\nRank()",
    ),
    "rank variable only set": (
        "torch.multiprocessing.spawn",
        "def work(rank):\n    os.environ['RANK'] = str(rank)\n"
        "    os.environ.update({'LOCAL_RANK': '0'})\n    print(os.environ['RANK'])\n    run(rank, 2)\nmp.spawn(work)",
    ),
}
#: The ends of scripts that do not.
OTHERS = {
    "ranks of a launcher": "run(0, 2)",
    "other processes": ("def write(): ...\ndef main():\n    run(0, 2)\n    mp.Process(target=write)\nmain()"),
    "processes of an argument": (
        "import multiprocessing as mp\ndef main(write):\n    run(0, 2)\n    mp.Process(target=write).start()\n"
        "import fire\nfire.Fire(main)"
    ),
    "processes of others": "import psutil\npsutil.Process(run)",
    "processes without ranks": "def work(rank): ...\nmp.spawn(work, nprocs=2)",
    "unless launched": ("if 'RANK' in os.environ:\n    run(0, 2)\nelse:\n    mp.spawn(run, (2,), nprocs=2)"),
    "default of a variable": ("if int(os.environ.get('LOCAL_RANK', -1)) < 0:\n    mp.spawn(run, (2,))"),
    "option of a launcher": (
        "import argparse\nargparse.ArgumentParser().add_argument('--local-rank', type=int)\nmp.spawn(run, (2,))"
    ),
    "asks torch": "if not dist.is_torchelastic_launched():\n    mp.spawn(run, (2,))",
    "rank sets and asks": (
        "def work(rank):\n    os.environ |= {'RANK': str(rank)}\n    run(rank, 2)\n"
        "if 'RANK' not in os.environ:\n    mp.spawn(work)"
    ),
    "no Python of this version": "mp.spawn(run, (2,))\nprint 'done'",
}


def spawn_of(file: Path, *words: str) -> str | None:
    """Return the sentence on a script's own ranks; None if it starts none."""
    script = ", ".join(words or [str(file)])
    spawn = find_spawn(load_config("ddp_digits", [f"trainer.script=[{script}]"]), [file.parent])
    return spawn.sentence if spawn is not None else None


@pytest.mark.parametrize("name", STARTING)
def test_script_that_starts_its_own_ranks(name: str, tmp_path: Path) -> None:
    call, text = STARTING[name]
    file = tmp_path / "train.py"
    file.write_text(RUN + text)
    sentence = spawn_of(file)
    assert sentence is not None
    assert sentence.startswith(f"train.py starts its own ranks ({call} in train.py:")


@pytest.mark.parametrize("name", OTHERS)
def test_script_that_leaves_its_ranks_to_a_launcher(name: str, tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(RUN + OTHERS[name])
    assert spawn_of(file) is None


def test_calls_are_followed_into_modules_of_the_user(tmp_path: Path) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("from .meeting import run\n")
    (package / "meeting.py").write_text(RUN)
    (package / "start.py").write_text("import torch.multiprocessing as mp\ndef start(f):\n    mp.spawn(f, (2,))\n")
    file = tmp_path / "train.py"
    file.write_text("import pkg\nfrom pkg.start import start\nstart(pkg.run)\nimport missing\nmissing.call()\n")
    assert spawn_of(file) == "train.py starts its own ranks (torch.multiprocessing.spawn in start.py:3)"
    (package / "__main__.py").write_text("import torch.multiprocessing as mp\nfrom . import run\nmp.spawn(run, (2,))\n")
    assert spawn_of(file, "-m", "pkg") == "pkg starts its own ranks (torch.multiprocessing.spawn in __main__.py:3)"
    (package / "meeting.py").write_text(RUN + "rank = os.getenv('RANK')\n")
    assert spawn_of(file, "-m", "pkg") is None
    assert spawn_of(file, "-m", "json.tool") is None


@pytest.mark.parametrize("path", sorted((Path(__file__).parents[3] / "examples" / "tutorials").glob("*.py")), ids=str)
def test_shipped_programs_leave_their_ranks_to_a_launcher(path: Path) -> None:
    assert spawn_of(path) is None

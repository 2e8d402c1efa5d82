"""The language model on several ranks: equal to one process, and exact after a stop, an attack or a kill."""

from __future__ import annotations

import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
from context_scene import new_run, open_context
from hpcdist_runs import Runs, assert_no_ports, assert_states_equal, finish, listening, rank_of
from spawn import Rank, spawn_ranks
from torch import Tensor, nn

from hpcdist.checkpoint.state import load_weights
from hpcdist.config.launch_schema import CheckpointConfig, TrackingConfig
from hpcdist.config.schema import Config, OptimConfig, StopConfig
from hpcdist.rank.training_loop import build_optimizer
from hpcdist.run.folder import RunDir
from hpcdist.tracking.journal import read_records
from hpcdist.trainers.rnn import RnnConfig
from hpcdist.trainers.rnn import train as rnn
from hpcdist.trainers.rnn.text import Columns, Corpus, load_corpus
from hpcdist.trainers.rnn.train import LanguageModel

TESTS = Path(__file__).resolve().parents[1]
ATTACKER = str(TESTS / "support" / "attacker.py")
HOLD_STEP, LAST_STEP = 12, 36
HOLD_OVERRIDES = ["trainer=gated:train", "params.gated=rnn", f"params.hold_at={HOLD_STEP}"]
SGD = OptimConfig(name="sgd", lr=0.5, momentum=0.0)


def config(trainers: int, servers: int, optim: OptimConfig, steps: int, **options: Any) -> Config:
    return Config(
        roles={"trainer": trainers, "parameter_server": servers},
        sections={
            "rnn": RnnConfig(
                **{
                    "tokenizer": "byte",
                    "max_corpus_mb": 0.01,
                    "eval_fraction": 0.2,
                    "embedding_size": 12,
                    "hidden_size": 12,
                    "dropout": 0.0,
                    "batch_size": 4,
                    "bptt": 5,
                    "num_sample_tokens": 0,
                    **options,
                }
            )
        },
        optim=optim,
        stop=StopConfig(max_steps=steps),
        checkpoint=CheckpointConfig(monitor="eval/perplexity", monitor_mode="min"),
        tracking=TrackingConfig(log_every_steps=1),
    )


def train(here: Rank, path: Path, cfg: Config) -> None:
    with open_context(here, RunDir(path), cfg) as ctx:
        ctx.export_model = lambda *_: None  # type: ignore[method-assign]  # MLflow takes seconds
        rnn.train(ctx, cfg)
        ctx.close()


def in_one_process(cfg: Config, steps: int) -> tuple[dict[str, Tensor], float, list[float]]:
    """Return weights, held-out perplexity and losses of the whole model, trained by autograd and torch.optim."""
    corpus = load_corpus(cfg.section(RnnConfig), cfg.seed)
    torch.manual_seed(cfg.seed)
    model = whole_model(cfg, corpus)
    columns = Columns(
        corpus.train, cfg.section(RnnConfig).batch_size * cfg.roles["trainer"], cfg.section(RnnConfig).bptt
    )
    others = [parameter for name, parameter in model.named_parameters() if name != "encoder.weight"]
    is_lazy = cfg.optim.name == "adam"
    optimizers = [build_optimizer(others if is_lazy else model.parameters(), replace(cfg.optim, max_grad_norm=None))]
    if is_lazy:
        optimizers.append(torch.optim.SparseAdam([model.encoder.weight], lr=cfg.optim.lr))
    state, losses = None, []
    for step in range(steps):
        batch = columns[step]
        logits, (h, c) = model.step(batch.ids[batch.inverse], state)
        state = h.detach(), c.detach()
        loss = F.cross_entropy(logits.flatten(0, 1), batch.targets)
        loss.backward()
        losses.append(loss.item())
        if cfg.optim.max_grad_norm is not None:
            assert nn.utils.clip_grad_norm_(model.parameters(), cfg.optim.max_grad_norm) > cfg.optim.max_grad_norm
        if is_lazy:
            assert model.encoder.weight.grad is not None
            touched = torch.zeros(corpus.tokenizer.size, 1).index_fill_(0, batch.ids, 1.0)
            model.encoder.weight.grad = (model.encoder.weight.grad + touched * 1e-30).to_sparse(1)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    held_out = Columns(
        corpus.held_out, cfg.section(RnnConfig).batch_size * cfg.roles["trainer"], cfg.section(RnnConfig).bptt
    )
    return model.state_dict(), perplexity(model, held_out), losses


def whole_model(cfg: Config, corpus: Corpus) -> LanguageModel:
    size, rnn = corpus.tokenizer.size, cfg.section(RnnConfig)
    sizes = {"vocab_size": size, "embedding": rnn.embedding_size, "hidden": rnn.hidden_size, "layers": rnn.num_layers}
    return LanguageModel(**sizes, seed=cfg.seed)


@torch.no_grad()
def perplexity(model: LanguageModel, columns: Columns) -> float:
    state, loss = None, 0.0
    for batch in columns:
        logits, state = model.step(batch.ids[batch.inverse], state)
        loss += F.cross_entropy(logits.flatten(0, 1), batch.targets, reduction="sum").item()
    return math.exp(loss / columns.num_targets)


@pytest.mark.slow
def test_another_number_of_servers_continues_the_same_training(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    for num_servers, steps in ((1, 3), (3, 6)):
        cfg = config(2, num_servers, SGD, steps)
        spawn_ranks(train, 2 + num_servers, path=run.path, cfg=cfg)
    found, (expected, _, _) = load_weights(run.checkpoints / "step-00000006"), in_one_process(cfg, 6)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("trainers", "servers", "optim", "steps", "options"),
    [
        # One step of SGD shows the gradients; many steps show the state that is carried over.
        pytest.param(1, 1, SGD, 1, {}, marks=pytest.mark.slow),
        pytest.param(2, 2, OptimConfig(lr=0.01, max_grad_norm=0.05), 12, {}, marks=pytest.mark.faults),
        (2, 1, SGD, 12, {}),
        pytest.param(1, 2, replace(SGD, lr=0.1, momentum=0.9, max_grad_norm=0.1), 12, {}, marks=pytest.mark.slow),
    ],
    ids=["gradients", "adam, clipped", "sgd", "momentum"],
)
def test_training_equals_one_process(
    tmp_path: Path, trainers: int, servers: int, optim: OptimConfig, steps: int, options: dict[str, Any]
) -> None:
    cfg = config(trainers, servers, optim, steps, **options)
    expected, expected_perplexity, losses = in_one_process(cfg, steps)
    run = new_run(tmp_path)
    spawn_ranks(train, trainers + servers, path=run.path, cfg=cfg)
    found = load_weights(run.checkpoints / f"step-{steps:08d}")
    assert set(found) == set(expected)
    torch.manual_seed(cfg.seed)
    before = whole_model(cfg, load_corpus(cfg.section(RnnConfig), cfg.seed)).state_dict()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-4, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
        assert not torch.equal(found[name], before[name]), f"{name} has not changed"
    records, _ = read_records(run.journal / "attempt-001.rank-00000.jsonl")
    metrics = {(key, record.step): value for record in records for key, value in record.metrics.items()}
    assert [metrics["train/loss", step + 1] for step in range(steps)] == pytest.approx(losses, rel=1e-4)
    assert losses[0] == pytest.approx(math.log(256), rel=0.05), "initial loss of a uniform prediction"
    assert metrics["eval/perplexity", steps] == pytest.approx(expected_perplexity, rel=1e-4)


def train_async(here: Rank, path: Path, cfg: Config) -> float:
    """Train; return the sum of the LSTM's parameters at the last checkpoint."""
    found = []
    with open_context(here, RunDir(path), cfg) as ctx:
        ctx.export_model = lambda *_: None  # type: ignore[method-assign]
        save = ctx.save

        def save_and_sum(step: int, *, model: nn.Module | None, **rest: Any) -> None:
            found.append(sum(float(p.double().sum()) for p in model.parameters()) if model is not None else 0.0)
            save(step, model=model, **rest)

        ctx.save = save_and_sum  # type: ignore[method-assign]
        rnn.train(ctx, cfg)
        ctx.close()
    return found[-1]


@pytest.mark.faults
def test_async_replicas_stay_equal_and_learn_nearly_as_much(tmp_path: Path) -> None:
    steps = 60
    cfg = config(
        2, 2, OptimConfig(lr=0.01, max_grad_norm=1.0), steps, mode="async", max_corpus_mb=0.05, batch_size=8, bptt=16
    )
    cfg = replace(cfg, checkpoint=replace(cfg.checkpoint, every_steps=25))
    run = new_run(tmp_path)
    first, second, *_ = spawn_ranks(train_async, 4, path=run.path, cfg=cfg)
    assert first == second
    records, _ = read_records(run.journal / "attempt-001.rank-00000.jsonl")
    (reached,) = (record.metrics["eval/perplexity"] for record in records if "eval/perplexity" in record.metrics)
    assert {path.name for path in run.checkpoints.glob("step-*")} == {"step-00000050", "step-00000060"}
    _, expected, losses = in_one_process(replace(cfg, optim=replace(cfg.optim, max_grad_norm=None)), steps)
    assert expected < 50 < math.exp(losses[0]), "the task can be learned"
    assert reached < 1.15 * expected


# --- whole runs


def arguments(runs: Runs, name: str, *overrides: str) -> list[str]:
    return [
        "rnn_lm",
        f"name={name}",
        f"tracking.uri=sqlite:///{runs.database}",
        "tracking.register_as=null",
        "tracking.log_every_steps=2",
        "tracking.drain_timeout_s=200",
        "launch.device=cpu",
        f"launch.env.PYTHONPATH={os.pathsep.join(runs._import_path())}",
        "roles.trainer=2",
        "rnn.max_corpus_mb=0.05",
        "rnn.vocab_size=300",
        "rnn.embedding_size=16",
        "rnn.hidden_size=16",
        "rnn.batch_size=8",
        "rnn.bptt=16",
        "checkpoint.every_steps=5",
        "stop.max_epochs=1",
        f"stop.max_steps={LAST_STEP}",
        *overrides,
    ]


@pytest.fixture(scope="module")
def language_runs(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Runs:
    return Runs(tmp_path_factory.mktemp("rnn"), empty_database, experiment="language")


@pytest.fixture(scope="module")
def control(language_runs: Runs) -> str:
    code, output = language_runs.command("run", *arguments(language_runs, "control"))
    assert code == 0, output
    assert "finished: trained" in output
    for rank in range(3):
        assert "Warning" not in language_runs.attempt("control").log(rank).read_text()
    return "control"


def final_files(runs: Runs, name: str) -> dict[str, Any]:
    folder = runs.run_dir(name).checkpoints / f"step-{runs.checkpoint_steps(name)[-1]:08d}"
    return {path.name: torch.load(path, weights_only=True) for path in sorted(folder.glob("*.pt"))}


def assert_equals_control(runs: Runs, name: str, control: str) -> None:
    assert_states_equal(final_files(runs, name), final_files(runs, control))
    assert len(final_files(runs, name)) == 3, "model, trainer, and shard of the server"
    series = runs.series(control)
    assert {key for key, _ in series} == {"train/loss", "train/lr", "train/epoch", "eval/loss"}
    assert runs.series(name) == series


@pytest.mark.faults  # test_slurm_trainers.py stops and resumes this trainer as well
def test_stopped_run_resumes_exactly(language_runs: Runs, control: str) -> None:
    runs, name = language_runs, "stopped"
    process = runs.start("run", *arguments(runs, name, *HOLD_OVERRIDES))
    runs.wait_until_held(name)
    code, output = runs.command("stop", name)
    assert code == 0, output
    code, output = finish(process)
    assert code == 0, output
    at = runs.checkpoint_steps(name)[-1]
    assert HOLD_STEP <= at < LAST_STEP

    code, output = runs.command("resume", name)
    assert code == 0, output
    assert_equals_control(runs, name, control)
    text = (runs.run_dir(name).artifacts / "sample.txt").read_text()
    assert text.startswith("def")
    assert len(text) > 300


def test_ranks_of_a_local_run_have_no_port(language_runs: Runs) -> None:
    """Store and RPC use Unix sockets in the run folder, and gloo's listening sockets are closed."""
    runs, name = language_runs, "listening"
    process = runs.start("run", *arguments(runs, name, *HOLD_OVERRIDES))
    held = runs.wait_until_held(name)
    assert_no_ports([listening(pid) for pid in (*held, server_pid(held))])
    runs.release(name)
    code, output = finish(process)
    assert code == 0, output


def server_pid(held: list[int]) -> int:
    """Return the process id of the server, the only rank that is not held, since it has no steps."""
    (found,) = {
        child.pid
        for child in psutil.Process(psutil.Process(held[0]).ppid()).children()
        if rank_of(child) is not None and child.pid not in held
    }
    return found


@pytest.mark.parametrize(
    "victim",
    [
        *(pytest.param(f"trainer:{index}", marks=pytest.mark.faults) for index in (0, 1)),
        pytest.param("parameter_server:0", marks=pytest.mark.slow),
    ],
)
def test_run_restarts_exactly_after_a_rank_is_killed(language_runs: Runs, control: str, victim: str) -> None:
    runs, name = language_runs, f"killed-{victim.replace(':', '-')}"
    process = runs.start("run", *arguments(runs, name, *HOLD_OVERRIDES))
    held = runs.wait_until_held(name)
    rank = {"trainer:0": 0, "trainer:1": 1, "parameter_server:0": 2}[victim]
    pid = held[rank] if rank < 2 else server_pid(held)
    os.kill(pid, signal.SIGKILL)
    runs.release(name)
    code, output = finish(process)
    assert code == 0, output
    assert f"rank {rank} ({victim}) on {os.uname().nodename} was killed by SIGKILL" in output
    assert "restart 1 of 3\n" in output
    assert_equals_control(runs, name, control)


@pytest.mark.slow
def test_run_restarts_exactly_after_the_server_is_stopped(language_runs: Runs, control: str) -> None:
    """It keeps its connections, so only the hang detection can find it; the trainers wait for it."""
    runs = language_runs
    process = runs.start("run", *arguments(runs, "frozen", *HOLD_OVERRIDES, "launch.hang_timeout_s=15"))
    server = psutil.Process(server_pid(runs.wait_until_held("frozen")))
    server.suspend()
    runs.release("frozen")
    code, output = finish(process)
    assert code == 0, output
    assert f"rank 2 (parameter_server:0) on {os.uname().nodename} made no progress for" in output
    assert "restart 1 of 3\n" in output
    assert not server.is_running()
    assert_equals_control(runs, "frozen", control)

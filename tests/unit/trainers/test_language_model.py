"""The trainer `rnn` without ranks: initial rows, config, text, and vocabulary shards and servers."""

import string
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hpcdist.config.loading import load_config
from hpcdist.config.roles import share_of
from hpcdist.config.training_schema import OptimConfig
from hpcdist.errors import ConfigError
from hpcdist.trainers.rnn import RnnConfig
from hpcdist.trainers.rnn.token_stream import Columns, encode_bytes, load_corpus, read_texts, word_encoder
from hpcdist.trainers.rnn.train import initial_rows
from hpcdist.trainers.rnn.vocabulary import VocabularyServer, join_scores

# --- The language model: initial rows.


def test_initial_rows_do_not_depend_on_the_shards() -> None:
    whole = initial_rows("encoder", range(2500), 3, 1)
    pieces = [initial_rows("encoder", range(*span), 3, 1) for span in ((0, 900), (900, 1024), (1024, 2500))]
    assert torch.equal(torch.cat(pieces), whole)
    assert not torch.equal(initial_rows("decoder", range(2500), 3, 1), whole)


# --- Validation of configs of `trainer: rnn`.


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("roles={server: 1, trainer: 1}",
         "roles: trainer rnn needs trainers, then parameter_servers, got server: 1, trainer: 1: set"),
        ("rnn.dropout=1.0", r"rnn.dropout must be < 1, got 1.0"),
    ],
)  # fmt: skip
def test_invalid_values_raise_config_error(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("rnn_lm", [override])


# --- Text: files and their order, tokenizers, and columns of consecutive tokens.


CODE = "def f(x):\n    return x + 1  # größer\n\n\nclass A:\n    pass\n"


def test_words_are_pieces_of_the_text_and_rare_ones_are_unknown() -> None:
    encode, size = word_encoder([CODE], 1000)
    first, again = encode([CODE, "def g"])
    assert max(first) < size < len(first), "line ends with indentations are repeated"
    assert again == [first[0], 0], "`g` is unknown"
    assert word_encoder([CODE], 5)[1] == 5
    assert encode_bytes(["ö"]) == [[0xC3, 0xB6]]


def test_text_files_come_from_globs_or_the_standard_library(tmp_path: Path) -> None:
    texts = read_texts([], 0.2, seed=0)
    assert sum(len(text.encode()) for text in texts) == pytest.approx(0.2e6, rel=0.01)
    assert texts == read_texts([], 0.2, seed=0) != read_texts([], 0.2, seed=1)
    (tmp_path / "sub").mkdir()
    for name in ("a.txt", "sub/b.txt", "c.md"):
        (tmp_path / name).write_text(name)
    assert sorted(read_texts([f"{tmp_path}/**/*.txt", f"{tmp_path}/a.txt"], 1, 0)) == ["a.txt", "sub/b.txt"]
    with pytest.raises(ConfigError, match=r"rnn.files: '.*\*\.rst' matches no file"):
        read_texts([f"{tmp_path}/*.rst"], 1, 0)


def test_whole_files_or_the_end_of_the_text_are_held_out(tmp_path: Path) -> None:
    for letter in string.ascii_lowercase[:20]:
        (tmp_path / f"{letter}.txt").write_text(letter * 100)
    corpus = load_corpus(RnnConfig(files=[f"{tmp_path}/*.txt"], tokenizer="byte"), seed=0)
    assert (len(corpus.train), len(corpus.held_out)) == (1900, 100)
    assert not set(corpus.train.tolist()) & set(corpus.held_out.tolist())
    corpus = load_corpus(RnnConfig(files=[f"{tmp_path}/c.txt"], tokenizer="byte"), seed=0)
    assert (len(corpus.train), len(corpus.held_out)) == (95, 5)


def test_columns_continue_from_batch_to_batch() -> None:
    columns = Columns(torch.arange(50, 150), num_columns=4, bptt=7)
    assert len(columns) == 4, "24 targets a column: 7, 7, 7 and 3"
    inputs = torch.cat([batch.ids[batch.inverse] for batch in columns])
    targets = torch.cat([batch.targets.view(-1, 4) for batch in columns])
    assert torch.equal(inputs[:, 1], torch.arange(75, 99))
    assert torch.equal(targets, inputs + 1)
    assert columns.num_targets == targets.numel()
    repeated = Columns(torch.tensor([5, 5, 3, 5, 3, 3, 5, 5]), 2, 3)[0]
    assert repeated.ids.tolist() == [3, 5], "each token is looked up once"
    with pytest.raises(ConfigError, match=r"the text has 5 tokens, too few for 4 columns: raise rnn\.max_corpus_mb"):
        Columns(torch.arange(5), num_columns=4, bptt=7)


# --- Vocabulary servers without RPC: loss and gradients, compared with autograd; checkpoints; errors.


NUM_TOKENS, WIDTH, VOCAB_SIZE = 37, 8, 50


def servers(num: int, cfg: OptimConfig, sharpness: float = 1.0) -> list[VocabularyServer]:
    generator = torch.Generator().manual_seed(0)
    encoder, weight = (torch.randn(VOCAB_SIZE, WIDTH, generator=generator) for _ in range(2))
    return [
        VocabularyServer(
            encoder[rows.start : rows.stop].clone(),
            weight[rows.start : rows.stop] * sharpness,
            cfg,
            start=rows.start,
            vocab_size=VOCAB_SIZE,
            num_trainers=1,
            device=torch.device("cpu"),
        )
        for rows in (share_of(server, num, VOCAB_SIZE) for server in range(num))
    ]


def forward_and_backward(
    group: list[VocabularyServer], number: int, hidden: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, and the gradient of `hidden` for their mean."""
    scores = [server.score(0, number, hidden, targets) for server in group]
    lse, losses = join_scores(*zip(*scores, strict=True))
    return losses, torch.stack([server.backward(0, number, lse, 1 / len(hidden)) for server in group]).sum(0)


@pytest.mark.parametrize("num_servers", [1, 3])
@pytest.mark.parametrize("sharpness", [1.0, 300.0], ids=["normal", "probabilities below the smallest float"])
def test_loss_and_gradients_equal_those_of_autograd(num_servers: int, sharpness: float) -> None:
    generator = torch.Generator().manual_seed(1)
    group = servers(num_servers, OptimConfig(), sharpness)
    for server in group:
        torch.nn.init.normal_(server.bias, generator=generator)
    parameters = [torch.cat([getattr(server, name) for server in group]).detach() for name in ("weight", "bias")]
    for number, size in enumerate((NUM_TOKENS, NUM_TOKENS, 5)):  # buffers are reused, or have another size
        hidden = torch.randn(size, WIDTH, generator=generator)
        targets = torch.randint(VOCAB_SIZE, (size,), generator=generator)
        losses, gradient = forward_and_backward(group, number, hidden, targets)
        leaves = [tensor.clone().requires_grad_() for tensor in (hidden, *parameters)]
        loss = F.cross_entropy(F.linear(*leaves), targets)
        of_hidden, *of_parameters = torch.autograd.grad(loss, leaves)
        torch.testing.assert_close(losses.mean(), loss.detach())
        torch.testing.assert_close(gradient, of_hidden, rtol=1e-4, atol=1e-5 * sharpness)
        found = [server._slot(0, number).gradients.result() for server in group]
        for parts, expected in zip(zip(*found, strict=True), of_parameters, strict=True):
            torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-4, atol=1e-6)


def one_step(group: list[VocabularyServer], number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    hidden, targets = torch.randn(6, WIDTH, generator=generator), torch.randint(VOCAB_SIZE, (6,), generator=generator)
    ids = torch.randperm(VOCAB_SIZE, generator=generator)[:5].sort()[0]
    rows = torch.randn(5, WIDTH, generator=generator)
    forward_and_backward(group, number, hidden, targets)
    for server in group:
        mine = (ids >= server.start) & (ids < server.stop)
        server.push(0, number, ids[mine], rows[mine], 1.0, 0.1, ids[mine])


def whole(group: list[VocabularyServer]) -> dict[str, Tensor]:
    parts = [server.weights() for server in group]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


@pytest.mark.parametrize(
    "cfg", [OptimConfig(), OptimConfig(name="adamw", weight_decay=0.1), OptimConfig(name="sgd", momentum=0.0)]
)
def test_rows_and_their_optimizer_state_load_on_other_servers(cfg: OptimConfig) -> None:
    before, control, after = servers(2, cfg), servers(1, cfg), servers(3, cfg)
    for number in range(3):
        one_step(before, number)
        one_step(control, number)
    shards = {2 + index: server.shard().content() for index, server in enumerate(before)}
    trainer = {"num_trainers": 2, "num_servers": 2, "vocab_size": VOCAB_SIZE}
    for server in after:
        server.restore(SimpleNamespace(trainer=trainer, shard=shards.get))  # type: ignore[arg-type]
    for number in range(3, 6):
        one_step(after, number)
        one_step(control, number)
    expected = whole(control)
    for name, tensor in whole(after).items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-6)
    trainer["vocab_size"] = 49
    with pytest.raises(ConfigError, match="the text has 50 different tokens, but the checkpoint was trained on 49: "):
        after[0].restore(SimpleNamespace(trainer=trainer, shard=shards.get))  # type: ignore[arg-type]


@pytest.mark.parametrize("cfg", [OptimConfig(weight_decay=0.1), OptimConfig(name="sgd", momentum=0.0)])
def test_resumed_servers_may_update_rows_in_another_way(cfg: OptimConfig) -> None:
    before, after = servers(1, OptimConfig(name=cfg.name)), servers(1, cfg)
    one_step(before, 0)
    shard, trainer = before[0].shard().content(), {"num_trainers": 1, "num_servers": 1, "vocab_size": VOCAB_SIZE}
    after[0].restore(SimpleNamespace(trainer=trainer, shard={1: shard}.get))  # type: ignore[arg-type]
    one_step(after, 1)
    after[0].settle()
    assert not torch.equal(whole(after)["encoder.weight"], whole(before)["encoder.weight"])


def test_error_of_a_background_task_is_raised_by_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ValueError("out of order")

    monkeypatch.setattr("hpcdist.trainers.rnn.vocabulary.MIN_BACKGROUND_SIZE", 0)
    (server,) = servers(1, OptimConfig())
    hidden, targets, ids = torch.randn(3, WIDTH), torch.tensor([0, 1, 2]), torch.tensor([0])
    server.decode(0, 0, hidden, targets, 1.0)
    server.decoder_optimizer.step = fail  # type: ignore[method-assign,assignment]
    server.push(0, 0, ids, torch.zeros(1, WIDTH), 1.0, 0.1, ids)
    with pytest.raises(ValueError, match="out of order"):
        server.decode(0, 0, hidden, targets, 1.0)
    with pytest.raises(ValueError, match="out of order"):
        server.settle()

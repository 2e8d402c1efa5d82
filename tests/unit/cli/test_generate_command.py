"""`hpcdist generate`: the model of a run continues a text, token by token."""

import builtins
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Cli, Make, one_line

from hpcdist.checkpoint.store import CheckpointStore, Snapshot
from hpcdist.cli.generate import pieces_of_text
from hpcdist.data.tokenizer import ByteTokenizer
from hpcdist.errors import terminal_text
from hpcdist.run.folder import RunDir
from hpcdist.trainers.lm.model import Decoder, generate
from hpcdist.trainers.lm.sizes import LmModelConfig

SIZES = LmModelConfig(hidden_size=16, num_layers=1, num_heads=2, intermediate_size=16)
TOKENIZER = ByteTokenizer()
PROMPT = "def é("


def lm_run(make: Make, name: str = "first") -> RunDir:
    sizes = "{hidden_size: 16, num_layers: 1, num_heads: 2, intermediate_size: 16}"
    return make(name, "trainer=lm", "data.global_batch_size=2", f"lm.model={sizes}")


def saved_decoder(run: RunDir, step: int) -> Decoder:
    """Save a checkpoint of random weights; return its model."""
    model = Decoder(SIZES, TOKENIZER.vocab_size)
    model.init_weights(step)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(20)
    snapshot = Snapshot(step=step, model=model.state_dict(), trainer={}, rank_states=[None], metrics={})
    CheckpointStore(run.checkpoints).add(snapshot)
    return model


@pytest.mark.processes
def test_newest_checkpoint_continues_the_prompt(hpcdist: Cli, make: Make) -> None:
    run = lm_run(make)
    saved_decoder(run, 10)
    model = saved_decoder(run, 20)
    ids = TOKENIZER.encode(PROMPT)
    tokens = list(generate(model, torch.tensor(ids), 12, temperature=0.5, top_k=9, seed=3))
    expected = terminal_text("".join(pieces_of_text(TOKENIZER, ids, tokens)) + "\n")
    words = ("generate", run.name, PROMPT, "--max-tokens", "12", "--temperature", "0.5", "--top-k", "9", "--seed")
    result = hpcdist(*words, "3")
    assert (result.code, result.err) == (0, "step 20 of first\n")
    assert result.out == expected
    controls = set(result.out) - {"\n", "\t"} - {character for character in result.out if character.isprintable()}
    assert not controls, "they must not reach the terminal"
    assert hpcdist(*words, "3").out == result.out
    assert hpcdist(*words, "4").out != result.out


def pieces(tokens: list[int]) -> list[str]:
    return list(pieces_of_text(TOKENIZER, TOKENIZER.encode("a"), tokens))


def test_text_is_printed_in_whole_characters() -> None:
    assert pieces([*"b€".encode(), *"😀".encode(), 99]) == ["a", "b", "€", "😀", "c", ""]
    assert pieces([98, TOKENIZER.end_token, 99]) == ["a", "b", ""]
    assert pieces([98, 0xE2]) == ["a", "b", "\N{REPLACEMENT CHARACTER}"]


def test_bytes_that_are_no_character_hold_up_nothing() -> None:
    assert "".join(pieces([*[255] * 8, 98])) == "a" + "\N{REPLACEMENT CHARACTER}" * 8 + "b"
    assert len(pieces([255] * 8)) > 2


@pytest.mark.processes
def test_mistakes_of_generate_are_one_line(hpcdist: Cli, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    make("digits")
    message = "generate is for language models of trainer lm, and {} has trainer {}: choose another run"
    assert one_line(hpcdist("generate", "digits", "a")) == message.format("digits", "ddp")
    Path("train.py").touch()
    make("script", "trainer={script: [train.py]}")
    assert one_line(hpcdist("generate", "script", "a")) == message.format("script", "train.py")
    run = lm_run(make, "lm")
    assert one_line(hpcdist("generate", "lm", "a")) == f"run lm has no valid checkpoint in {run.checkpoints}"
    saved_decoder(run, 1)
    assert one_line(hpcdist("generate", "lm", "")) == "PROMPT is empty: give the text that the model continues"
    assert "Invalid value for '--temperature'" in one_line(hpcdist("generate", "lm", "a", "--temperature", "-1"))
    for value in ("nan", "inf", "1e-45"):
        message = f"{value} is neither 0 nor a number from 0.001 to 1000"
        assert message in one_line(hpcdist("generate", "lm", "a", "--temperature", value))
    for option in ("--seed", "--max-tokens"):
        message = one_line(hpcdist("generate", "lm", "a", option, "10000000000000000000000"))
        assert f"Invalid value for '{option}'" in message
    load = builtins.__import__

    def without_torch(name: str, *args: Any) -> Any:
        if name == "hpcdist.checkpoint.export":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")
        return load(name, *args)

    with monkeypatch.context() as patch:
        patch.setattr(builtins, "__import__", without_torch)
        message = one_line(hpcdist("generate", "lm", "a"))
    assert message == "generate needs torch: run `pip install '.[train]'` in a checkout of hpcdist"

"""Text: files and their order, tokenizers, and columns of consecutive tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hpcdist.errors import ConfigError
from hpcdist.trainers.rnn import RnnConfig
from hpcdist.trainers.rnn.text import UNKNOWN, ByteTokenizer, Columns, WordTokenizer, load_corpus, read_texts

CODE = "def f(x):\n    return x + 1  # größer\n\n\nclass A:\n    pass\n"


def test_decoded_tokens_are_the_text() -> None:
    words = WordTokenizer([CODE], 1000)
    for tokenizer in (ByteTokenizer(), words):
        (tokens,) = tokenizer.encode([CODE])
        assert tokenizer.decode(tokens) == CODE
        assert max(tokens) < tokenizer.size
    assert words.decode(words.encode(["def g"])[0]) == f"def{UNKNOWN}"
    assert ByteTokenizer().decode([0xC3]) == "�", "an incomplete character"


def test_vocabulary_has_the_most_frequent_words_and_is_deterministic() -> None:
    small = WordTokenizer([CODE], 5)
    assert small.size == 5
    assert UNKNOWN in small.decode(small.encode([CODE])[0])
    assert small.encode([CODE]) == WordTokenizer([CODE], 5).encode([CODE])


def test_seed_and_size_select_files_of_the_standard_library() -> None:
    texts = read_texts([], 0.2, seed=0)
    assert sum(len(text.encode()) for text in texts) == pytest.approx(0.2e6, rel=0.01)
    assert texts == read_texts([], 0.2, seed=0)
    assert texts != read_texts([], 0.2, seed=1)


def test_files_are_matched_by_globs(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("a.txt", "sub/b.txt", "c.md"):
        (tmp_path / name).write_text(name)
    assert sorted(read_texts([f"{tmp_path}/**/*.txt", f"{tmp_path}/a.txt"], 1, 0)) == ["a.txt", "sub/b.txt"]
    with pytest.raises(ConfigError, match=r"rnn.files: '.*\*\.rst' matches no file"):
        read_texts([f"{tmp_path}/*.rst"], 1, 0)


def test_whole_files_are_held_out_or_the_end_of_the_text_if_there_are_few(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}.txt").write_text(str(number) * 100)
    corpus = load_corpus(RnnConfig(files=[f"{tmp_path}/*.txt"], tokenizer="byte", eval_fraction=0.2), seed=0)
    assert (len(corpus.train), len(corpus.held_out)) == (800, 200)
    assert not set(corpus.train.tolist()) & set(corpus.held_out.tolist())
    corpus = load_corpus(RnnConfig(files=[f"{tmp_path}/3.txt"], tokenizer="byte", eval_fraction=0.2), seed=0)
    assert (len(corpus.train), len(corpus.held_out)) == (80, 20)


def test_columns_continue_from_batch_to_batch() -> None:
    columns = Columns(torch.arange(50, 150), num_columns=4, bptt=7)
    assert len(columns) == 4, "24 targets a column: 7, 7, 7 and 3"
    inputs = torch.cat([batch.ids[batch.inverse] for batch in columns])
    targets = torch.cat([batch.targets.view(-1, 4) for batch in columns])
    assert torch.equal(inputs[:, 1], torch.arange(75, 99))
    assert torch.equal(targets, inputs + 1)
    assert columns.num_targets == targets.numel()
    with pytest.raises(IndexError):
        columns[4]
    with pytest.raises(ConfigError, match=r"the text has 5 tokens, too few for 4 columns: raise rnn\.max_corpus_mb"):
        Columns(torch.arange(5), num_columns=4, bptt=7)


def test_columns_are_divided_among_ranks() -> None:
    stream = torch.arange(1000)
    whole, parts = Columns(stream, 4, 5), [Columns(stream, 2, 5, (index, 2)) for index in range(2)]
    for number in range(len(whole)):
        joined = torch.cat([part[number].ids[part[number].inverse] for part in parts], dim=1)
        assert torch.equal(joined, whole[number].ids[whole[number].inverse])


def test_repeated_token_is_looked_up_once() -> None:
    batch = Columns(torch.tensor([5, 5, 3, 5, 3, 3, 5, 5]), 2, 3)[0]
    assert batch.ids.tolist() == [3, 5]
    assert batch.ids[batch.inverse].tolist() == [[5, 3], [5, 3], [3, 5]]

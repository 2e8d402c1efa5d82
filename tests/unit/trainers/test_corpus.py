"""The text of the trainer `lm` as files of tokens: built once, by several processes, which may be killed."""

import json
import logging
import os
import random
import shutil
import signal
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
from context_scene import new_run, open_context
from other_user import as_other_user, folder_for_all_users
from spawn import Rank, spawn_ranks

from hpcdist.config.roles import share_of
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import DataConfig
from hpcdist.data.documents import pieces_of
from hpcdist.data.tokenizer import ByteTokenizer, FileTokenizer, read_tokenizer, tokenizer_of_run, train_bpe
from hpcdist.data.windows import TokenWindows
from hpcdist.errors import ConfigError, DataError
from hpcdist.host import locks
from hpcdist.host.files import write_atomic
from hpcdist.host.json_files import read_json
from hpcdist.run.folder import RunDir
from hpcdist.run.training_record import read_training
from hpcdist.trainers.lm import CorpusConfig, LmConfig, corpus
from hpcdist.trainers.lm.corpus import Corpus, build, open_corpus, prepare

END = ByteTokenizer.end_token
SENTENCES = [f"Sentence {number} is about the number {number * number}." for number in range(400)]


def write_jsonl(path: Path, texts: Sequence[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "text.jsonl", SENTENCES)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide the text into about 12 pieces."""
    monkeypatch.setattr(corpus, "PIECE_BYTES", 2000)


def config_of(*files: Path, **keys: Any) -> CorpusConfig:
    return CorpusConfig(files=[str(file) for file in files], **keys)


def tokens_in(folder: Path) -> dict[str, list[int]]:
    return {split: np.load(folder / f"{split}.npy").tolist() for split in corpus.SPLITS}


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def in_process(work: Callable[[], Any]) -> int:
    """Start a process that does the work and ends with exit code 0."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:
            logging.exception("the process failed")
            os._exit(1)
        os._exit(0)
    return pid


def exit_code(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


# --- what the files hold


def test_tokens_are_documents_with_an_end_token(text: Path, cache: Path) -> None:
    folder, tokenizer = build(config_of(text, held_out_every=4), cache)
    expected: dict[str, list[int]] = {"train": [], "held_out": []}
    for number, sentence in enumerate(SENTENCES, start=1):
        expected["held_out" if number % 4 == 0 else "train"] += [*sentence.encode(), END]
    assert tokens_in(folder) == expected
    assert names_in(cache) == [folder.name]
    assert np.load(folder / "train.npy").dtype == np.uint16
    found = open_corpus(folder, tokenizer, 50, seed=3)
    assert found.vocab_size == 257
    assert found.train.num_windows == (len(expected["train"]) - 1) // 50


def test_text_parquet_and_jsonl_are_read_of_a_folder(text: Path, cache: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    (text.parent / "a.txt").write_text("whole text\nof one file\n")
    parquet.write_table(pa.table({"text": ["first row", "second row"]}), text.parent / "b.parquet")
    folder, tokenizer = build(config_of(text.parent, held_out_every=400), cache)
    train = tokenizer.decode(tokens_in(folder)["train"])
    assert train.startswith("whole text\nof one file\nfirst rowsecond rowSentence 0 is about")
    assert tokens_in(folder)["train"].count(END) == 402


@pytest.mark.slow
def test_the_standard_library_is_the_default(cache: Path) -> None:
    folder, tokenizer = build(CorpusConfig(), cache)
    found = open_corpus(folder, tokenizer, 256, seed=0)
    assert found.train.num_windows > 10_000
    assert 0.03 < found.held_out.num_tokens / found.train.num_tokens < 0.08
    assert "import" in tokenizer.decode(found.train.read(0, np.arange(100)).flatten().tolist())


@pytest.mark.processes
def test_files_do_not_depend_on_the_processes(text: Path, cache: Path, small_pieces: None) -> None:
    folder, _ = build(config_of(text), cache / "one")
    pids = [in_process(partial(build, config_of(text), cache / "three", share=(index, 3))) for index in range(3)]
    assert [exit_code(pid) for pid in pids] == [0, 0, 0]
    assert names_in(cache / "three") == [folder.name]
    assert tokens_in(cache / "three" / folder.name) == tokens_in(folder)
    assert read_json(cache / "three" / folder.name / "facts.json") == read_json(folder / "facts.json")


# --- built once, also by processes that are killed


@pytest.mark.processes
def test_a_piece_is_tokenized_by_one_process(
    text: Path, cache: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs that start at the same time share the work."""
    written = text.with_name("written")

    def note(path: Path, data: bytes, **options: Any) -> None:
        with open(written, "a") as file:
            file.write(f"{path.name}\n")
        write_atomic(path, data, **options)

    monkeypatch.setattr(corpus, "write_atomic", note)
    pids = [in_process(lambda: build(config_of(text), cache)) for _ in range(4)]
    assert [exit_code(pid) for pid in pids] == [0] * 4
    names = written.read_text().split()
    assert len(names) > 10
    assert sorted(names) == sorted(set(names))
    build(config_of(text), cache)
    assert written.read_text().split() == names


def test_a_piece_of_another_process_is_awaited(
    text: Path, cache: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process, which has locked a piece, ends without its tokens when those of all other pieces are there."""
    others: list[IO[str]] = []
    awaited: list[str] = []

    def lock_before(path: Path, **options: Any) -> IO[str]:
        if path.name == "3.lock" and not others:
            others.append(locks.open_lock(path))
            assert locks.lock_now(others[0])
        return locks.open_lock(path, **options)

    def end_other(path: Path, **options: Any) -> AbstractContextManager[None]:
        if path.name != "join.lock":
            awaited.append(path.name)
            built = {part.stem for part in path.parent.glob("*.npz")}
            assert {lock.stem for lock in path.parent.glob("*.lock")} - built == {"3"}
            others[0].close()
        return locks.long_lock(path, **options)

    monkeypatch.setattr(corpus, "open_lock", lock_before)
    monkeypatch.setattr(corpus, "long_lock", end_other)
    folder, _ = build(config_of(text), cache)
    assert awaited == ["3.lock"]
    num_ends = sum(tokens.count(END) for tokens in tokens_in(folder).values())
    assert num_ends == len(SENTENCES) + 1  # one of the last piece is divided


@pytest.mark.processes
def test_a_tokenizer_is_trained_by_one_process(text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = text.with_name("trained")

    def train(texts: Any, vocab_size: int) -> str:
        with open(written, "a") as file:
            file.write("trained\n")
        return train_bpe(texts, vocab_size)

    monkeypatch.setattr(corpus, "train_bpe", train)
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")
    pids = [in_process(lambda: build(config_of(text, tokenizer="bpe", vocab_size=300), cache)) for _ in range(3)]
    assert [exit_code(pid) for pid in pids] == [0] * 3
    assert written.read_text() == "trained\n"


@pytest.mark.processes
@pytest.mark.parametrize("num_kills", [12, pytest.param(300, marks=pytest.mark.slow)])
def test_killed_builds_leave_nothing_half_done(num_kills: int, text: Path, cache: Path, small_pieces: None) -> None:
    """Two processes work, and one is killed at a random moment: the files are absent, or equal to undisturbed ones."""
    cfg = config_of(text)
    expected, tokenizer = build(cfg, cache / "undisturbed")
    random_times = random.Random(0)
    num_killed = 0
    folder = cache / "killed" / expected.name
    for number in range(num_kills):
        limit_s = random_times.uniform(0.001, 0.05)

        def killed_build(limit_s: float = limit_s) -> None:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, limit_s)
            build(cfg, folder.parent)

        pids = [in_process(killed_build)]
        if number % 2:
            pids.append(in_process(killed_build))
        codes = [exit_code(pid) for pid in pids]
        assert set(codes) <= {0, -signal.SIGALRM}
        num_killed += codes.count(-signal.SIGALRM)
        if folder.exists():
            open_corpus(folder, tokenizer, 50, seed=0)
            assert tokens_in(folder) == tokens_in(expected)
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
    assert num_killed >= num_kills / 2
    build(cfg, folder.parent)
    assert names_in(folder.parent) == [folder.name]
    assert tokens_in(folder) == tokens_in(expected)


@pytest.mark.processes
def test_the_next_process_continues_a_killed_build(
    text: Path, cache: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(self: Any, parts: Path, folder: Path) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(corpus._Build, "_join", kill)
        assert exit_code(in_process(lambda: build(config_of(text), cache))) == -signal.SIGKILL
    monkeypatch.setattr(corpus._Build, "_note_corrupt", pytest.fail)
    monkeypatch.setattr(corpus, "write_atomic", pytest.fail)  # no piece is tokenized again
    folder, _ = build(config_of(text), cache)
    assert names_in(cache) == [folder.name]


def test_changed_text_has_other_tokens(text: Path, cache: Path) -> None:
    first, _ = build(config_of(text), cache)
    assert build(config_of(text, max_bad_records=5), cache)[0] == first
    assert build(config_of(text, held_out_every=7), cache)[0] != first
    write_jsonl(text, SENTENCES[::-1])
    second, _ = build(config_of(text), cache)
    assert second != first
    facts = [read_json(folder / "facts.json") or {} for folder in (first, second)]
    assert facts[0]["digests"] != facts[1]["digests"]


def test_text_that_changes_while_it_is_read_is_refused(
    text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(paths: Any, limit: int) -> Any:
        os.utime(text, (1, 1))
        return pieces_of(paths, limit)

    monkeypatch.setattr(corpus, "pieces_of", change)
    with pytest.raises(
        DataError, match=r"lm\.corpus\.files: a file was changed while it was read: start the run again"
    ):
        build(config_of(text), cache)


# --- corrupt records, too little text, damaged files


@pytest.fixture
def corrupt_text(text: Path) -> Path:
    lines = text.read_text().splitlines()
    for number in (10, 200, 201, 300):
        lines[number] = lines[number][:-3]
    text.write_text("\n".join(lines))
    return text


def test_too_many_corrupt_records_are_one_error(corrupt_text: Path, cache: Path) -> None:
    message = (
        rf"1 corrupt records, more than lm\.corpus\.max_bad_records=0: {corrupt_text}, line 11: not valid JSON .*:"
        r" repair or remove them, or raise the limit"
    )
    with pytest.raises(DataError, match=message):
        build(config_of(corrupt_text), cache)
    with pytest.raises(DataError, match=r"4 corrupt records, .*=3: .*line 11.*line 201.*; …: repair"):
        build(config_of(corrupt_text, max_bad_records=3), cache)


def test_few_corrupt_records_are_left_out(
    corrupt_text: Path, cache: Path, caplog: pytest.LogCaptureFixture, small_pieces: None
) -> None:
    folder, _ = build(config_of(corrupt_text, max_bad_records=4, held_out_every=2), cache)
    assert "4 corrupt records are left out" in caplog.text
    ends = [tokens.count(END) for tokens in tokens_in(folder).values()]
    assert sum(ends) == len(SENTENCES) - 4
    # The tokens are there, and have more corrupt records than another run accepts.
    with pytest.raises(DataError, match="4 corrupt records, more than"):
        build(config_of(corrupt_text, max_bad_records=3, held_out_every=2), cache)


def test_too_little_text_is_refused(text: Path, cache: Path) -> None:
    write_jsonl(text, ["a short text"])
    folder, tokenizer = build(config_of(text), cache)
    with pytest.raises(
        ConfigError, match=r"lm\.corpus\.files: the train text has 13 tokens, too few for a window of 20"
    ):
        open_corpus(folder, tokenizer, 20, seed=0)
    with pytest.raises(ConfigError, match="the held-out text has 0 tokens, too few for a window of 5 and the next one"):
        open_corpus(folder, tokenizer, 5, seed=0)
    text.write_text("")
    folder, tokenizer = build(config_of(text), cache)
    with pytest.raises(ConfigError, match="the train text has 0 tokens"):
        open_corpus(folder, tokenizer, 5, seed=0)


def test_damaged_files_are_named(text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, tokenizer = build(config_of(text), cache)
    np.save(folder / "train.npy", np.zeros(100, np.uint16))
    with pytest.raises(DataError, match=r"train\.npy is damaged: \d+ tokens expected: remove .*/tokens-"):
        open_corpus(folder, tokenizer, 50, seed=0)
    (folder / "facts.json").write_text("{}")
    with pytest.raises(DataError, match=r"facts\.json is damaged: it has no digests: remove .*/tokens-"):
        open_corpus(folder, tokenizer, 50, seed=0)
    monkeypatch.setattr(corpus, "write_atomic", lambda path, data: write_atomic(path, data[:-30] + bytes(30)))
    with pytest.raises(DataError, match=r"0\.npz is damaged \(.*\): remove .*\.parts"):
        build(config_of(text), cache / "other")


# --- folders that others use, and progress


@pytest.mark.processes
def test_the_tokens_of_another_user_are_read() -> None:
    with folder_for_all_users() as shared:
        text = write_jsonl(shared / "text.jsonl", SENTENCES)
        folder, _ = build(config_of(text), shared / "cache")
        found = as_other_user(lambda: str(build(config_of(text), shared / "cache")[0]))
        assert found == str(folder)
        message = as_other_user(lambda: build(config_of(text, held_out_every=3), shared / "cache"))
    assert message == (
        f"DataError: the tokens of the text cannot be kept in {shared}/cache (Permission denied): set data.root"
        " (or HPCDIST_DATA_DIR) to a folder in which you may write"
    )


def test_a_cache_that_is_no_folder_is_named(text: Path) -> None:
    with pytest.raises(DataError, match=r"the tokens of the text cannot be kept in .*text\.jsonl \(File exists\): set"):
        build(config_of(text), text)


def test_a_missing_file_is_named(text: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "find_text_files", lambda *_, **__: [text.with_name("missing")])
    with pytest.raises(DataError, match="missing cannot be read: No such file or directory"):
        build(config_of(text), cache)


def test_long_builds_report_progress_and_life(
    text: Path, cache: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(corpus, "_PROGRESS_S", 0.0)
    caplog.set_level(logging.INFO)
    beats: list[int] = []
    build(config_of(text), cache, alive=lambda: beats.append(1))
    assert len(beats) > 10
    assert "tokenizing the text: 3 of " in caplog.text
    caplog.clear()
    build(config_of(text, held_out_every=3), cache, share=(1, 2))
    assert "tokenizing" not in caplog.text


# --- tokenizers


def test_a_trained_tokenizer_restores_every_text(text: Path, cache: Path) -> None:
    cfg = config_of(text, tokenizer="bpe", vocab_size=300)
    folder, tokenizer = build(cfg, cache)
    assert tokenizer.vocab_size == 300
    words = "Sentence 5 äß 漢字 \x00 <|endoftext|>\r\n"
    assert tokenizer.decode(tokenizer.encode(words)) == words
    assert tokenizer.end_token not in tokenizer.encode(words)
    assert tokenizer.bytes_of(tokenizer.encode(words)) == len(words.encode())
    tokens = tokens_in(folder)["held_out"]
    assert tokens.count(tokenizer.end_token) == len(SENTENCES) // 20
    assert tokenizer.decode(tokens) == "".join(SENTENCES[19::20])
    again, _ = build(cfg, cache)
    assert again == folder
    other, _ = build(config_of(text, tokenizer="bpe", vocab_size=280), cache)
    assert other != folder


def test_large_texts_train_a_tokenizer_on_a_part(
    text: Path, cache: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained: list[str] = []

    def train(texts: Any, vocab_size: int) -> str:
        trained.extend(texts)
        return train_bpe(iter(trained), vocab_size)

    monkeypatch.setattr(corpus, "train_bpe", train)
    monkeypatch.setattr(corpus, "_TRAINED_BYTES", text.stat().st_size // 3)
    folder, tokenizer = build(config_of(text, tokenizer="bpe", vocab_size=300), cache)
    held_out = tokenizer.decode(tokens_in(folder)["held_out"])
    assert not [sentence for sentence in trained if sentence in held_out]
    assert 0.2 < len(trained) / len(SENTENCES) < 0.35
    numbers = [int(sentence.split()[1]) for sentence in trained]
    assert min(numbers) < 50
    assert max(numbers) > 250


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    path = folder / "tokenizer.json"
    path.write_text(train_bpe(iter(SENTENCES), 300))
    return path


def test_a_file_may_be_the_tokenizer(text: Path, cache: Path, tokenizer_file: Path) -> None:
    folder, tokenizer = build(config_of(text), cache, tokenizer_file=str(tokenizer_file))
    assert tokenizer.vocab_size == 300
    assert tokenizer.decode(tokens_in(folder)["held_out"]) == "".join(SENTENCES[19::20])
    other = tokenizer_file.read_text().replace("<|endoftext|>", "<other>")
    tokenizer_file.write_text(other)
    with pytest.raises(
        DataError, match=r"tokenizer\.json has none of the end tokens <\|endoftext\|>, .*: name its own"
    ):
        read_tokenizer(tokenizer_file)
    beside = tokenizer_file.with_name("tokenizer_config.json")
    for eos in ("<other>", {"content": "<other>"}):
        beside.write_text(json.dumps({"eos_token": eos}))
        assert read_tokenizer(tokenizer_file).end_token == 0
    beside.write_text('{"eos_token": "<none>"}')
    with pytest.raises(DataError, match=r"has no token '<none>', which tokenizer_config\.json names as eos_token"):
        read_tokenizer(tokenizer_file)
    beside.write_text("{")
    with pytest.raises(DataError, match=r"tokenizer_config\.json cannot be read"):
        read_tokenizer(tokenizer_file)
    beside.unlink()
    tokenizer_file = tokenizer_file.rename(tokenizer_file.with_name("own tokenizer.json"))
    tokenizer_file.write_text("{}")
    with pytest.raises(DataError, match=r"/own tokenizer\.json is not a file of the package tokenizers"):
        read_tokenizer(tokenizer_file)
    with pytest.raises(DataError, match=r"none\.json cannot be read"):
        build(config_of(text), cache, tokenizer_file=str(tokenizer_file.with_name("none.json")))


def test_a_large_vocabulary_needs_four_bytes(text: Path, cache: Path, tokenizer_file: Path) -> None:
    document = json.loads(tokenizer_file.read_text())
    document["added_tokens"].append({**document["added_tokens"][0], "id": 70_000, "content": "Sentence"})
    document["model"]["vocab"]["Sentence"] = 70_000
    document["added_tokens"][-1]["special"] = False
    tokenizer_file.write_text(json.dumps(document))
    folder, tokenizer = build(config_of(text), cache, tokenizer_file=str(tokenizer_file))
    assert tokenizer.vocab_size == 70_001
    assert np.load(folder / "train.npy").dtype == np.uint32
    assert max(tokens_in(folder)["train"]) == 70_000


def test_bytes_of_a_character_may_be_cut() -> None:
    tokenizer = ByteTokenizer()
    ids = [*tokenizer.encode("aß"), END]
    assert (tokenizer.bytes_of(ids), tokenizer.decode(ids)) == (3, "aß")
    assert tokenizer.decode(ids[:2]) == "a\N{REPLACEMENT CHARACTER}"


# --- the config section


def test_invalid_values_are_named(text: Path) -> None:
    with pytest.raises(ValueError, match="tokenizer=bpe and tokenizer_file exclude each other: leave out one of them"):
        CorpusConfig(tokenizer="bpe", tokenizer_file="t.json")
    with pytest.raises(ValueError, match="vocab_size must be >= 257"):
        CorpusConfig(vocab_size=256)
    cfg = config_of(text.with_name("none"), tokenizer_file="/none.json")
    assert cfg.missing_files("lm.corpus") == [
        f"lm.corpus.files: '{text.with_name('none')}' matches no file",
        "lm.corpus.tokenizer_file: no such file: /none.json",
    ]
    assert config_of(text).missing_files("lm.corpus") == []


# --- all ranks


def config_for(root: Path, files: Sequence[Path], **keys: Any) -> Config:
    return Config(
        seed=5,
        data=DataConfig(root=str(root)),
        sections={"lm": LmConfig(corpus=config_of(*files, **keys), sequence_length=20)},
    )


def summary(found: Corpus) -> dict[str, Any]:
    return {"first": found.train.read(0, np.arange(2)).tolist(), "digests": found.digests, "size": found.vocab_size}


def prepare_corpus(here: Rank, folder: Path, files: list[Path]) -> Any:
    run = RunDir(folder)
    with open_context(here, run, config_for(here.folder, [files[here.rank]])) as ctx:
        try:
            return summary(prepare(ctx, ctx._config))
        except DataError as error:
            return str(error)


@pytest.mark.processes
def test_all_ranks_have_the_same_corpus(text: Path, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    results = spawn_ranks(prepare_corpus, folder=run.path, files=[text, text])
    assert results[0] == results[1]
    assert results[0]["size"] == 257
    record = read_training(run.attempts()[-1])
    assert record is not None
    assert [(dataset.name, dataset.split, dataset.digest) for dataset in record.datasets] == [
        ("text", "train", results[0]["digests"]["train"]),
        ("text", "test", results[0]["digests"]["held_out"]),
    ]
    other = write_jsonl(tmp_path / "other.jsonl", SENTENCES[1:])
    results = spawn_ranks(prepare_corpus, folder=run.path, files=[text, other])
    assert results[0] == results[1]
    assert "rank 1 has read other text than rank 0 (digests " in results[0]
    assert "): put the same files on all nodes" in results[0]


def prepare_late(here: Rank, folder: Path, text: Path) -> None:
    """Rank 1 builds its tokens after rank 0 has sent a heartbeat with its own."""
    build = corpus.build
    with open_context(here, RunDir(folder), config_for(here.folder, [text])) as ctx:

        def build_in_turn(*arguments: Any, **options: Any) -> Any:
            if here.rank == 1:
                ctx.groups.store.wait(["rank 0 lives"])
            built = build(*arguments, **options)
            if here.rank == 0:
                ctx.timer.alive = lambda: ctx.groups.store.set("rank 0 lives", "")  # type: ignore[method-assign]
            return built

        corpus.build = build_in_turn
        prepare(ctx, ctx._config)


@pytest.mark.processes
def test_a_rank_lives_while_it_waits_for_another_node(text: Path, tmp_path: Path) -> None:
    spawn_ranks(prepare_late, folder=new_run(tmp_path).path, text=text)


def prepare_with_tokenizer(here: Rank, folder: Path, text: Path, tokenizer_file: Path) -> dict[str, Any]:
    run = RunDir(folder)
    with open_context(here, run, config_for(here.folder, [text], tokenizer_file=str(tokenizer_file))) as ctx:
        return summary(prepare(ctx, ctx._config))


def test_a_run_keeps_its_tokenizer(text: Path, tmp_path: Path, tokenizer_file: Path) -> None:
    run = new_run(tmp_path)
    assert isinstance(tokenizer_of_run(run), ByteTokenizer)
    found = prepare_with_tokenizer(Rank(0, 1, tmp_path), run.path, text, tokenizer_file)
    assert found["size"] == 300
    kept = tokenizer_of_run(run)
    assert isinstance(kept, FileTokenizer)
    assert kept.files[tokenizer_file.name] == tokenizer_file.read_text()
    # Without a file in the config, that of the first weights is taken.
    second = new_run(tmp_path, "second")
    second.init_from.mkdir()
    (second.init_from / "tokenizer.json").write_text(tokenizer_file.read_text())
    with open_context(Rank(0, 1, tmp_path), second, config_for(tmp_path, [text])) as ctx:
        assert summary(prepare(ctx, ctx._config)) == found
    third = new_run(tmp_path, "third")
    shutil.copytree(second.init_from, third.init_from)
    message = r"^lm\.corpus\.tokenizer=bpe is not for the weights of model\.init_from=.*, which have a tokenizer: leave"
    with pytest.raises(ConfigError, match=message):
        prepare_again(third, tmp_path, text, tokenizer="bpe")


def prepare_again(run: RunDir, root: Path, text: Path, **keys: Any) -> Corpus:
    """Prepare the corpus in a new attempt of a run."""
    with open_context(Rank(0, 1, root), run, config_for(root, [text], **keys)) as ctx:
        return prepare(ctx, ctx._config)


def add_checkpoint(run: RunDir) -> None:
    folder = run.checkpoints / "step-00000001"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


def test_a_run_with_a_checkpoint_keeps_its_tokens(text: Path, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    bpe = {"tokenizer": "bpe", "vocab_size": 300}
    first = prepare_again(run, tmp_path, text, **bpe)
    files = dict(first.tokenizer.files)
    add_checkpoint(run)
    # A copy of the file has another time: without the run's own, a tokenizer would be trained anew.
    os.utime(text, (1, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "train_bpe", pytest.fail)
        again = prepare_again(run, tmp_path, text, **bpe)
    assert (again.digests, again.tokenizer.files) == (first.digests, files)

    write_jsonl(text, [*SENTENCES, "one more sentence"])
    message = r"^lm\.corpus\.files: the train text is not that of the run's checkpoint \(digest \w+, not"
    for _ in range(2):  # a refused attempt is not the one to compare with
        with pytest.raises(DataError, match=message):
            prepare_again(run, tmp_path, text, **bpe)
    assert tokenizer_of_run(run).files == files


def test_a_run_without_a_checkpoint_may_change_its_text(text: Path, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    first = prepare_again(run, tmp_path, text, tokenizer="bpe", vocab_size=300)
    write_jsonl(text, SENTENCES[::-1])
    again = prepare_again(run, tmp_path, text)
    assert again.digests != first.digests
    assert isinstance(tokenizer_of_run(run), ByteTokenizer)


def test_any_number_of_ranks_reads_each_window_once(text: Path, cache: Path) -> None:
    """A run on 4 ranks that continues on 3 and then on 2 in the middle of an epoch."""
    folder, _ = build(config_of(text), cache)
    windows = TokenWindows(folder / "train.npy", 20, seed=9)
    batch_size = 7
    num_steps = -(-windows.num_windows // batch_size)
    for epoch in range(2):
        found: list[tuple[int, ...]] = []
        for step in range(num_steps):
            num_ranks = 4 - 3 * step // num_steps
            begin = step * batch_size
            size = min(batch_size, windows.num_windows - begin)
            for rank in range(num_ranks):
                share = share_of(rank, num_ranks, size)
                rows = windows.read(epoch, np.arange(begin + share.start, begin + share.stop))
                found += [tuple(row) for row in rows.tolist()]
        expected = [tuple(row) for row in windows.read_items(np.arange(windows.num_windows)).tolist()]
        assert sorted(found) == sorted(expected)
        assert found != expected

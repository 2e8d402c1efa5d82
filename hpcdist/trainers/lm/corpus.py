"""The text of trainer `lm` as two files of tokens, for training and for the evaluation.

They are built once, in a folder of `data.root`; its name has a hash of the text and of the tokenizer. All processes
that need them share the work, also those of other runs and, if they share the folder, of other nodes:

    bpe-HASH.json             a tokenizer that was trained on the text
    tokens-HASH.parts/        the tokens of a piece of the text each, while the processes work
    tokens-HASH/              train.npy, held_out.npy, facts.json

A process takes a piece that has no tokens yet and that no other process has locked. When there are tokens of all
pieces, one process joins them. Every file appears complete, by a rename, and the last one is the folder: a process may
be killed at any time, and the next one continues with the pieces that are left.
"""

import errno
import hashlib
import io
import json
import logging
import os
import secrets
import shutil
import sysconfig
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpcdist.config.roles import share_of
from hpcdist.config.schema import Config
from hpcdist.data.datasets import digest_of
from hpcdist.data.documents import (
    FOLDER_SUFFIXES,
    PIECE_BYTES,
    TEXT_PART_BYTES,
    Document,
    Piece,
    documents_of,
    pieces_of,
    split_held_out,
)
from hpcdist.data.text_files import find_text_files
from hpcdist.data.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    TokenArray,
    Tokenizer,
    read_tokenizer,
    tokenizer_of_run,
    train_bpe,
)
from hpcdist.data.windows import TokenWindows, token_type
from hpcdist.errors import ConfigError, DataError, RunFolderError
from hpcdist.host import retry
from hpcdist.host.files import fsync_folder, write_atomic
from hpcdist.host.json_files import fill, read_json, write_json
from hpcdist.host.locks import lock_now, long_lock, open_lock
from hpcdist.rank.context import Context
from hpcdist.run.checkpoint_files import newest_step
from hpcdist.run.folder import RunDir
from hpcdist.run.training_record import read_training
from hpcdist.run.weight_files import TOKENIZER_FILE, TOKENIZER_FOLDER
from hpcdist.trainers.lm import CorpusConfig, LmConfig, two_tokenizers

log = logging.getLogger(__name__)

#: The folder of the tokens, below `data.root`.
CACHE_FOLDER = "tokens"
#: The files of tokens, without their ending.
TRAIN, HELD_OUT = "train", "held_out"
SPLITS = (TRAIN, HELD_OUT)
#: The name of the text in the record of an attempt and in MLflow, and those of its splits.
DATASET = "text"
_SPLITS_IN_RECORD = {TRAIN: "train", HELD_OUT: "test"}
FACTS_FILE = "facts.json"
#: Part of the hash; to be raised when the same text gives other files.
FORMAT = 3
#: Text that is tokenized at once: the package tokenizers needs about 100 bytes of memory for a token.
_BATCH_CHARACTERS = 1 << 20
#: Text on which a tokenizer is trained, in evenly spaced pieces of the files. More text changes little.
_TRAINED_BYTES = 64 << 20
#: Corrupt records that are kept for messages, and that a message shows.
_KEPT_REPORTS, _SHOWN_REPORTS = 20, 2
#: Time between two messages on the progress.
_PROGRESS_S = 10.0

#: Called now and then during the work, for the heartbeat of a rank.
Alive = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class CorpusFacts:
    """The content of `facts.json`: facts about the files of tokens beside it."""

    digests: dict[str, str]  #: of each split: equal digests mean equal tokens in the same order
    num_tokens: dict[str, int]  #: of each split
    num_bytes: dict[str, int]  #: of the text of each split, in UTF-8
    num_corrupt: int  #: number of corrupt records, which were left out
    corrupt: list[str]  #: the first ones: the place of each, and the reason


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Training and held-out text as windows of tokens."""

    train: TokenWindows
    held_out: TokenWindows
    tokenizer: Tokenizer
    digests: dict[str, str]  #: of the tokens of `train` and `held_out`, as in MLflow

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the tokenizer."""
        return self.tokenizer.vocab_size


def prepare(ctx: Context, cfg: Config) -> Corpus:
    """Return the corpus of the config; its tokens are built first if they are missing. Call it on every rank.

    A run with a checkpoint keeps its tokenizer. Raises ConfigError if there is no text or too little, and DataError if
    it cannot be read, has too many corrupt records, differs between the nodes, or is not that of the checkpoint.
    """
    lm = cfg.section(LmConfig)
    topology = ctx.topology
    has_checkpoint = ctx.groups.broadcast(newest_step(ctx.run) is not None)
    kept_tokenizer = None
    if has_checkpoint:  # its weights fit these tokens only; one of the config may have been trained on other text
        kept_tokenizer = tokenizer_of_run(ctx.run)
    first_weights_tokenizer = ctx.run.init_from / TOKENIZER_FILE
    tokenizer_file = lm.corpus.tokenizer_file
    if not tokenizer_file and first_weights_tokenizer.is_file():
        if lm.corpus.tokenizer != CorpusConfig.tokenizer and not has_checkpoint:
            raise ConfigError(two_tokenizers(lm.corpus, cfg.model.init_from))
        tokenizer_file = str(first_weights_tokenizer)
    folder, tokenizer = build(
        lm.corpus,
        Path(cfg.data.root).expanduser() / CACHE_FOLDER,
        tokenizer_file=tokenizer_file,
        kept_tokenizer=kept_tokenizer,
        share=(topology.local_rank, topology.local_world_size),
        alive=ctx.timer.alive,
    )
    corpus = open_corpus(folder, tokenizer, lm.sequence_length, cfg.seed)
    ctx.groups.await_all(ctx.timer.alive)  # a node with slower text or disk may need minutes more
    digests = ctx.groups.all_gather(" ".join(corpus.digests.values()))
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise DataError(
                f"rank {rank} has read other text than rank 0 (digests {digest}, not {digests[0]}): put the same files"
                " on all nodes"
            )
    if has_checkpoint:
        _require_same_text(corpus.digests, ctx.groups.broadcast(_digests_before(ctx.run)))
    if ctx.is_main:
        if not tokenizer.files:  # an attempt without a checkpoint may have had files
            shutil.rmtree(ctx.run.artifacts / TOKENIZER_FOLDER, ignore_errors=True)
        for name, content in tokenizer.files.items():
            ctx.report.artifact(f"{TOKENIZER_FOLDER}/{name}").write_text(content)
    source = ", ".join(lm.corpus.files) or sysconfig.get_path("stdlib")
    num_windows = {TRAIN: corpus.train.num_windows, HELD_OUT: lm.num_evaluated(corpus.held_out.num_windows)}
    for split in SPLITS:
        ctx.report.log_dataset(
            DATASET,
            split=_SPLITS_IN_RECORD[split],
            num_samples=num_windows[split],
            digest=corpus.digests[split],
            source=source,
        )
    return corpus


def _digests_before(run: RunDir) -> dict[str, str]:
    """Return the recorded digest of each split in the last attempt that had its tokens; empty without a record."""
    for attempt in reversed(run.attempts()):
        record = read_training(attempt)
        if record is None:
            continue
        digests = {dataset.split: dataset.digest for dataset in record.datasets if dataset.name == DATASET}
        if digests:
            return digests
    return {}


def _require_same_text(digests: Mapping[str, str], before: Mapping[str, str]) -> None:
    """Raise DataError if the tokens of a run with a checkpoint are not those of the attempt before."""
    for split, name in _SPLITS_IN_RECORD.items():
        expected = before.get(name, digests[split])
        if digests[split] != expected:
            raise DataError(
                f"lm.corpus.files: the {split.replace('_', '-')} text is not that of the run's checkpoint (digest"
                f" {digests[split]}, not {expected}): restore the files, or start a new run with model.init_from"
            )


def open_corpus(folder: Path, tokenizer: Tokenizer, length: int, seed: int) -> Corpus:
    """Return the corpus in a folder of `build`, in windows of `length` tokens.

    Raises DataError if a file of tokens is damaged, and ConfigError if there is not a window of both splits.
    """
    facts = _read_facts(folder)
    windows = {}
    for split in SPLITS:
        path = folder / f"{split}.npy"
        windows[split] = TokenWindows(path, length, seed=seed)
        if windows[split].num_tokens != facts.num_tokens[split]:
            raise DataError(f"{path} is damaged: {facts.num_tokens[split]} tokens expected: remove {folder}")
        if windows[split].num_windows == 0:
            raise ConfigError(
                f"lm.corpus.files: the {split.replace('_', '-')} text has {facts.num_tokens[split]} tokens, too few for"
                f" a window of {length} and the next one: add text, or lower lm.sequence_length"
            )
    return Corpus(
        train=windows["train"],
        held_out=windows["held_out"],
        tokenizer=tokenizer,
        digests=facts.digests,
    )


def _read_facts(folder: Path) -> CorpusFacts:
    path = folder / FACTS_FILE
    try:
        return fill(CorpusFacts, read_json(path) or {}, path)
    except (RunFolderError, OSError) as error:
        raise DataError(f"{error}: remove {folder}") from error


def build(
    cfg: CorpusConfig,
    cache: Path,
    *,
    tokenizer_file: str = "",
    kept_tokenizer: Tokenizer | None = None,
    share: tuple[int, int] = (0, 1),
    alive: Alive = lambda: None,
) -> tuple[Path, Tokenizer]:
    """Build the tokens of a text, together with all processes that do so now, unless they are there already.

    Args:
        cache: the folder in which they are kept.
        tokenizer_file: a `tokenizer.json` instead of `cfg.tokenizer`.
        kept_tokenizer: that of the run, instead of both.
        share: index and number of the processes on this node; each begins with another piece of the text.

    Returns the folder with the files of tokens, and the tokenizer. Raises ConfigError and DataError like `prepare`.
    """
    files = find_text_files(cfg.files, key="lm.corpus.files", folder_suffixes=FOLDER_SUFFIXES)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        build_ = _Build(cfg, cache, files, share, alive)
        tokenizer = kept_tokenizer or build_.tokenizer(tokenizer_file)
        folder = build_.tokens(tokenizer)
    except OSError as error:
        raise DataError(
            f"the tokens of the text cannot be kept in {cache} ({error.strerror or error}): set data.root (or"
            " HPCDIST_DATA_DIR) to a folder in which you may write"
        ) from error
    facts = _read_facts(folder)
    if facts.num_corrupt > cfg.max_bad_records:
        raise _too_many_corrupt(facts.num_corrupt, facts.corrupt, cfg.max_bad_records)
    if facts.num_corrupt and share[0] == 0:
        log.warning("%d corrupt records are left out: %s", facts.num_corrupt, _listed(facts.corrupt))
    return folder, tokenizer


def _too_many_corrupt(number: int, reports: Sequence[str], limit: int) -> DataError:
    return DataError(
        f"{number} corrupt records, more than lm.corpus.max_bad_records={limit}: {_listed(reports)}: repair or remove"
        " them, or raise the limit"
    )


def _listed(reports: Sequence[str]) -> str:
    shown = list(reports[:_SHOWN_REPORTS])
    if len(reports) > len(shown):
        shown.append("…")
    return "; ".join(shown)


class _Build:
    """The work of one process on the tokens of a text.

    Raises OSError for the cache, and ConfigError and DataError for the text.
    """

    def __init__(
        self, cfg: CorpusConfig, cache: Path, files: Sequence[Path], share: tuple[int, int], alive: Alive
    ) -> None:
        self._cfg = cfg
        self._cache = cache
        self._files = files
        self._share = share
        self._alive = alive
        self._stamps = self._read_stamps()
        self._pieces: list[Piece] = []  #: once they are needed
        self._corrupt: list[str] = []  #: corrupt records in the pieces of this process
        self._reported = time.monotonic()

    def _read_stamps(self) -> list[tuple[str, int, int]]:
        """Return name, size and time of change of each file, which stand for its content."""
        stamps = []
        for path in self._files:
            try:
                about = path.stat()
            except OSError as error:
                raise DataError(f"{path} cannot be read: {error.strerror or error}") from error
            stamps.append((str(path), about.st_size, about.st_mtime_ns))
        return stamps

    def _hash(self, *parts: Any) -> str:
        """Return a hash of the text, of how it is divided, and of `parts`."""
        content = json.dumps([FORMAT, PIECE_BYTES, TEXT_PART_BYTES, self._stamps, self._cfg.held_out_every, *parts])
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def _documents(self, piece: Piece, on_corrupt: Callable[[str], None]) -> Iterator[tuple[Document, bool]]:
        """Yield the documents of a piece, and whether each is held out."""
        return split_held_out(documents_of(piece, on_corrupt), self._cfg.held_out_every)

    # --- the tokenizer

    def tokenizer(self, tokenizer_file: str) -> Tokenizer:
        """Return the tokenizer of the config; one that is trained on the text is trained once."""
        if tokenizer_file:
            return read_tokenizer(Path(tokenizer_file))
        if self._cfg.tokenizer == "byte":
            return ByteTokenizer()
        path = self._cache / f"bpe-{self._hash(self._cfg.vocab_size)}.json"
        if not retry.exists(path):
            waiting = "waiting for another process that trains the tokenizer"
            with long_lock(path.with_suffix(".lock"), waiting=waiting, shared=True, alive=self._alive):
                if not retry.exists(path):
                    self._pieces = pieces_of(self._files, PIECE_BYTES)
                    log.info("training a tokenizer of %d tokens", self._cfg.vocab_size)
                    document = train_bpe(self._texts_for_training(), self._cfg.vocab_size)
                    write_atomic(path, document, durable=True)
        return FileTokenizer(path.read_text(), "", str(path))

    def _texts_for_training(self) -> Iterator[str]:
        """Yield the text of evenly spaced pieces, without held-out documents."""
        sizes = [sum(span.num_bytes for span in piece) for piece in self._pieces]
        num_pieces = len(sizes)
        if sum(sizes) > _TRAINED_BYTES:
            num_pieces = max(1, num_pieces * _TRAINED_BYTES // sum(sizes))
        for number in range(num_pieces):
            piece = self._pieces[number * len(self._pieces) // num_pieces]
            # Corrupt records are reported when the tokens are built.
            for document, is_held_out in self._documents(piece, lambda report: None):
                self._alive()
                if not is_held_out:
                    yield document.text

    # --- the tokens

    def tokens(self, tokenizer: Tokenizer) -> Path:
        """Return the folder with the tokens, after building it, if need be."""
        content = sorted(tokenizer.files.items())
        folder = self._cache / f"tokens-{self._hash(content)}"
        parts = folder.with_suffix(".parts")
        if not retry.exists(folder):
            self._pieces = self._pieces or pieces_of(self._files, PIECE_BYTES)
            parts.mkdir(exist_ok=True)
            try:
                self._build_in(parts, folder, tokenizer)
            except FileNotFoundError:
                # Another process has joined the parts meanwhile, and removed them.
                if not retry.exists(folder):
                    raise
        shutil.rmtree(parts, ignore_errors=True)  # perhaps another user's
        return folder

    def _build_in(self, parts: Path, folder: Path, tokenizer: Tokenizer) -> None:
        """Build the tokens in `parts`, and join them to `folder`."""
        self._build_parts(parts, folder, tokenizer)
        with long_lock(parts / "join.lock", shared=True, alive=self._alive):
            if not retry.exists(folder):
                self._join(parts, folder)

    def _build_parts(self, parts: Path, folder: Path, tokenizer: Tokenizer) -> None:
        """Build the tokens of each piece that no other process builds; then wait for those of the other pieces."""
        num_pieces = len(self._pieces)
        first = share_of(*self._share, num_pieces).start
        for number in (*range(first, num_pieces), *range(first)):
            with open_lock(parts / f"{number}.lock", shared=True) as lock:
                if lock_now(lock):
                    self._build_part(parts, folder, number, tokenizer)
        for number in range(num_pieces):
            if not _is_built(parts, folder, number):  # by another process, which works or was killed
                with long_lock(parts / f"{number}.lock", shared=True, alive=lambda: self._note_progress(parts)):
                    self._build_part(parts, folder, number, tokenizer)

    def _build_part(self, parts: Path, folder: Path, number: int, tokenizer: Tokenizer) -> None:
        """Write the tokens of a piece, unless they are there."""
        if _is_built(parts, folder, number):
            return
        splits: dict[str, list[TokenArray]] = {split: [] for split in SPLITS}
        num_bytes = dict.fromkeys(SPLITS, 0)
        num_corrupt_before = len(self._corrupt)
        end = np.array([tokenizer.end_token])
        for batch in _batches(self._documents(self._pieces[number], self._note_corrupt)):
            texts = [document.text for document, _ in batch]
            for (document, is_held_out), tokens in zip(batch, tokenizer.encode_documents(texts), strict=True):
                split = TRAIN
                if is_held_out:
                    split = HELD_OUT
                splits[split].append(tokens)
                if document.ends:
                    splits[split].append(end)
                num_bytes[split] += len(document.text.encode())
            self._note_progress(parts)
        kind = token_type(tokenizer.vocab_size)
        arrays: dict[str, TokenArray] = {}
        for split, tokens_of_split in splits.items():
            arrays[split] = np.concatenate([np.empty(0, kind), *tokens_of_split], dtype=kind, casting="unsafe")
        facts = CorpusFacts(
            digests={split: digest_of(torch.from_numpy(array)) for split, array in arrays.items()},
            num_tokens={split: len(array) for split, array in arrays.items()},
            num_bytes=num_bytes,
            num_corrupt=len(self._corrupt) - num_corrupt_before,
            corrupt=self._corrupt[num_corrupt_before:][:_KEPT_REPORTS],
        )
        content = io.BytesIO()
        facts_bytes = np.frombuffer(json.dumps(asdict(facts)).encode(), np.uint8)
        np.savez(content, facts=facts_bytes, train=arrays[TRAIN], held_out=arrays[HELD_OUT])
        write_atomic(_part(parts, number), content.getvalue())

    def _note_corrupt(self, report: str) -> None:
        """Keep a corrupt record of this process. Raises DataError if there are too many."""
        self._corrupt.append(report)
        if len(self._corrupt) > self._cfg.max_bad_records:
            raise _too_many_corrupt(len(self._corrupt), self._corrupt, self._cfg.max_bad_records)

    def _note_progress(self, parts: Path) -> None:
        """Report that this process lives; the first one of a node also logs the progress now and then."""
        self._alive()
        index, _ = self._share
        now = time.monotonic()
        if index == 0 and now - self._reported >= _PROGRESS_S:
            self._reported = now
            num_done = sum(1 for _ in parts.glob("*.npz"))
            log.info("tokenizing the text: %d of %d pieces are done", num_done, len(self._pieces))

    def _join(self, parts: Path, folder: Path) -> None:
        """Join the tokens of all pieces to files in `folder`, which appears complete. The caller holds the lock."""
        for left in self._cache.glob(f".{folder.name}.*"):  # of a killed process
            shutil.rmtree(left, ignore_errors=True)
        if self._read_stamps() != self._stamps:
            raise DataError("lm.corpus.files: a file was changed while it was read: start the run again")
        new = self._cache / f".{folder.name}.{secrets.token_hex(4)}"
        new.mkdir()
        try:
            paths = [_part(parts, number) for number in range(len(self._pieces))]
            facts = [_read_part_facts(path) for path in paths]
            for split in SPLITS:
                num_tokens = sum(part.num_tokens[split] for part in facts)
                _write_array(new / f"{split}.npy", _arrays(paths, split, self._alive), num_tokens)
            joined = CorpusFacts(
                digests={split: digest_of([part.digests[split] for part in facts]) for split in SPLITS},
                num_tokens=_sums([part.num_tokens for part in facts]),
                num_bytes=_sums([part.num_bytes for part in facts]),
                num_corrupt=sum(part.num_corrupt for part in facts),
                corrupt=[report for part in facts for report in part.corrupt][:_KEPT_REPORTS],
            )
            write_json(new / FACTS_FILE, asdict(joined), durable=True)
            os.rename(new, folder)
            fsync_folder(self._cache)
        except OSError as error:
            shutil.rmtree(new, ignore_errors=True)
            # On a file system without locks, another process may have been faster.
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise


def _batches(documents: Iterator[tuple[Document, bool]]) -> Iterator[list[tuple[Document, bool]]]:
    """Yield lists of documents with about _BATCH_CHARACTERS."""
    batch = []
    num_characters = 0
    for document, is_held_out in documents:
        batch.append((document, is_held_out))
        num_characters += len(document.text)
        if num_characters >= _BATCH_CHARACTERS:
            yield batch
            batch = []
            num_characters = 0
    if batch:
        yield batch


def _sums(counts: Sequence[dict[str, int]]) -> dict[str, int]:
    return {split: sum(count[split] for count in counts) for split in SPLITS}


# The tokens of a piece: a file of numpy's format `.npz`; its reader verifies a checksum.


def _part(parts: Path, number: int) -> Path:
    return parts / f"{number}.npz"


def _is_built(parts: Path, folder: Path, number: int) -> bool:
    """Return whether there are tokens of a piece, or of all pieces: then the parts are removed."""
    return retry.exists(_part(parts, number)) or retry.exists(folder)


def _read_part_facts(path: Path) -> CorpusFacts:
    with _open_part(path) as part:
        return CorpusFacts(**json.loads(part["facts"].tobytes()))


@contextmanager
def _open_part(path: Path) -> Iterator[Any]:
    """Open a file of parts. Raises DataError if it is damaged."""
    try:
        # A file of our own, because numpy leaves its own one open if the content is damaged.
        with open(path, "rb") as file, np.load(file, allow_pickle=False) as part:
            yield part
    except (ValueError, LookupError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} is damaged ({error}): remove {path.parent}") from error


def _arrays(paths: Sequence[Path], split: str, alive: Alive) -> Iterator[TokenArray]:
    """Yield the tokens of a split of each piece."""
    for path in paths:
        alive()
        with _open_part(path) as part:
            tokens: TokenArray = part[split]
        yield tokens


def _write_array(path: Path, arrays: Iterator[TokenArray], num_tokens: int) -> None:
    """Write arrays of tokens as one array to a file of numpy's format `.npy`, and wait until it is on disk."""
    first = next(arrays, np.empty(0, np.uint16))
    with open(path, "wb") as file:
        header = {"descr": np.lib.format.dtype_to_descr(first.dtype), "fortran_order": False, "shape": (num_tokens,)}
        np.lib.format.write_array_header_1_0(file, header)
        file.write(first.tobytes())
        for array in arrays:
            file.write(array.tobytes())
        file.flush()
        os.fsync(file.fileno())

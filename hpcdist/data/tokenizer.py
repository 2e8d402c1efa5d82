"""Tokenizers of language models: bytes, a file `tokenizer.json`, and byte-pair encoding that is trained on a text."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from hpcdist.data import NUM_BYTE_TOKENS
from hpcdist.errors import DataError, shortened
from hpcdist.run.folder import RunDir
from hpcdist.run.weight_files import TOKENIZER_CONFIG, TOKENIZER_FILE, TOKENIZER_FOLDER

TokenArray = npt.NDArray[np.unsignedinteger[Any]]

#: End tokens of common tokenizers, for a file without a configuration beside it.
END_TEXTS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[SEP]")
#: Values of a byte.
NUM_BYTES = NUM_BYTE_TOKENS - 1


class Tokenizer(Protocol):
    """Translates between text and token ids."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens: ids are 0 to `vocab_size` - 1."""

    @property
    def end_token(self) -> int:
        """The token between documents."""

    @property
    def files(self) -> Mapping[str, str]:
        """The content of its files by name, of which another process can make the tokenizer; empty for bytes."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, without an end token. The names of special tokens in it are plain text."""

    def encode_documents(self, texts: Sequence[str]) -> list[TokenArray]:
        """Return the tokens of each text, [n], without end tokens."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens, without special tokens."""

    def bytes_of(self, ids: Sequence[int]) -> int:
        """Return the number of bytes of the text of tokens.

        For tokens of which the first or the last one is part of a character, it may differ by 3 bytes for each.
        """


class ByteTokenizer:
    """The bytes of UTF-8 as tokens, and an end token."""

    vocab_size = NUM_BYTE_TOKENS
    end_token = NUM_BYTES
    files: Mapping[str, str] = {}

    def encode(self, text: str) -> list[int]:
        """See Tokenizer."""
        return list(text.encode())

    def encode_documents(self, texts: Sequence[str]) -> list[TokenArray]:
        """See Tokenizer."""
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """See Tokenizer."""
        return bytes(token for token in ids if token < NUM_BYTES).decode(errors="replace")

    def bytes_of(self, ids: Sequence[int]) -> int:
        """See Tokenizer."""
        return sum(token < NUM_BYTES for token in ids)


class FileTokenizer:
    """A tokenizer of the package tokenizers.

    Args:
        document: the content of its file.
        end_text: the text of its end token; empty: the first one of END_TEXTS that it has.
        source: the path of the file, for errors.

    Raises DataError if the content is not that of a tokenizer, or has no end token.
    """

    def __init__(self, document: str, end_text: str, source: str) -> None:
        tokenizers = _import_tokenizers()
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(document)
        except Exception as error:  # the package documents none
            raise DataError(f"{source} is not a file of the package tokenizers: {shortened(str(error))}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        # A document about language models may contain the name of a special token.
        self._tokenizer.encode_special_tokens = True
        self.vocab_size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        end_text = self._find_end_text(end_text, source)
        self.end_token: int = self._tokenizer.token_to_id(end_text)
        self.files: Mapping[str, str] = {
            TOKENIZER_FILE: document,
            TOKENIZER_CONFIG: json.dumps({"eos_token": end_text}),
        }

    def _find_end_text(self, named: str, source: str) -> str:
        """Return the text of the end token: the named one, or one of END_TEXTS."""
        if named:
            if self._tokenizer.token_to_id(named) is None:
                raise DataError(f"{source} has no token {named!r}, which {TOKENIZER_CONFIG} names as eos_token")
            return named
        for text in END_TEXTS:
            if self._tokenizer.token_to_id(text) is not None:
                return text
        raise DataError(
            f"{source} has none of the end tokens {', '.join(END_TEXTS)}: name its own as eos_token in a"
            f" {TOKENIZER_CONFIG} beside it"
        )

    def encode(self, text: str) -> list[int]:
        """See Tokenizer."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_documents(self, texts: Sequence[str]) -> list[TokenArray]:
        """See Tokenizer."""
        encodings = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        """See Tokenizer."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def bytes_of(self, ids: Sequence[int]) -> int:
        """See Tokenizer."""
        return len(self.decode(ids).encode())


def _import_tokenizers() -> Any:
    """Import the package, which then uses as many threads as torch in this rank."""
    os.environ.setdefault("RAYON_NUM_THREADS", str(torch.get_num_threads()))
    import tokenizers

    return tokenizers


def read_tokenizer(path: Path) -> FileTokenizer:
    """Return the tokenizer of a `tokenizer.json`, with the end token that the configuration beside it names, if any.

    Raises DataError if one of the files cannot be read.
    """
    current = path
    try:
        document = path.read_text()
        config: Any = {}
        current = path.with_name(TOKENIZER_CONFIG)
        if current.is_file():
            config = json.loads(current.read_text())
    except (OSError, ValueError) as error:
        raise DataError(f"{current} cannot be read ({error}): write it again") from error
    end_text = ""
    if isinstance(config, dict):
        end_text = config.get("eos_token") or ""
    if isinstance(end_text, dict):  # an added token with its properties
        end_text = end_text.get("content", "")
    return FileTokenizer(document, str(end_text), str(path))


def tokenizer_of_run(run: RunDir) -> Tokenizer:
    """Return the tokenizer with which a run was trained. Raises DataError if its files are damaged."""
    path = run.artifacts / TOKENIZER_FOLDER / TOKENIZER_FILE
    if path.is_file():
        return read_tokenizer(path)
    return ByteTokenizer()


def train_bpe(texts: Iterator[str], vocab_size: int) -> str:
    """Train byte-pair encoding with at most `vocab_size` tokens, 257 or more; return the content of its file."""
    tokenizers = _import_tokenizers()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TEXTS[0]],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    document: str = tokenizer.to_str()
    return document

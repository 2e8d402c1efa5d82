"""Text as a stream of tokens: files, tokenizer, held-out part, and batches of consecutive tokens.

Batches follow https://docs.pytorch.org/tutorials/beginner/transformer_tutorial.html: the stream is split into columns,
and a batch has the next rows of all columns, so that the hidden state of a batch continues in the next one.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcdist.data.text_files import find_text_files
from hpcdist.errors import ConfigError
from hpcdist.trainers.rnn import RnnConfig

UNKNOWN = "<unk>"
#: One in this number of files is held out for the perplexity; of fewer files, the same fraction of the text at its end.
HELD_OUT_EVERY = 20
#: Values of a byte.
NUM_BYTES = 256
#: Tokens of the shortest column: an input and its target.
MIN_COLUMN_LENGTH = 2
#: A word or separators with the space before, or a line end with the indentation of the next line. Joined, the pieces
#: are the text.
PIECES = r" ?\w+| ?[^\w\s]+|\s+(?!\S)|\s+"


def encode_bytes(texts: Sequence[str]) -> list[list[int]]:
    """Return the bytes of UTF-8 as tokens."""
    return [list(text.encode()) for text in texts]


def word_encoder(texts: Sequence[str], max_size: int) -> tuple[Callable[[Sequence[str]], list[list[int]]], int]:
    """Return an encoder to the most frequent words, and the size of the vocabulary; token 0 replaces all others."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.WordLevel(unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(PIECES), "isolated")
    trainer = trainers.WordLevelTrainer(vocab_size=max_size, special_tokens=[UNKNOWN], show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)

    def encode(texts: Sequence[str]) -> list[list[int]]:
        encodings = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    return encode, tokenizer.get_vocab_size()


@dataclass(frozen=True)
class TextTokens:
    """Training and held-out text as tokens, int32 [n]."""

    train: Tensor
    held_out: Tensor
    vocab_size: int


def load_corpus(cfg: RnnConfig, seed: int, alive: Callable[[], None] = lambda: None) -> TextTokens:
    """Read, split and tokenize the text. Raises ConfigError if there is none or too little.

    `alive` is called before each file is read.
    """
    texts = read_texts(cfg.files, cfg.max_corpus_mb, seed, alive)
    if len(texts) >= HELD_OUT_EVERY:
        train = [text for number, text in enumerate(texts) if number % HELD_OUT_EVERY != 0]
        held_out = texts[::HELD_OUT_EVERY]
    else:
        joined = "".join(texts)
        cut = round(len(joined) * (1 - 1 / HELD_OUT_EVERY))
        train = [joined[:cut]]
        held_out = [joined[cut:]]
    if cfg.tokenizer == "byte":
        return TextTokens(_stream(encode_bytes(train)), _stream(encode_bytes(held_out)), NUM_BYTES)
    # The vocabulary is that of the training text; other words of the held-out text are unknown, as in use.
    encode, vocab_size = word_encoder(train, cfg.vocab_size)
    return TextTokens(_stream(encode(train)), _stream(encode(held_out)), vocab_size)


def _stream(texts: list[list[int]]) -> Tensor:
    """Return the tokens of all texts, one after another, int32 [n]."""
    return torch.cat([torch.tensor(tokens, dtype=torch.int32) for tokens in texts])


def read_texts(
    patterns: Sequence[str], max_mb: float, seed: int, alive: Callable[[], None] = lambda: None
) -> list[str]:
    """Return the texts of the files in an order that `seed` determines, at most `max_mb` in total.

    Without patterns it reads the source of Python's standard library. Raises ConfigError for a pattern without files
    and for a file that cannot be read.
    """
    paths = find_text_files(patterns, key="rnn.files")
    random.Random(seed).shuffle(paths)  # noqa: S311  # not for cryptography
    texts = []
    num_bytes_left = int(max_mb * 1e6)
    for path in paths:
        alive()
        try:
            with open(path, "rb") as file:
                text = file.read(num_bytes_left).decode(errors="replace")
        except OSError as error:
            raise ConfigError(f"rnn.files: {path} cannot be read: {error.strerror or error}") from error
        num_bytes_left -= len(text.encode())
        texts.append(text)
        if num_bytes_left <= 0:
            break
    return texts


@dataclass(frozen=True)
class Batch:
    """Consecutive rows of all columns. If `rows` are the embedding rows of `ids`, `rows[inverse]` embeds the inputs."""

    ids: Tensor  #: different input tokens, sorted, int64 [u]
    inverse: Tensor  #: index of each input in `ids`, int64 [steps, columns]
    targets: Tensor  #: next tokens, int64 [steps * columns]


class Columns:
    """A rank's share of a stream of tokens [n], in batches of `bptt` rows; `part`: index and number of the ranks."""

    def __init__(self, stream: Tensor, num_columns: int, bptt: int, part: tuple[int, int] = (0, 1)) -> None:
        index, num_parts = part
        num_all_columns = num_columns * num_parts
        length = len(stream) // num_all_columns
        if length < MIN_COLUMN_LENGTH:
            raise ConfigError(
                f"the text has {len(stream)} tokens, too few for {num_all_columns} columns:"
                " raise rnn.max_corpus_mb, or lower rnn.batch_size"
            )
        all_columns = stream[: length * num_all_columns].view(num_all_columns, length)
        columns = all_columns[index * num_columns : (index + 1) * num_columns]
        self._tokens = columns.t().contiguous().long()
        self._bptt = bptt

    @property
    def num_targets(self) -> int:
        """Number of tokens to predict in all batches."""
        return int(self._tokens[1:].numel())

    def __len__(self) -> int:
        """Number of batches; the last one may have fewer rows."""
        return math.ceil((len(self._tokens) - 1) / self._bptt)

    def __getitem__(self, number: int) -> Batch:
        first = number * self._bptt
        last = min(first + self._bptt, len(self._tokens) - 1)
        ids, inverse = torch.unique(self._tokens[first:last], return_inverse=True)
        return Batch(ids, inverse, self._tokens[first + 1 : last + 1].flatten())

    def __iter__(self) -> Iterator[Batch]:
        return (self[number] for number in range(len(self)))

    def from_batch(self, number: int) -> Iterator[Batch]:
        """Yield the batches from `number` on, and after the last one again from the first, without end."""
        return (self[index % len(self)] for index in itertools.count(number))

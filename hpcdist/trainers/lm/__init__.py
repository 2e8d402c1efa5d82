"""Trainer `lm`: a decoder-only transformer, sharded over a mesh of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpcdist.config.schema import Config
from hpcdist.config.section import IS_PATH, ConfigSection, number
from hpcdist.config.trainer_declaration import Trainer
from hpcdist.config.training_schema import HUGGING_FACE_CONFIG, DataConfig, ModelConfig
from hpcdist.data import NUM_BYTE_TOKENS
from hpcdist.data.documents import FOLDER_SUFFIXES
from hpcdist.data.text_files import find_text_files
from hpcdist.errors import ConfigError, plural
from hpcdist.run.weight_files import TOKENIZER_FILE
from hpcdist.trainers.lm.sizes import LmModelConfig, config_document, section_values

if TYPE_CHECKING:
    from torch import Tensor

    from hpcdist.checkpoint.stored_weights import StoredWeights
    from hpcdist.run.folder import RunDir

#: Which activations of a layer the backward pass computes again.
Recomputed = Literal["none", "selective", "full"]
#: The layers to which LoRA can be added.
LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
#: Ends of the names of the weights that LoRA adds.
LORA_WEIGHTS = ("lora_a", "lora_b")


@dataclass(frozen=True, kw_only=True)
class LmMeshConfig(ConfigSection):
    """The mesh of ranks. The product of its sizes is the number of ranks; one size may be -1, which is the rest."""

    replicate: int = number(1, least=-1)
    """Copies of the sharded weights, such as one for each node; their gradients are summed."""
    shard: int = number(-1, least=-1)
    """Ranks among which weights, gradients and the state of the optimizer are divided (FSDP2)."""
    tensor: int = number(1, least=1)
    """Ranks that divide heads, MLPs and vocabulary (tensor parallelism), with fast connections between them."""

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the dimensions, the outermost first."""
        return {"replicate": self.replicate, "shard": self.shard, "tensor": self.tensor}

    def resolve(self, num_ranks: int) -> dict[str, int]:
        """Return the sizes for a number of ranks, without -1. Raises ConfigError if they do not fit it."""
        sizes = self.sizes
        product = math.prod(size for size in sizes.values() if size != -1)
        shown_sizes = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        if -1 not in sizes.values() and product != num_ranks:
            raise ConfigError(
                f"lm.mesh={{{shown_sizes}}} is for {plural(product, 'rank')}, but the run has {num_ranks}: change a"
                " size, or set it to -1 for the remaining ranks"
            )
        if num_ranks % product:
            raise ConfigError(
                f"lm.mesh={{{shown_sizes}}} needs a multiple of {plural(product, 'rank')}, but the run has {num_ranks}:"
                " change a size, or the number of ranks"
            )
        return {name: num_ranks // product if size == -1 else size for name, size in sizes.items()}

    def problems(self) -> list[str]:
        """Return a message for each invalid value of this section."""
        problems = [f"{name} must be -1 or >= 1, got 0" for name, size in self.sizes.items() if size == 0]
        rest = [name for name, size in self.sizes.items() if size == -1]
        if len(rest) > 1:
            problems.append(f"{rest[0]}: only one size may be -1, but {' and '.join(rest)} are: set one of them")
        return problems


@dataclass(frozen=True, kw_only=True)
class CorpusConfig(ConfigSection):
    """The text and its tokens. They are kept below `data.root`, for later runs with the same text and tokenizer."""

    files: list[str] = field(default_factory=list, metadata=IS_PATH)
    """Text, JSONL and Parquet files (field `text`), globs, folders; empty: the source of Python's standard library."""
    tokenizer: Literal["byte", "bpe"] = "byte"
    """`byte`: 256 tokens and an end token, for any text; `bpe`: byte-pair encoding, trained on the text."""
    vocab_size: int = number(4096, least=257)
    """Number of tokens of `tokenizer: bpe`; a small text has fewer."""
    tokenizer_file: str = field(default="", metadata=IS_PATH)
    """Instead of `tokenizer`: a `tokenizer.json` of the package tokenizers; empty: that of `model.init_from`."""
    held_out_every: int = number(20, least=2)
    """One of so many documents is held out for the evaluation; of few documents, the same fraction of their text."""
    max_bad_records: int = number(0, least=0)
    """Maximum number of corrupt records (lines, rows or row groups), which are reported and left out."""

    def problems(self) -> list[str]:
        """Return a message for each invalid value of this section."""
        if self.tokenizer_file and self.tokenizer != "byte":
            return [f"tokenizer={self.tokenizer} and tokenizer_file exclude each other: leave out one of them"]
        return []

    def missing_files(self, key: str) -> list[str]:
        """Return a message for each file that is not on this machine; `key` is that of this section."""
        problems: list[str] = []
        try:
            find_text_files(self.files, key=f"{key}.files", folder_suffixes=FOLDER_SUFFIXES)
        except ConfigError as error:
            problems += error.problems
        if self.tokenizer_file and not Path(self.tokenizer_file).is_file():
            problems.append(f"{key}.tokenizer_file: no such file: {self.tokenizer_file}")
        return problems


@dataclass(frozen=True, kw_only=True)
class LmLoraConfig(ConfigSection):
    """Train few weights beside the frozen ones of `model.init_from` (LoRA); an export merges them."""

    rank: int = number(0, least=0)
    """Rank of the matrix that is added to a weight, such as 16; 0 trains all weights instead."""
    alpha: float = number(16.0, above=0)
    """The added matrix is multiplied by alpha / rank."""
    targets: list[LoraTarget] = field(default_factory=lambda: ["q_proj", "v_proj"])
    """Layers with added matrices: some of q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj and down_proj."""

    @property
    def scale(self) -> float:
        """Factor of the added matrix."""
        return self.alpha / self.rank

    def merged(self, name: str, weight: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """Return a weight with the matrix that is added to it, if there is one.

        Args:
            weights: those of the model, with those that LoRA adds.
        """
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_a" not in weights:
            return weight
        product = weights[f"{layer}.lora_b"] @ weights[f"{layer}.lora_a"]
        return weight + product * self.scale

    def problems(self) -> list[str]:
        """Return a message for each invalid value of this section."""
        if self.rank and not self.targets:
            return ["targets is empty: name a layer such as q_proj, or set rank to 0"]
        return []


@dataclass(frozen=True, kw_only=True)
class LmConfig(ConfigSection):
    """A language model: a decoder-only transformer on a mesh of ranks (`trainer: lm`)."""

    model: LmModelConfig = field(default_factory=LmModelConfig)
    mesh: LmMeshConfig = field(default_factory=LmMeshConfig)
    corpus: CorpusConfig = field(default_factory=CorpusConfig)
    lora: LmLoraConfig = field(default_factory=LmLoraConfig)
    sequence_length: int = number(256, least=1)
    """Tokens of a window, the unit of `data.global_batch_size`."""
    micro_batch_size: int | None = number(None, least=1)
    """Windows of a rank in one forward pass, which limits the memory; null: all windows of the rank in a step."""
    activation_checkpointing: Recomputed = "none"
    """Compute activations again in the backward pass: `full` all of a layer, `selective` all but its products."""
    eval_every_steps: int | None = number(None, least=1)
    """Optimizer steps between two evaluations; null: one after each epoch."""
    num_eval_windows: int | None = number(None, least=1)
    """Held-out windows of an evaluation; null: all."""
    sample_prompt: str = ""
    """Text that the model continues at each evaluation; empty: the beginning of the held-out text."""

    def num_evaluated(self, num_held_out: int) -> int:
        """Return how many of the held-out windows an evaluation has."""
        return min(num_held_out, self.num_eval_windows or num_held_out)


def _check(config: Config) -> list[str]:
    lm = config.section(LmConfig)
    problems = []
    if config.data.global_batch_size is None:
        problems.append("data.global_batch_size: trainer lm needs the windows of a step on all ranks, such as 32")
    if config.model.name != ModelConfig.name:
        problems.append(
            f"model.name={config.model.name} is not for trainer lm: remove it, and set the sizes in lm.model"
        )
    for name in ("name", "batch_size"):
        value = getattr(config.data, name)
        if value != getattr(DataConfig, name):
            problems.append(
                f"data.{name}={value} is not for trainer lm, which has lm.corpus and data.global_batch_size: remove it"
            )
    for key, value in (
        ("elastic.micro_batches", config.elastic.micro_batches),
        ("elastic.exact", config.elastic.exact),
        ("launch.fit_batch", config.launch.fit_batch),
    ):
        if value:
            problems.append(f"{key} is not for trainer lm, which has lm.micro_batch_size: remove it")
    if config.precision.dtype == "fp16":
        problems.append("precision.dtype=fp16 is not for trainer lm: use bf16, which needs no loss scaling")
    tensor = lm.mesh.tensor
    for key, size in (
        ("lm.model.num_heads", lm.model.num_heads),
        ("lm.model.num_kv_heads", lm.model.kv_heads),
        ("lm.model.intermediate_size", lm.model.intermediate_size),
        ("lm.sequence_length", lm.sequence_length),
    ):
        if size % tensor:
            problems.append(
                f"lm.mesh.tensor={tensor} must divide {key}={size}, which its ranks share: use another size"
            )
    if lm.lora.rank and tensor > 1:
        problems.append(f"lm.lora.rank={lm.lora.rank} needs lm.mesh.tensor=1, got {tensor}: divide by lm.mesh.shard")
    names_tokenizer = lm.corpus.tokenizer_file or config.model.init_from
    if lm.corpus.tokenizer == "byte" and not names_tokenizer:
        try:
            lm.model.padded_vocab_size(NUM_BYTE_TOKENS)
        except ConfigError as error:
            problems += error.problems
    if lm.lora.rank and not config.model.init_from:
        problems.append(f"lm.lora.rank={lm.lora.rank} needs weights to adapt: set model.init_from")
    return problems


def _check_ranks(config: Config, num_ranks: int) -> list[str]:
    try:
        config.section(LmConfig).mesh.resolve(num_ranks)
    except ConfigError as error:
        return list(error.problems)
    return []


def _check_host(config: Config) -> list[str]:
    corpus = config.section(LmConfig).corpus
    return corpus.missing_files("lm.corpus") + _tokenizer_problems(config, corpus)


def _tokenizer_problems(config: Config, corpus: CorpusConfig) -> list[str]:
    """Return the problem with the tokenizer of a model in Hugging Face's format, if there is one."""
    folder = Path(config.model.init_from)
    if not (folder / HUGGING_FACE_CONFIG).is_file() or corpus.tokenizer_file:
        return []
    if not (folder / TOKENIZER_FILE).is_file():
        return [
            f"model.init_from: {folder} has no {TOKENIZER_FILE}, without which its weights have no meaning: add the"
            " file, or name one in lm.corpus.tokenizer_file"
        ]
    if corpus.tokenizer != CorpusConfig.tokenizer:
        return [two_tokenizers(corpus, str(folder))]
    return []


def two_tokenizers(corpus: CorpusConfig, source: str) -> str:
    """Return the message for a tokenizer to train and weights that have one."""
    return (
        f"lm.corpus.tokenizer={corpus.tokenizer} is not for the weights of model.init_from={source}, which have a"
        " tokenizer: leave it out"
    )


def _exported_weights(config: Config, weights: StoredWeights) -> StoredWeights:
    """Return the weights of a model without LoRA that computes the same, each merged when it is read."""
    lora = config.section(LmConfig).lora
    own = weights.renamed({name: name for name in weights if not name.endswith(LORA_WEIGHTS)})
    return own.changed(lambda name, weight: lora.merged(name, weight, weights))


def _hugging_face_config(config: Config, run: RunDir, weights: Mapping[str, Any]) -> dict[str, Any]:
    lm = config.section(LmConfig)
    return config_document(lm.model, lm.sequence_length, run, weights)


TRAINER = Trainer(
    section=LmConfig,
    shared_sections=("model", "data", "optim", "schedule", "precision"),
    unread_keys=(
        *("model.name", "model.channels_last", "data.name", "data.batch_size", "data.image_size", "data.augment"),
        *("data.num_workers", "data.num_samples", "data.num_classes"),
    ),
    is_elastic=True,
    divides_batches=True,
    check=_check,
    check_ranks=_check_ranks,
    check_host=_check_host,
    values_of_weights=section_values,
    hugging_face_config=_hugging_face_config,
    exported_weights=_exported_weights,
    charts={
        "loss": ("train/loss", "eval/loss"),
        "bits per byte of the held-out text": ("eval/bits_per_byte",),
        "share of the peak FLOPS": ("train/mfu", "train/mfu_of_matmul"),
    },
    fixed_keys=(
        *("lm.model", "lm.lora", "lm.sequence_length", "optim.name", "data.global_batch_size"),
        *("lm.corpus.tokenizer", "lm.corpus.vocab_size", "lm.corpus.tokenizer_file", "lm.corpus.held_out_every"),
    ),
)

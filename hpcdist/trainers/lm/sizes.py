"""Sizes of a decoder: the section `lm.model`, and `config.json` of Hugging Face's format, in both directions.

The names of weights need no conversion: they are those of Llama.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpcdist.config.section import ConfigSection, number
from hpcdist.config.training_schema import HUGGING_FACE_CONFIG
from hpcdist.errors import ConfigError, ExportError, shown
from hpcdist.host.json_files import read_json
from hpcdist.run.folder import RunDir


@dataclass(frozen=True, kw_only=True)
class LmModelConfig(ConfigSection):
    """The sizes of the decoder; the names follow `LlamaConfig` of the package transformers."""

    hidden_size: int = number(256, least=1)
    """Width of the residual stream."""
    num_layers: int = number(4, least=1)
    """Number of layers."""
    num_heads: int = number(4, least=1)
    """Attention heads of a layer."""
    num_kv_heads: int | None = number(None, least=1)
    """Heads of keys and values, each for the same number of attention heads; null: num_heads."""
    head_dim: int | None = number(None, least=2)
    """Width of a head; null: hidden_size / num_heads."""
    intermediate_size: int = number(768, least=1)
    """Width of the hidden layer of an MLP."""
    rope_theta: float = number(10_000.0, above=0)
    """Base of the wavelengths of the rotary positions."""
    norm_eps: float = number(1e-5, above=0)
    """Added to the mean square in RMSNorm."""
    tie_embeddings: bool = False
    """Use one table for the embedding and the output."""
    qkv_bias: bool = False
    """Add a bias to queries, keys and values, as Qwen2 does."""
    qk_norm: bool = False
    """Normalise queries and keys of each head, as Qwen3 does."""
    vocab_size: int | None = number(None, least=1)
    """Rows of the embedding; null: the tokens of the tokenizer, padded to vocab_multiple."""
    vocab_multiple: int = number(1, least=1)
    """Pad the vocabulary of the tokenizer to a multiple of this number; GPUs compute multiples of 128 faster."""

    @property
    def kv_heads(self) -> int:
        """Number of heads of keys and values."""
        return self.num_kv_heads or self.num_heads

    @property
    def head_size(self) -> int:
        """Width of a head."""
        return self.head_dim or self.hidden_size // self.num_heads

    def padded_vocab_size(self, vocab_size: int) -> int:
        """Return the number of rows of the embedding for a tokenizer of `vocab_size` tokens.

        Raises ConfigError if the config has fewer.
        """
        if self.vocab_size is not None:
            if self.vocab_size < vocab_size:
                raise ConfigError(
                    f"lm.model.vocab_size={self.vocab_size} is less than the {vocab_size} tokens of the tokenizer:"
                    " raise it, or use a tokenizer with fewer tokens"
                )
            return self.vocab_size
        return -(-vocab_size // self.vocab_multiple) * self.vocab_multiple

    def num_parameters(self, vocab_size: int) -> int:
        """Return the number of weights with an embedding of `vocab_size` rows."""
        num_heads = 2 * self.num_heads + 2 * self.kv_heads  # queries and output, keys and values
        layer = num_heads * self.head_size * self.hidden_size
        layer += 3 * self.hidden_size * self.intermediate_size
        layer += 2 * self.hidden_size
        if self.qkv_bias:
            layer += (self.num_heads + 2 * self.kv_heads) * self.head_size
        if self.qk_norm:
            layer += 2 * self.head_size
        num_tables = 2
        if self.tie_embeddings:
            num_tables = 1
        return self.num_layers * layer + num_tables * vocab_size * self.hidden_size + self.hidden_size

    def flops_per_token(self, vocab_size: int, length: int, *, is_frozen: bool = False) -> int:
        """Return the FLOPs of a training step for each token of a sequence of `length` tokens.

        6 for each weight of a matrix product, and causal attention (https://arxiv.org/abs/2204.02311, appendix B, of
        which causal attention needs half).

        Args:
            is_frozen: with LoRA, which computes no gradients of these weights: 4 for each. Its own are few.
        """
        num_weights = self.num_parameters(vocab_size)
        if not self.tie_embeddings:
            num_weights -= vocab_size * self.hidden_size  # looked up, not multiplied
        attention = 6 * self.num_layers * self.num_heads * self.head_size * length
        flops_per_weight = 6
        if is_frozen:
            flops_per_weight = 4
        return flops_per_weight * num_weights + attention

    def problems(self) -> list[str]:
        """Return a message for each invalid value of this section."""
        problems = []
        if self.num_heads % self.kv_heads:
            problems.append(
                f"num_kv_heads={self.kv_heads} must divide num_heads={self.num_heads}: use a divisor of it, or null"
            )
        if self.head_dim is None and self.hidden_size % self.num_heads:
            problems.append(
                f"hidden_size={self.hidden_size} is not a multiple of num_heads={self.num_heads}: change one of them,"
                " or set head_dim"
            )
        elif self.head_size % 2:
            problems.append(f"head_dim must be even for the rotary positions, got {self.head_size}")
        return problems


#: The weight with a row for each token of the vocabulary.
EMBEDDING = "model.embed_tokens.weight"
#: The architectures with these layers, by `model_type`, each with its class in transformers.
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
#: Our keys of `lm.model`, with theirs.
NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "intermediate_size": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
#: Keys of theirs that change the computation of the layers, with the supported values; a key may also be missing.
_COMPUTED = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "rope_scaling": (None,),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (None,),
}
#: The value that transformers assumes if the key is missing.
_DEFAULTS = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_DEFAULT_ROPE_THETA = 10_000.0
_DEFAULT_QWEN3_HEAD_DIM = 128


def section_values(document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the section `lm` that a `config.json` determines, in nested mappings.

    Raises ConfigError, without the name of the file, if the trainer has no such model.
    """
    kind = document.get("model_type")
    if kind not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES.values())
        name = (document.get("architectures") or [None])[0] or kind
        raise ConfigError(f"the architecture is {shown(name)}, expected one of {known}: choose another model")
    rope = document.get("rope_parameters") or {}  # since transformers 5
    problems = []
    for name, allowed in _COMPUTED.items():
        value = document.get(name, allowed[0])
        if value not in allowed:
            problems.append(f"{name} is {shown(value)}, which trainer lm does not compute: choose another model")
    if rope.get("rope_type", "default") != "default":
        problems.append(
            f"rope_parameters.rope_type is {shown(rope['rope_type'])}, which trainer lm does not compute: choose"
            " another model"
        )
    if problems:
        raise ConfigError(*problems)
    sizes = {ours: document.get(theirs, _DEFAULTS.get(theirs)) for ours, theirs in NAMES.items()}
    if sizes["head_dim"] is None and kind == "qwen3":
        sizes["head_dim"] = _DEFAULT_QWEN3_HEAD_DIM
    theta = rope.get("rope_theta", document.get("rope_theta"))
    sizes["rope_theta"] = float(theta or _DEFAULT_ROPE_THETA)
    sizes["qkv_bias"] = kind == "qwen2"
    sizes["qk_norm"] = kind == "qwen3"
    return {"model": sizes}


def config_document(
    model: LmModelConfig, sequence_length: int, run: RunDir, weights: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the `config.json` with which transformers loads the weights of a run.

    Other keys are those of the model from which the run started.

    Args:
        sequence_length: the longest text, unless the model from which the run started says otherwise.
        weights: of a model without LoRA, by name.

    Raises ExportError if no architecture of transformers has these layers.
    """
    from hpcdist.data.tokenizer import tokenizer_of_run

    if model.qkv_bias and model.qk_norm:
        raise ExportError(
            "no architecture of transformers has lm.model.qkv_bias and lm.model.qk_norm: choose --format safetensors"
        )
    kind = "llama"
    if model.qkv_bias:
        kind = "qwen2"
    if model.qk_norm:
        kind = "qwen3"
    others = read_json(run.init_from / HUGGING_FACE_CONFIG)
    if others is None:
        end_token = tokenizer_of_run(run).end_token
        others = {
            "max_position_embeddings": sequence_length,
            "bos_token_id": None,
            "eos_token_id": end_token,
            "pad_token_id": end_token,
        }
    sizes = {theirs: getattr(model, ours) for ours, theirs in NAMES.items()}
    return {
        **others,
        **sizes,
        "architectures": [ARCHITECTURES[kind]],
        "model_type": kind,
        "vocab_size": len(weights[EMBEDDING]),
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "rope_theta": model.rope_theta,  # until transformers 4
        "rope_parameters": {"rope_theta": model.rope_theta, "rope_type": "default"},
        "torch_dtype": "float32",  # until transformers 4
        "dtype": "float32",
    }

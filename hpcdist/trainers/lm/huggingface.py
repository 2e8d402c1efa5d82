"""Sizes of a decoder in `config.json` of Hugging Face's format, in both directions, without torch.

The names of weights need no conversion: they are those of Llama.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hpcdist.config.training_schema import HUGGING_FACE_CONFIG
from hpcdist.errors import ConfigError, ExportError, shown
from hpcdist.host.json_files import read_json
from hpcdist.run.folder import RunDir

if TYPE_CHECKING:
    from hpcdist.config.schema import Config

#: The weight whose rows are the vocabulary.
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
#: Keys of theirs that change what the layers compute, with the values that ours compute; a missing key is one of them.
_COMPUTED = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "rope_scaling": (None,),
    "partial_rotary_factor": (1.0,),
    "quantization_config": (None,),
}
#: What transformers assumes if the key is missing.
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


def config_document(config: Config, run: RunDir, weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `config.json` with which transformers loads the weights of a run.

    Other keys are those of the model from which the run started.

    Args:
        weights: of a model without LoRA, by name.

    Raises ExportError if no architecture of transformers has these layers.
    """
    from hpcdist.data.tokenizer import tokenizer_of_run
    from hpcdist.trainers.lm import LmConfig

    lm = config.section(LmConfig)
    model = lm.model
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
            "max_position_embeddings": lm.sequence_length,
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

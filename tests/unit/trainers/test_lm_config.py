from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcdist.config.describe import describe
from hpcdist.config.loading import load_config
from hpcdist.config.schema import Config, cross_check, new_run_problems
from hpcdist.config.written import read_stored, run_yaml
from hpcdist.errors import ConfigError
from hpcdist.review.facts import read_facts
from hpcdist.run.create import check_trainer
from hpcdist.run.folder import RunDir
from hpcdist.run.run_parameters import effective_values
from hpcdist.run.trainer_source import unread_keys
from hpcdist.tracking.weight_source import find_weights
from hpcdist.trainers.lm import LmConfig, LmMeshConfig
from hpcdist.trainers.lm.sizes import LmModelConfig


def config_of(text: str, tmp_path: Path, overrides: Sequence[str] = ()) -> Config:
    file = tmp_path / "lm.yaml"
    file.write_text(f"trainer: lm\n{text}")
    return load_config(file, overrides)


def with_mesh(**sizes: int) -> Config:
    loaded = load_config("lm_small")
    return replace(loaded, sections={"lm": replace(loaded.section(LmConfig), mesh=LmMeshConfig(**sizes))})


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("data: {batch_size: 8}", "data.global_batch_size: trainer lm needs the windows of a step on all ranks"),
        (
            "data: {batch_size: 8, global_batch_size: 8}",
            "data.batch_size=8 is not for trainer lm, which has lm.corpus and data.global_batch_size: remove it",
        ),
        ("data: {name: mnist, global_batch_size: 8}", "data.name=mnist is not for trainer lm"),
        ("elastic: {micro_batches: 2}", "elastic.micro_batches is not for trainer lm, which has lm.micro_batch_size"),
        ("elastic: {exact: true}", "elastic.exact is not for trainer lm"),
        ("launch: {fit_batch: true}", "launch.fit_batch is not for trainer lm"),
        ("precision: {dtype: fp16}", "precision.dtype=fp16 is not for trainer lm: use bf16"),
        (
            "model: {name: resnet18}",
            "model.name=resnet18 is not for trainer lm: remove it, and set the sizes in lm.model",
        ),
    ],
)
def test_keys_for_other_trainers_are_refused(section: str, message: str, tmp_path: Path) -> None:
    text = section
    if not section.startswith("data"):
        text = f"{section}\ndata: {{global_batch_size: 8}}"
    with pytest.raises(ConfigError, match=message):
        config_of(text, tmp_path)


@pytest.mark.parametrize(
    ("lm", "key"),
    [
        ("model: {num_heads: 6, hidden_size: 96}, mesh: {tensor: 4}", "lm.model.num_heads=6"),
        ("model: {num_kv_heads: 2}, mesh: {tensor: 4}", "lm.model.num_kv_heads=2"),
        ("model: {intermediate_size: 90}, mesh: {tensor: 4}", "lm.model.intermediate_size=90"),
        ("sequence_length: 250, mesh: {tensor: 4}", "lm.sequence_length=250"),
    ],
)
def test_what_tensor_ranks_cannot_divide_is_refused(lm: str, key: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"lm.mesh.tensor=4 must divide {key}, which its ranks share"):
        config_of(f"lm: {{{lm}}}\ndata: {{global_batch_size: 8}}", tmp_path)


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "resolved"),
    [
        ({}, 4, (1, 4, 1)),
        ({"replicate": -1, "shard": 2}, 8, (4, 2, 1)),
        ({"tensor": 2}, 8, (1, 4, 2)),
        ({"replicate": 2, "shard": 1, "tensor": 2}, 4, (2, 1, 2)),
    ],
)
def test_the_rest_of_the_ranks_is_one_size(sizes: Any, num_ranks: int, resolved: tuple[int, ...]) -> None:
    assert tuple(LmMeshConfig(**sizes).resolve(num_ranks).values()) == resolved


def test_a_mesh_that_does_not_fit_the_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"shard: 2, tensor: 2\} is for 4 ranks, but the run has 3: change a size"):
        LmMeshConfig(shard=2, tensor=2).resolve(3)
    with pytest.raises(ConfigError, match=r"tensor: 2\} needs a multiple of 2 ranks, but the run has 3"):
        LmMeshConfig(tensor=2).resolve(3)
    with pytest.raises(ValueError, match="shard must be -1 or >= 1, got 0"):
        LmMeshConfig(shard=0)
    with pytest.raises(ValueError, match="replicate: only one size may be -1, but replicate and shard are"):
        LmMeshConfig(replicate=-1)


def test_a_new_run_checks_its_ranks_before_they_start() -> None:
    assert new_run_problems(with_mesh(tensor=2), num_ranks=3)[0].startswith("lm.mesh={")
    assert new_run_problems(with_mesh(tensor=2), num_ranks=0) == []
    # 16 windows are no multiple of 3 ranks.
    assert new_run_problems(with_mesh(), num_ranks=3) == []
    assert cross_check(with_mesh()) == []


def test_choices_of_a_key_are_named(tmp_path: Path) -> None:
    text = "data: {global_batch_size: 8}"
    message = "lm.activation_checkpointing must be one of none, selective, full, got 'foo'"
    with pytest.raises(ConfigError, match=message):
        config_of(text, tmp_path, ["lm.activation_checkpointing=foo"])
    with pytest.raises(ConfigError, match=r"lm.lora.targets\S* must be one of q_proj, k_proj, .*down_proj, got 'q'"):
        config_of(text, tmp_path, ["lm.lora.targets=[q]"])
    types = {key: kind for key, kind, _, _ in describe()}
    assert types["lm.activation_checkpointing"] == "Literal['none', 'selective', 'full']"


def test_too_few_rows_for_bytes_are_refused(tmp_path: Path) -> None:
    text = "data: {global_batch_size: 8}"
    message = (
        "lm.model.vocab_size=256 is less than the 257 tokens of the tokenizer: raise it, or use a tokenizer with fewer"
    )
    with pytest.raises(ConfigError, match=message):
        config_of(text, tmp_path, ["lm.model.vocab_size=256"])
    with pytest.raises(ConfigError, match=message.replace("257", "300")):
        LmModelConfig(vocab_size=256).padded_vocab_size(300)
    for others in ("lm.corpus.tokenizer_file=t.json", "lm.corpus.tokenizer=bpe", "model.init_from=other"):
        config_of(text, tmp_path, ["lm.model.vocab_size=256", others])


def test_fine_tuning_needs_weights(tmp_path: Path) -> None:
    config = load_config("lm_finetune", [f"runs_dir={tmp_path}"])
    with pytest.raises(ConfigError, match=r"^model\.init_from is not set: add model\.init_from=\.\.\., the weights to"):
        find_weights(config, {})


def test_weights_in_a_folder_need_their_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        '{"model_type": "llama", "vocab_size": 300, "hidden_size": 8, "num_hidden_layers": 1,'
        ' "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 8}'
    )
    base = ["data.global_batch_size=8", f"model.init_from={tmp_path}"]
    message = rf"^model\.init_from: {tmp_path} has no tokenizer\.json, without which its weights have no meaning: add"
    for others in ([], ["lm.corpus.tokenizer=bpe"]):
        with pytest.raises(ConfigError, match=message):
            check_trainer(config_of("", tmp_path, [*base, *others]), tmp_path)
    (tmp_path / "tokenizer.json").touch()
    message = r"^lm\.corpus\.tokenizer=bpe is not for the weights of model\.init_from=.*, which have a tokenizer: leave"
    with pytest.raises(ConfigError, match=message):
        check_trainer(config_of("", tmp_path, [*base, "lm.corpus.tokenizer=bpe"]), tmp_path)
    check_trainer(config_of("", tmp_path, base), tmp_path)
    (tmp_path / "tokenizer.json").rename(tmp_path / "other.json")
    check_trainer(config_of("", tmp_path, [*base, f"lm.corpus.tokenizer_file={tmp_path}/other.json"]), tmp_path)


def test_flops_are_those_of_products_and_attention() -> None:
    model = LmModelConfig(hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, intermediate_size=100)
    products = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 100) + 50 * 64
    norms = 2 * 2 * 64 + 64
    attention = 2 * 2 * 2 * 64 * 10 // 2  # scores and values, of half of 10 positions on average
    assert model.flops_per_token(50, 10) == 6 * (products + norms) + 3 * attention
    assert model.flops_per_token(50, 10, is_frozen=True) == 4 * (products + norms) + 3 * attention


def test_values_of_other_trainers_are_not_shown(tmp_path: Path) -> None:
    """The defaults of these keys name a model and data that this trainer does not use."""
    run = RunDir.create(tmp_path / "runs" / "lm" / "first")
    run.config.write_text(run_yaml(load_config("lm_small")))
    keys = effective_values(run, read_stored(run.config)).keys()
    assert {"data.global_batch_size", "model.compile", "lm.model.num_layers"} <= keys
    assert not {"model.name", "data.name", "data.batch_size", "data.num_classes"} & keys
    assert read_facts(run, run.read_state()).model == ""


def test_keys_without_effect_are_named(tmp_path: Path) -> None:
    keys = ["data.num_workers", "data.root", "optim.lr"]
    note = unread_keys(load_config("lm_small"), keys, tmp_path)
    assert note == "without effect: data.num_workers, since the trainer lm does not read them"

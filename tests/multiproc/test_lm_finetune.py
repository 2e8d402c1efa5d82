"""Fine-tuning of a model in Hugging Face's format, from its folder to one that transformers loads."""

from pathlib import Path
from typing import Any

import pytest
import torch
from context_scene import new_run, open_context
from hpcdist_runs import Runs
from spawn import Rank, spawn_ranks
from torch.distributed.tensor import DTensor

from hpcdist.checkpoint.state import load_weights
from hpcdist.config.loading import load_config
from hpcdist.data.tokenizer import train_bpe
from hpcdist.errors import terminal_text
from hpcdist.rank.context import close
from hpcdist.run.folder import RunDir
from hpcdist.run.training_record import read_training
from hpcdist.run.weight_files import hugging_face_weights
from hpcdist.trainers.lm import LmConfig
from hpcdist.trainers.lm import train as trainer

#: Of the random model: Llama with tied embeddings, whose vocabulary is larger than that of its tokenizer.
SIZES: dict[str, Any] = {
    "vocab_size": 384,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "initializer_range": 0.3,
}
TEXT = "".join(f"def f{number}(x):\n    return x + {number}\n\n" for number in range(200))
PROMPT = "def f1("
NUM_GREEDY = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of transformers, with a tokenizer."""
    transformers: Any = pytest.importorskip("transformers")
    torch.manual_seed(2)
    path = tmp_path_factory.mktemp("model")
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).save_pretrained(path)
    (path / "tokenizer.json").write_text(train_bpe(iter([TEXT]), 300))
    return path


def assert_transformers_computes_the_same(exported: Path, printed: str) -> None:
    """Load a model and its tokenizer with transformers, and compare its greedy text with a printed one."""
    transformers: Any = pytest.importorskip("transformers")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True)
    assert not any(info.values()), info
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    end = tokenizer.eos_token_id
    tokens = model.generate(ids, max_new_tokens=NUM_GREEDY, do_sample=False, eos_token_id=end, pad_token_id=end)
    text = tokenizer.decode(tokens[0], skip_special_tokens=True)
    assert terminal_text(text) == printed.removesuffix("\n")


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["full", pytest.param("lora", marks=pytest.mark.slow)])
def test_fine_tuned_model_is_loaded_by_transformers(runs: Runs, folder: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    name = f"finetune-{kind}"
    overrides = [
        *(f"experiment={runs.experiment}", f"model.init_from={folder}", f"lm.corpus.files=[{tmp_path}/text.txt]"),
        *("lm.sequence_length=32", "lm.micro_batch_size=4", "data.global_batch_size=8", "optim.lr=0.01"),
        *("stop.max_steps=4", "lm.eval_every_steps=2", "schedule.warmup_steps=0", f"data.root={tmp_path}"),
    ]
    if kind == "lora":
        overrides += ["lm.lora={rank: 4, alpha: 8, targets: [q_proj, o_proj, up_proj]}"]
    arguments = runs.config(name, *overrides)
    code, output = runs.command("run", "lm_finetune", *arguments[1:], **runs.unshipped)
    assert code == 0, output

    exported = tmp_path / "exported"
    code, output = runs.command(
        "export", name, "--format", "huggingface", "--checkpoint", "4", "--output", str(exported)
    )
    assert code == 0, output
    words = ("generate", name, PROMPT, "--max-tokens", str(NUM_GREEDY), "--temperature", "0")
    code, printed = runs.command(*words)
    assert code == 0, printed
    first_line, _, text = printed.partition("\n")
    assert first_line == f"step 4 of {name}"
    assert_transformers_computes_the_same(exported, text)

    record = read_training(runs.run_dir(name).attempts()[-1])
    assert record is not None
    num_parameters = {"full": 27_808, "lora": 1664}  # of LoRA, the trained ones
    assert record.num_parameters == num_parameters[kind]

    first = load_weights(runs.run_dir(name).checkpoints / "step-00000002")
    last = load_weights(runs.run_dir(name).checkpoints / "step-00000004")
    changed = {key.rpartition(".")[2] for key in last if not torch.equal(first[key], last[key])}
    assert changed == ({"weight"} if kind == "full" else {"lora_a", "lora_b"})


def weights_on_mesh(here: Rank, path: Path, folder: Path, mesh: str) -> dict[str, torch.Tensor]:
    """Return the whole weights of a new run on a mesh."""
    overrides = [f"model.init_from={folder}", f"lm.mesh={mesh}", "name=mesh"]
    cfg = load_config("lm_finetune", overrides)
    with open_context(here, RunDir(path), cfg) as ctx:
        sizes = cfg.section(LmConfig).mesh.resolve(here.world_size)
        model = trainer.build_model(ctx, cfg, ctx.mesh(**sizes), vocab_size=300)
        close(ctx)
    found = {}
    for name, weight in model.state_dict().items():
        assert isinstance(weight, DTensor)
        found[name] = weight.full_tensor()
    return found


def test_each_rank_of_a_mesh_reads_its_part_of_the_folder(folder: Path, tmp_path: Path) -> None:
    run = new_run(tmp_path)
    hugging_face_weights(str(folder)).copy_to(run.init_from)
    transformers: Any = pytest.importorskip("transformers")
    expected = transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()
    mesh = "{replicate: 1, shard: 2, tensor: 2}"
    for found in spawn_ranks(weights_on_mesh, 4, path=run.path, folder=folder, mesh=mesh):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], weight) for name, weight in expected.items())

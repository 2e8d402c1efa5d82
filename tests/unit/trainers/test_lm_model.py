import pytest
import torch

from hpcdist.trainers.lm.model import BLOCK_ROWS, Decoder, draw_normal, generate
from hpcdist.trainers.lm.sizes import LmModelConfig

VARIANTS = {
    "llama": LmModelConfig(num_kv_heads=2),
    "tied": LmModelConfig(tie_embeddings=True),
    "qwen": LmModelConfig(num_kv_heads=1, qkv_bias=True, qk_norm=True, head_dim=32),
}


def new_decoder(config: LmModelConfig, vocab_size: int = 100) -> Decoder:
    with torch.device("meta"):
        model = Decoder(config, vocab_size)
    model.to_empty(device="cpu")
    model.tie()
    model.init_weights(0)
    return model


@pytest.mark.parametrize("name", VARIANTS)
def test_the_number_of_parameters_is_that_of_the_model(name: str) -> None:
    model = new_decoder(VARIANTS[name])

    assert VARIANTS[name].num_parameters(100) == sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize("name", VARIANTS)
def test_a_cache_of_keys_and_values_changes_no_token(name: str) -> None:
    model = new_decoder(VARIANTS[name])
    tokens = torch.arange(7)

    generated = list(generate(model, tokens, 5))

    for token in generated:
        assert token == int(model(tokens.unsqueeze(0))[0, -1].argmax())
        tokens = torch.cat([tokens, torch.tensor([token])])


def test_drawn_tokens_are_among_the_most_probable() -> None:
    model = new_decoder(VARIANTS["llama"])
    prompt = torch.arange(7)

    drawn = list(generate(model, prompt, 1, temperature=5.0, top_k=3, seed=1))

    probable = model(prompt.unsqueeze(0))[0, -1].topk(3).indices
    assert drawn[0] in probable.tolist()
    assert list(generate(model, prompt, 9, temperature=5.0, seed=1)) == list(
        generate(model, prompt, 9, temperature=5.0, seed=1)
    )
    assert list(generate(model, prompt, 9, temperature=5.0, seed=2)) != list(
        generate(model, prompt, 9, temperature=5.0, seed=1)
    )


def test_a_weight_depends_on_seed_and_name_alone() -> None:
    def drawn(rows: int, seed: int, name: str) -> torch.Tensor:
        weight = torch.empty(rows, 3)
        draw_normal(weight, 2.0, seed, name)
        return weight

    whole = drawn(BLOCK_ROWS + 5, 1, "a")

    assert torch.equal(whole, drawn(BLOCK_ROWS + 5, 1, "a"))
    assert not torch.equal(whole[:5], drawn(BLOCK_ROWS + 5, 2, "a")[:5])
    assert not torch.equal(whole[:5], drawn(BLOCK_ROWS + 5, 1, "b")[:5])
    assert not torch.equal(whole[:5], whole[BLOCK_ROWS:])
    assert whole.std() == pytest.approx(2.0, rel=0.05)


def test_sizes_that_no_model_has_are_refused() -> None:
    with pytest.raises(ValueError, match="num_kv_heads=3 must divide num_heads=4"):
        LmModelConfig(num_kv_heads=3)
    with pytest.raises(ValueError, match="hidden_size=30 is not a multiple of num_heads=4"):
        LmModelConfig(hidden_size=30)
    with pytest.raises(ValueError, match="head_dim must be even for the rotary positions, got 3"):
        LmModelConfig(head_dim=3)


def test_the_vocabulary_is_padded_to_a_multiple() -> None:
    assert LmModelConfig(vocab_multiple=128).padded_vocab_size(257) == 384
    assert LmModelConfig().padded_vocab_size(257) == 257

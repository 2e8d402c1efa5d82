"""The language model: initial rows, shapes, and sampled text."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from hpcdist.trainers.rnn.train import DECODER, ENCODER, LanguageModel, first_rows, sample


def small(**options: object) -> LanguageModel:
    torch.manual_seed(0)
    sizes = {"vocab_size": 7, "embedding": 8, "hidden": 8, "layers": 1, **options}
    return LanguageModel(**sizes)  # type: ignore[arg-type]


def test_initial_rows_do_not_depend_on_the_shards() -> None:
    whole = first_rows(0, 2500, 3, 1, ENCODER)
    pieces = [first_rows(start, stop, 3, 1, ENCODER) for start, stop in ((0, 900), (900, 1024), (1024, 2500))]
    assert torch.equal(torch.cat(pieces), whole)
    assert 0.09 < whole.abs().max() <= 0.1
    others = first_rows(0, 2500, 3, 2, ENCODER), first_rows(0, 2500, 3, 1, DECODER)
    assert not any(torch.equal(other, whole) for other in others)


def test_steps_equal_the_whole_sequence_and_tied_weights_are_one_tensor() -> None:
    model, tokens = small(), torch.randint(7, (2, 5))
    logits = model.eval()(tokens)
    assert logits.shape == (2, 5, 7)
    by_steps, state = [], None
    for column in tokens.t():
        step, state = model.step(column[None], state)
        by_steps.append(step[0])
    torch.testing.assert_close(torch.stack(by_steps, dim=1), logits)
    tied = small(tied=True)
    assert tied.decoder.weight is tied.encoder.weight
    assert set(tied.state_dict()) == set(model.state_dict())


def test_sampled_text_continues_a_learned_sequence() -> None:
    model, text = small(), torch.tensor([1, 2, 3, 4, 5, 6] * 4)[:, None]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(60):
        logits, _ = model.step(text[:-1], None)
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), text[1:, 0]).backward()
        optimizer.step()
    tokens = sample(model, [1, 2], 10, 0.3, torch.Generator().manual_seed(0))
    assert tokens == [3, 4, 5, 6, 1, 2, 3, 4, 5, 6]

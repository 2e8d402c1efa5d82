"""`hpcdist generate`: a language model of a run continues a text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from hpcdist.cli import options
from hpcdist.errors import UserMistake
from hpcdist.host.image_identity import install_command
from hpcdist.host.log_files import say

if TYPE_CHECKING:
    from hpcdist.data.tokenizer import Tokenizer

app = typer.Typer()
#: A tokenizer's text for the first bytes of a character, if its other bytes are in the next token.
_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
#: Bytes of a character in UTF-8 at most: an end of more replacement characters is not an incomplete one.
_MAX_CHARACTER_BYTES = 4
#: Memory for the keys and values of so many tokens is reserved at once.
_MAX_TOKENS = 100_000
#: Seeds of torch have 64 bits.
_MAX_SEED = 2**63 - 1
#: Below, logits divided by it may not be finite; above, all tokens are about equally probable.
_LEAST_TEMPERATURE, _MOST_TEMPERATURE = 0.001, 1000.0


def _in_range(temperature: float) -> float:
    """Return a temperature. Raises typer.BadParameter if it is not 0 and beyond its bounds, or NaN."""
    if temperature == 0 or _LEAST_TEMPERATURE <= temperature <= _MOST_TEMPERATURE:
        return temperature
    raise typer.BadParameter(
        f"{temperature:g} is neither 0 nor a number from {_LEAST_TEMPERATURE:g} to {_MOST_TEMPERATURE:g}."
    )


@app.command()
def generate(
    run: options.RunName,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="Text that the model continues.")],
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, max=_MAX_TOKENS, help="Tokens to generate at most.")
    ] = 100,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature",
            callback=_in_range,
            help="0 takes the most probable token, larger values draw more.",
        ),
    ] = 0.8,
    top_k: Annotated[
        int, typer.Option("--top-k", min=0, help="Draw from this number of most probable tokens; 0: from all.")
    ] = 50,
    seed: Annotated[int, typer.Option("--seed", min=0, max=_MAX_SEED, help="Seed of the draws.")] = 0,
) -> None:
    """Let the language model of a run continue a text.

    The model is that of the newest checkpoint of a run of trainer lm, also while the run goes on. The text ends with
    the end token of the model, or after --max-tokens.

    Examples:
        hpcdist generate lm-2026 "def main():"
        hpcdist generate lm-2026 "The train" --max-tokens 200 --temperature 0
    """
    from hpcdist.config.written import read_stored
    from hpcdist.run.lookup import resolve_run

    folder = resolve_run(run, options.runs_dir())
    stored = read_stored(folder.config)
    config = stored.config
    if stored.trainer is None or config.trainer.target != "lm":
        name = config.trainer.script_name or config.trainer.target
        raise UserMistake(
            f"generate is for language models of trainer lm, and {folder.name} has trainer {name}: choose another run"
        )
    try:
        from hpcdist.checkpoint.export import find_checkpoint
        from hpcdist.checkpoint.state import load_weights
        from hpcdist.data.tokenizer import tokenizer_of_run
        from hpcdist.trainers.lm import LmConfig
        from hpcdist.trainers.lm.model import generate_tokens, whole_decoder
    except ModuleNotFoundError as error:
        raise UserMistake(f"generate needs {error.name}: run {install_command('train')}") from error

    checkpoint = find_checkpoint(folder, "final", config.checkpoint)
    tokenizer = tokenizer_of_run(folder)
    ids = tokenizer.encode(prompt)
    if not ids:
        raise UserMistake("PROMPT is empty: give the text that the model continues")
    say(f"step {checkpoint.step} of {folder.name}", error=True)
    model = whole_decoder(load_weights(checkpoint.path), config.section(LmConfig))
    tokens = generate_tokens(model, ids, max_tokens, temperature=temperature, top_k=top_k, seed=seed)
    for piece in pieces_of_text(tokenizer, ids, tokens):
        say(piece, end="")
    say("")


def pieces_of_text(tokenizer: Tokenizer, prompt: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yield the text of the prompt, and what each token adds to it, until the end token.

    Only the text of all tokens is well-defined: a character may consist of several tokens, and some tokenizers omit
    the space before the first one.
    """
    ids = list(prompt)
    text = tokenizer.decode(ids)
    yield text
    num_printed = len(text)
    for token in tokens:
        if token == tokenizer.end_token:
            break
        ids.append(token)
        text = tokenizer.decode(ids)
        is_incomplete = text.endswith(_INCOMPLETE) and not text.endswith(_INCOMPLETE * _MAX_CHARACTER_BYTES)
        if not is_incomplete:
            yield text[num_printed:]
            num_printed = len(text)
    yield text[num_printed:]  # an incomplete character at the end

"""A language model on a mesh of ranks: FSDP2, copies of it, and tensor parallelism, in any combination.

Step k of a global batch of G windows takes positions k G to (k + 1) G of the order of the epoch. Each part of the data
(the ranks that share one index of `replicate` and `shard`) takes its share of them, and the gradient is that of the
mean over all tokens. So the step is all of the position, and the result depends on the number of ranks only by
rounding.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (the usual name)
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hpcdist.config.roles import share_of
from hpcdist.config.schema import Config
from hpcdist.config.training_schema import OptimConfig
from hpcdist.data.windows import TokenWindows
from hpcdist.rank.context import Context
from hpcdist.rank.peak_flops import measured_flops, specified_flops
from hpcdist.rank.training_loop import Meter, Progress, build_optimizer, lr_factor, set_lr
from hpcdist.run.figures import Text
from hpcdist.run.samples import MAX_RESULTS
from hpcdist.trainers.lm import LORA_WEIGHTS, LmConfig
from hpcdist.trainers.lm.corpus import Corpus, prepare
from hpcdist.trainers.lm.model import Decoder, add_lora, choose, whole_decoder
from hpcdist.trainers.lm.parallel import clip_gradients, data_index, exchange_replicas, free_gathered, parallelize

log = logging.getLogger(__name__)

#: Decay of Adam's moments for transformers (https://arxiv.org/abs/2005.14165, appendix B). With the default of the
#: second one, 0.999, its estimate is too old for the fast changes at the beginning.
ADAM_BETAS = (0.9, 0.95)
#: Tokens of the beginning of the held-out text that the sample continues, and of the continuation.
NUM_PROMPT_TOKENS, NUM_SAMPLE_TOKENS = 32, 64
#: Characters at the end of the prompt that the report shows; it leaves out the end of a long text.
MAX_SHOWN_PROMPT = 200
#: Limit of the loss in the perplexity: above 709 the exponential is not a finite float64.
MAX_EXPONENT = 700.0

#: Draws of the sample: as a rule, a small model repeats itself if it always takes the most probable token.
SAMPLE_TEMPERATURE, SAMPLE_TOP_K = 0.8, 50

#: A larger model is not exported at the end of a run, which holds it twice in the memory of rank 0.
MAX_EXPORTED_PARAMETERS = 2e9

LossFunction = Callable[[Tensor, Tensor], Tensor]


def train(ctx: Context, cfg: Config) -> None:
    """Train, evaluate, save checkpoints and export the final model. Every rank calls it."""
    lm = cfg.section(LmConfig)
    mesh = ctx.mesh(**lm.mesh.resolve(ctx.world_size))
    corpus = prepare(ctx, cfg)
    model = build_model(ctx, cfg, mesh, corpus.vocab_size)
    optimizer = build_optimizer(parameter_groups(model, cfg.optim), cfg.optim)
    loss_of = next_token_loss
    if cfg.model.compile:
        loss_of = torch.compile(next_token_loss)
    batches = Batches(cfg, mesh, corpus.train)
    held_out = HeldOut(cfg, mesh, corpus)
    rates = Rates(ctx, cfg, model)
    # Steps and epochs done so far, and sums since the last logged step.
    progress = Progress(cfg, batches.steps_per_epoch, evaluate_every=lm.eval_every_steps)
    meter = Meter.restore(ctx, ctx.restore())  # on other ranks than before, rank 0 has the sums of all
    # Loads the newest checkpoint into all of them; then, after each step, asks for a stop, and saves what is due.
    steps = ctx.steps(progress.total_steps, model=model, optimizer=optimizer, position=progress, local=meter)
    ctx.timer.training_begins()  # until here counts as start-up, from here to the end of the first step as compilation

    while not progress.end_reason:  # until a stop rule of the config applies, known after an evaluation
        for step in progress.until_evaluation(steps):
            set_lr(optimizer, cfg.optim.lr * lr_factor(step, progress.total_steps, cfg.schedule))
            passes = batches.of_step(step, ctx.device)
            loss_sum, num_windows, norm = train_step(model, optimizer, passes, loss_of, cfg.optim.max_grad_norm)
            meter.add(loss_sum=loss_sum, num_windows=num_windows)
            if steps.log_is_due:
                lr = optimizer.param_groups[0]["lr"]
                ctx.log({**interval_metrics(ctx, progress, meter, rates), "train/grad_norm": norm, "train/lr": lr})
                meter.reset()
        if steps.is_stopped:  # on all ranks after the same step, which is saved
            return
        with meter.paused():
            with ctx.timer.evaluating():  # its time counts apart from training
                metrics = evaluate(ctx, model, held_out)
                if math.isfinite(metrics["eval/loss"]):
                    write_sample(ctx, lm, model, corpus, progress.step)
                elif ctx.is_main:
                    log.warning("no sample text at step %d: eval/loss is %s", progress.step, metrics["eval/loss"])
                free_gathered(model)
            progress.end_epoch(metrics)
            steps.save(metrics)

    ctx.end_reason = progress.end_reason
    export(ctx, cfg, model)


@dataclass(frozen=True)
class Pass:
    """The windows of one forward and backward pass of a rank.

    Every rank does the same number of passes, since all have a part of the weights. One with no window left computes
    one of another rank. The ranks of a tensor-parallel group compute the same windows. One rank counts each.
    """

    windows: Tensor  #: int64 [n, length + 1]
    num_windows: int  #: n, or 0 if another rank counts them
    weight: float  #: factor of the mean loss, with which the mean of the gradients over the ranks is that of the batch


def train_step(
    model: Decoder,
    optimizer: torch.optim.Optimizer,
    passes: list[Pass],
    loss_of: LossFunction,
    max_grad_norm: float | None,
) -> tuple[Tensor, int, Tensor]:
    """Do one optimizer step.

    Returns the sum of the mean losses of this rank's windows, their number, and the norm of the gradients. Sum and norm
    are on the device.
    """
    loss_sum = torch.zeros((), device=passes[0].windows.device, dtype=torch.float64)
    num_windows = 0
    for number, part in enumerate(passes, start=1):
        exchange_replicas(model, is_last=number == len(passes))
        loss = loss_of(model(part.windows[:, :-1]), part.windows[:, 1:])
        (loss * part.weight).backward()
        loss_sum += loss.detach() * part.num_windows
        num_windows += part.num_windows
    norm = clip_gradients(model, max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss_sum, num_windows, norm


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy in nats, in single precision at least, of [B, T, vocab_size] and [B, T]."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# Set-up: model, optimizer.


def build_model(ctx: Context, cfg: Config, mesh: DeviceMesh, vocab_size: int) -> Decoder:
    """Return this rank's part of the model, with its initial weights."""
    lm = cfg.section(LmConfig)
    num_rows = lm.model.padded_vocab_size(vocab_size)
    with torch.device("meta"):  # no rank ever has all weights
        model = Decoder(lm.model, num_rows)
        if lm.lora.rank:
            add_lora(model, lm.lora)
    ctx.report.log_model_size(sum(weight.numel() for weight in model.parameters() if weight.requires_grad))
    parallelize(
        model,
        mesh,
        in_bf16=cfg.precision.dtype == "bf16",
        recomputed=lm.activation_checkpointing,
        is_compiled=cfg.model.compile,
    )
    model.to_empty(device=ctx.device)
    model.init_weights(cfg.seed)
    added = []
    if lm.lora.rank:
        added = [f"*.{kind}" for kind in LORA_WEIGHTS]
    ctx.init_from(model, skip=added)  # without a checkpoint: the weights of `model.init_from`, if it is set
    return model


def parameter_groups(model: Decoder, cfg: OptimConfig) -> list[dict[str, Any]]:
    """Return the groups of parameters: weight decay only for matrices of products, not for embeddings and norms."""
    decayed = []
    others = []
    for name, weight in model.named_parameters():
        if not weight.requires_grad:  # with LoRA, most are frozen
            continue
        if weight.ndim == 1 or name.endswith("embed_tokens.weight"):
            others.append(weight)
        else:
            decayed.append(weight)
    options: dict[str, Any] = {}
    if cfg.name != "sgd":
        options["betas"] = ADAM_BETAS
    return [{"params": decayed, **options}, {"params": others, "weight_decay": 0.0, **options}]


# The data of a step, and of an evaluation.


def passes_of(index: int, num_parts: int, positions: range, most: int | None) -> list[range]:
    """Return the positions of one of `num_parts` equal ranks in each of its passes, as few as possible.

    All ranks have the same number of passes, of which some may be empty.

    Args:
        most: the largest number of positions of a pass; None for no limit.
    """
    largest_share = math.ceil(len(positions) / num_parts)
    num_passes = math.ceil(largest_share / (most or largest_share))
    share = share_of(index, num_parts, len(positions))
    own = positions[share.start : share.stop]
    parts = [share_of(number, num_passes, len(own)) for number in range(num_passes)]
    return [own[part.start : part.stop] for part in parts]


class Batches:
    """The windows of this rank in each step of the training."""

    def __init__(self, cfg: Config, mesh: DeviceMesh, windows: TokenWindows) -> None:
        self._counts = mesh["tensor"].get_local_rank() == 0
        assert cfg.data.global_batch_size is not None  # checked with the config
        self._size = cfg.data.global_batch_size
        self._most = cfg.section(LmConfig).micro_batch_size
        self._index, self._num_parts = data_index(mesh)
        self._windows = windows
        self.steps_per_epoch: int = math.ceil(windows.num_windows / self._size)

    def of_step(self, step: int, device: torch.device) -> list[Pass]:
        """Return the passes of a step, which is the number of steps done."""
        epoch, step_in_epoch = divmod(step, self.steps_per_epoch)
        begin = step_in_epoch * self._size
        positions = range(begin, min(begin + self._size, self._windows.num_windows))
        passes = []
        for own in passes_of(self._index, self._num_parts, positions, self._most):
            windows = self._windows.read(epoch, np.array(own or positions[:1]))
            num_counted = 0
            if self._counts:
                num_counted = len(own)
            weight = len(own) * self._num_parts / len(positions)
            passes.append(Pass(windows.to(device), num_counted, weight))
        return passes


class HeldOut:
    """The windows of this rank in an evaluation.

    Attributes:
        num_windows: of all ranks.
        length: tokens of a window.
        num_bytes: bytes of the text that the targets of this rank stand for.
    """

    def __init__(self, cfg: Config, mesh: DeviceMesh, corpus: Corpus) -> None:
        lm = cfg.section(LmConfig)
        windows = corpus.held_out
        self.num_windows = lm.num_evaluated(windows.num_windows)
        # By default a rank evaluates as many windows at once as it trains with.
        index, num_parts = data_index(mesh)
        most = lm.micro_batch_size or math.ceil((cfg.data.global_batch_size or 1) / num_parts)
        self._passes = passes_of(index, num_parts, range(self.num_windows), most)
        self._windows = windows
        self.length = lm.sequence_length
        self.num_bytes = 0
        for batch, own in self:
            for window in batch[: len(own), 1:]:
                self.num_bytes += corpus.tokenizer.bytes_of(window.tolist())

    def __iter__(self) -> Iterator[tuple[Tensor, range]]:
        """Yield the windows of each pass, int64 [n, length + 1], and the numbers of those that count."""
        for own in self._passes:
            yield self._windows.read_items(np.array(own or range(1))), own


# Metrics.


class Rates:
    """Converts tokens per second to shares of the rate of the device."""

    def __init__(self, ctx: Context, cfg: Config, model: Decoder) -> None:
        lm = cfg.section(LmConfig)
        self.tokens_per_window = lm.sequence_length
        self._num_ranks = ctx.world_size
        is_frozen = lm.lora.rank > 0
        self._flops = lm.model.flops_per_token(model.vocab_size, lm.sequence_length, is_frozen=is_frozen)
        self._device = ctx.device
        dtype = torch.float32
        if cfg.precision.dtype == "bf16":
            dtype = torch.bfloat16
        self._measured = measured_flops(ctx.device, dtype)
        self._specified: float | None = None
        if ctx.device.type != "cpu" and dtype == torch.bfloat16:
            properties: Any = torch.get_device_module(ctx.device).get_device_properties(ctx.device)
            self._specified = specified_flops(properties.name)

    def metrics(self, tokens_per_s: float) -> dict[str, float]:
        """Return the metrics of a rate of all ranks together."""
        per_rank = tokens_per_s / self._num_ranks
        metrics = {
            "train/tokens_per_s": tokens_per_s,
            "train/tokens_per_s_per_rank": per_rank,
            "train/mfu_of_matmul": per_rank * self._flops / self._measured,
        }
        if self._specified is not None:
            metrics["train/mfu"] = per_rank * self._flops / self._specified
        if self._device.type != "cpu":
            peak = torch.get_device_module(self._device).max_memory_allocated(self._device)
            metrics["train/memory_peak_gb"] = peak / 1e9
        return metrics


def interval_metrics(ctx: Context, progress: Progress, meter: Meter, rates: Rates) -> dict[str, float]:
    """Return the training metrics since the last logged step, and count their windows in `progress`."""
    # Training waits for the device only here.
    loss_sum, num_windows = ctx.groups.sum([float(meter.sums["loss_sum"]), meter.sums["num_windows"]])
    return {
        "train/loss": loss_sum / num_windows,
        "train/epoch": progress.epochs,
        "samples": progress.add_samples(num_windows),  # since the start of the run
        **rates.metrics(num_windows * rates.tokens_per_window / meter.elapsed_s),
    }


@torch.no_grad()
def evaluate(ctx: Context, model: Decoder, held_out: HeldOut) -> dict[str, float]:
    """Return loss, perplexity and bits per byte of the held-out windows, equal on all ranks."""
    losses = [torch.zeros(0, device=ctx.device)]  # of each window; the first entry is for a rank without windows
    numbers: list[int] = []
    for windows, own in held_out:
        windows = windows.to(ctx.device)
        logits = model(windows[:, :-1]).float()
        by_token = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="none")
        losses.append(by_token.view(len(windows), -1).mean(dim=1)[: len(own)])
        numbers += own
        ctx.timer.alive()  # a heartbeat, since an evaluation counts no steps
    by_window = torch.cat(losses).cpu().double()
    loss_sum, num_windows, num_bytes = ctx.groups.sum([float(by_window.sum()), len(numbers), held_out.num_bytes])
    loss = loss_sum / num_windows
    bits_per_byte_of_loss = held_out.length / math.log(2) * num_windows / num_bytes
    if held_out.num_windows <= MAX_RESULTS:  # the results of each window, by which `hpcdist compare` pairs two runs
        ctx.report.log_samples("eval/loss", by_window, numbers)
        ctx.report.log_samples("eval/bits_per_byte", by_window * bits_per_byte_of_loss, numbers)
    return {
        "eval/loss": loss,
        "eval/perplexity": math.exp(min(loss, MAX_EXPONENT)),
        "eval/bits_per_byte": loss * bits_per_byte_of_loss,
    }


@torch.no_grad()
def write_sample(ctx: Context, lm: LmConfig, model: Decoder, corpus: Corpus, step: int) -> None:
    """Write a text that the model continues to `samples/` of the run's artifacts, and the newest to the report.

    Call it on every rank.
    """
    prompt = corpus.tokenizer.encode(lm.sample_prompt)
    if not prompt:
        prompt = corpus.held_out.read_items(np.arange(1))[0, :NUM_PROMPT_TOKENS].tolist()
    continued = continue_text(model, prompt, NUM_SAMPLE_TOKENS, seed=step, multiple=lm.mesh.tensor, device=ctx.device)
    if ctx.is_main:
        begin = corpus.tokenizer.decode(prompt)
        text = corpus.tokenizer.decode(continued)
        continuation = f"\N{BLACK RIGHT-POINTING TRIANGLE}{text}\n"
        ctx.report.artifact(f"samples/step-{step:08}.txt").write_text(begin + continuation)
        shown = begin[-MAX_SHOWN_PROMPT:] + continuation
        ctx.report.figure("sample", Text(title="a text that the model continues", text=shown))


def continue_text(
    model: Decoder, prompt: Sequence[int], num_tokens: int, *, seed: int, multiple: int, device: torch.device
) -> list[int]:
    """Return the tokens that continue a prompt, of a sharded model. Call it on every rank.

    Unlike `generate` it computes the whole text for each token: with tensor parallelism, the ranks divide the text by
    its length, which must be a multiple of their number.
    """
    length = len(prompt) + num_tokens
    padded_length = -(-length // multiple) * multiple
    tokens = torch.zeros(1, padded_length, dtype=torch.int64, device=device)
    tokens[0, : len(prompt)] = torch.tensor(prompt, device=device)
    generator = torch.Generator().manual_seed(seed)
    for position in range(len(prompt), length):
        with torch.compiler.set_stance("force_eager"):  # a compilation for this shape would take longer
            logits = model(tokens)[0, position - 1]
        tokens[0, position] = choose(logits.float().cpu(), SAMPLE_TEMPERATURE, SAMPLE_TOP_K, generator)
    return tokens[0, len(prompt) : length].tolist()


def export(ctx: Context, cfg: Config, model: Decoder) -> None:
    """Export the whole model, which rank 0 holds, up to MAX_EXPORTED_PARAMETERS. Call it on every rank."""
    num_parameters = model.config.num_parameters(model.vocab_size)
    if num_parameters > MAX_EXPORTED_PARAMETERS:
        log.info(
            "the final model has %.1f B parameters: `hpcdist export` converts its checkpoint", num_parameters / 1e9
        )
        return
    weights = {}
    for name, weight in model.state_dict().items():
        assert isinstance(weight, DTensor)
        whole = weight.full_tensor()  # on every rank, one weight at a time
        if ctx.is_main:
            weights[name] = whole.cpu()
    if ctx.is_main:
        lm = cfg.section(LmConfig)
        example = torch.zeros(2, lm.sequence_length, dtype=torch.int64)
        ctx.export_model(whole_decoder(weights, lm), example)

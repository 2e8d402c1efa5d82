p='hpcdist/trainers/rnn/train.py'
s=open(p).read()
a=s.index('def train(ctx: Context, cfg: Config) -> None:')
b=s.index('def _train_lstm(')
c=s.index('def evaluate(')
loopcls='''@dataclass(frozen=True, kw_only=True)
class RnnLoop:
    """State of the training loop of one trainer."""

    ctx: Context
    cfg: Config
    learner: Learner
    group: RpcGroup
    columns: Columns  #: this trainer's share of the training text
    held_out: Columns
    vocab_size: int
    position: TrainingPosition
    meter: Meter
    in_flight: deque[Flight]  #: launched batches whose update is incomplete


'''
body=s[a:b].replace('''        ctx.end_reason = _train_lstm(ctx, cfg, learner, saved, streams, vocab_size[0], group)
''','''        loop = make_loop(ctx, cfg, learner, saved, streams, vocab_size[0], group)
        ctx.end_reason = run_epochs(
            ctx,
            cfg,
            loop.position,
            loop.meter,
            train_epoch=lambda: train_epoch(loop),
            interval_metrics=lambda: interval_metrics(loop),
            evaluate=lambda: evaluate(ctx, learner, loop.held_out),
            save=lambda metrics: save(loop, metrics),
            in_flight=loop.in_flight,
        )
''')
rest='''def make_loop(
    ctx: Context,
    cfg: Config,
    learner: Learner,
    saved: Restored | None,
    streams: Sequence[Tensor],
    vocab_size: int,
    group: RpcGroup,
) -> RnnLoop:
    """Cut the text into this trainer's columns, and load the trainer's state from the checkpoint if there is one."""
    rnn, part = cfg.section(RnnConfig), (ctx.role_index, ctx.roles.count(TRAINER))
    columns, held_out = (Columns(stream, rnn.batch_size, rnn.bptt, part) for stream in streams)
    if saved is not None:
        check_vocab_size(saved, vocab_size)
        learner.lstm.load_state_dict({name.removeprefix("lstm."): tensor for name, tensor in saved.model.items()})
        learner.optimizer.load_state_dict(saved.trainer["optimizer"])
    local = saved.local if saved is not None else None
    if local is not None and "h" in local:
        learner.state = local["h"].to(learner.device), local["c"].to(learner.device)
    return RnnLoop(
        ctx=ctx,
        cfg=cfg,
        learner=learner,
        group=group,
        columns=columns,
        held_out=held_out,
        vocab_size=vocab_size,
        position=TrainingPosition.resume(saved.trainer["position"] if saved else None, len(columns), cfg.stop),
        meter=Meter(local["meter"] if local else None),
        in_flight=deque(),
    )


def train_epoch(loop: RnnLoop) -> Iterator[None]:
    """Do the remaining steps of the epoch: launch batches and land the oldest one."""
    cfg, learner, position, in_flight = loop.cfg, loop.learner, loop.position, loop.in_flight
    max_in_flight = 2 if cfg.section(RnnConfig).mode == "async" else 1
    every = cfg.checkpoint.every_steps
    if position.step_in_epoch == 0:
        learner.state = None  # the columns start anew
    upcoming = loop.columns[position.step_in_epoch]  # the next batch to launch
    while left := position.remaining_steps_in_epoch:
        # No batch is in flight at a step after which a checkpoint is saved or an evaluation follows.
        limit = min(max_in_flight, left, every - position.step % every if every else left)
        while len(in_flight) < limit and not loop.ctx.stop_agreed:
            in_flight.append(learner.launch(upcoming))
            upcoming = loop.columns[(position.step_in_epoch + len(in_flight)) % position.steps_per_epoch]
        flight = in_flight.popleft()
        lr = cfg.optim.lr * lr_factor(position.step, position.total_steps, cfg.schedule)
        loop.meter.add(loss_sum=learner.land(flight, lr, upcoming.ids), num_tokens=len(flight.batch.targets))
        yield


def interval_metrics(loop: RnnLoop) -> dict[str, float]:
    """Return the training metrics since the last logged step."""
    sums = loop.meter.sums
    loss_sum, num_tokens = loop.learner.sum_over_trainers([sums["loss_sum"], sums["num_tokens"]])
    return {
        "train/loss": loss_sum / num_tokens,
        "train/lr": loop.learner.optimizer.param_groups[0]["lr"],
        "train/epoch": loop.position.epochs,
        "train/tokens_per_s": num_tokens / loop.meter.elapsed_s,
    }


def save(loop: RnnLoop, metrics: Mapping[str, float]) -> None:
    """Save on every rank: rank 0 orders the servers to save once they have all updates."""
    ctx, learner, position = loop.ctx, loop.learner, loop.position
    learner.settle()
    if ctx.is_main:
        loop.group.order("save", position.step, to=loop.group.of_role(SERVER))
    state = {} if learner.state is None else {"h": learner.state[0], "c": learner.state[1]}
    ctx.save(
        position.step,
        model=nn.ModuleDict({"lstm": learner.lstm}),
        trainer={
            "optimizer": learner.optimizer.state_dict(),
            "position": asdict(position),
            "num_trainers": ctx.roles.count(TRAINER),
            "num_servers": ctx.roles.count(SERVER),
            "vocab_size": loop.vocab_size,
        },
        local={**state, "meter": loop.meter.sums},
        metrics=metrics,
        shard=Shard(),
    )


'''
s=s[:a]+loopcls+body+rest+s[c:]
s=s.replace('from dataclasses import asdict\n','from dataclasses import asdict, dataclass\n')
open(p,'w').write(s)

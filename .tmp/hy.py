p='hpcdist/trainers/hybrid/train.py'
s=open(p).read()
a=s.index('def train(ctx: Context, cfg: Config) -> None:')
b=s.index('def _train_dense(')
c=s.index('def _lookup_plan(')
d=s.index('def _logits(')
loopcls='''@dataclass(frozen=True, kw_only=True)
class HybridLoop:
    """State of the training loop of one trainer."""

    ctx: Context
    cfg: Config
    groups: ProcessGroups
    group: RpcGroup
    data: Clicks  #: this trainer's share of the training samples, with global rows as ids
    test: Clicks
    num_eval_batches: int  #: equal on all trainers
    model: DistributedDataParallel  #: the dense part
    optimizer: torch.optim.Optimizer
    lookups: Lookups
    position: TrainingPosition
    meter: Meter


'''
body=s[a:b].replace('''            _train_dense(ctx, cfg, layout, groups, group)
''','''            loop = make_loop(ctx, cfg, layout, groups, group)
            ctx.end_reason = run_epochs(
                ctx,
                cfg,
                loop.position,
                loop.meter,
                train_epoch=lambda: train_epoch(loop),
                interval_metrics=lambda: interval_metrics(loop),
                evaluate=lambda: evaluate(loop),
                save=lambda metrics: save(loop, metrics),
            )
            loop.lookups.leave()
            if ctx.end_reason and ctx.is_main:
                _export(ctx, cfg, layout, loop.model, group, num_numeric=loop.test.numeric.shape[1])
''')
rest='''def make_loop(ctx: Context, cfg: Config, layout: Layout, groups: ProcessGroups, group: RpcGroup) -> HybridLoop:
    """Load this trainer's samples, build the dense part, and restore the newest checkpoint."""
    hybrid, num_trainers = cfg.section(HybridConfig), ctx.roles.count("trainer")
    shares = load_clicks(hybrid, cfg.seed, share=ctx.role_index, num_shares=num_trainers)
    data, test = (clicks.with_ids(layout.place(clicks.bags.ids, clicks.table_of_id)) for clicks in shares)
    num_inputs = len(layout.tables) * layout.dim + data.numeric.shape[1]
    model = ctx.wrap(dense_part(num_inputs, hybrid.hidden_sizes), process_group=groups.dense, static_graph=True)
    if num_trainers > 2:  # the sum of two trainers does not depend on the order
        example = torch.zeros(2, num_inputs, device=ctx.device)
        settle_buckets(model, lambda: model(example).sum())
    optimizer = build_optimizer(model.parameters(), cfg.optim)
    plan = _lookup_plan(cfg, layout, data, num_trainers)
    log.info("%d training and %d test samples; %s", len(data), len(test), plan)
    num_test = [0.0] * num_trainers
    num_test[ctx.role_index] = len(test)

    saved = ctx.restore()
    if saved is not None:
        model.module.load_state_dict({name.removeprefix("dense."): value for name, value in saved.model.items()})
        optimizer.load_state_dict(saved.trainer["optimizer"])
    steps_per_epoch = math.ceil(len(data) / hybrid.batch_size)
    return HybridLoop(
        ctx=ctx,
        cfg=cfg,
        groups=groups,
        group=group,
        data=data,
        test=test,
        num_eval_batches=math.ceil(max(_sum_over_trainers(groups, num_test)) / hybrid.eval_batch_size),
        model=model,
        optimizer=optimizer,
        lookups=Lookups(groups.exchange, ctx.ranks_of("parameter_server"), layout, plan),
        position=TrainingPosition.resume(saved.trainer["position"] if saved else None, steps_per_epoch, cfg.stop),
        meter=Meter(saved.local if saved else None),
    )


def train_epoch(loop: HybridLoop) -> Iterator[None]:
    """Do the remaining steps of the epoch; the rows of the next batch are requested before this one is computed."""
    ctx, model, optimizer, lookups, position = loop.ctx, loop.model, loop.optimizer, loop.lookups, loop.position
    model.train()
    samples = _epoch_samples(loop.cfg, loop.data, epoch=position.epoch, start=position.step_in_epoch)
    prepared = (_prepare(ctx, lookups, loop.data, one) for one in islice(samples, position.remaining_steps_in_epoch))
    batch, following = next(prepared), next(prepared, None)
    lookup = lookups.request(batch.units, train=True)
    while True:
        with ctx.timer.waiting():
            pooled = lookups.collect(lookup)
        following_lookup = lookups.request(following.units, train=True) if following is not None else None
        inputs = pooled.to(ctx.device).requires_grad_()
        # The hook sends the gradients to the servers as soon as they are computed, during DDP's exchange.
        inputs.register_hook(lambda gradient, lookup=lookup: lookups.push(lookup, gradient))
        loss = F.binary_cross_entropy_with_logits(_logits(model, inputs, batch.numeric), batch.labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loop.meter.add(loss_sum=loss.item(), num_steps=1)
        after_following = next(prepared, None)  # while the servers apply the gradients
        yield
        if following is None or following_lookup is None:
            return
        batch, lookup, following = following, following_lookup, after_following


def interval_metrics(loop: HybridLoop) -> dict[str, float]:
    """Return the training metrics since the last logged step."""
    sums = loop.meter.sums
    loss_sum, num_steps = _sum_over_trainers(loop.groups, [sums["loss_sum"], sums["num_steps"]])
    return {
        "train/loss": loss_sum / num_steps,
        "train/epoch": loop.position.epochs,
        "train/samples_per_s": loop.cfg.section(HybridConfig).batch_size * num_steps / loop.meter.elapsed_s,
    }


@torch.no_grad()
def evaluate(loop: HybridLoop) -> dict[str, float]:
    """Return AUC and log-loss over the test set, equal on all trainers; for the synthetic log also its best AUC.

    The scores of all trainers are gathered, eight bytes per sample and trainer: an AUC is not a mean of parts.
    """
    ctx, test, lookups = loop.ctx, loop.test, loop.lookups
    size = loop.cfg.section(HybridConfig).eval_batch_size
    scores = []
    for number in range(loop.num_eval_batches):  # a share with one sample less than others may end in an empty batch
        batch = _prepare(ctx, lookups, test, torch.arange(len(test))[number * size : (number + 1) * size])
        pooled = lookups.collect(lookups.request(batch.units, train=False)).to(ctx.device)
        scores.append(_logits(loop.model.module, pooled, batch.numeric).cpu())
        ctx.alive()
    mine = [torch.cat(scores), test.labels] + ([] if test.best_scores is None else [test.best_scores])
    gathered: list[Any] = [None] * ctx.roles.count("trainer")
    dist.all_gather_object(gathered, torch.stack(mine), group=loop.groups.host)
    logits, labels, *best = torch.cat(gathered, dim=1)
    log_loss = F.binary_cross_entropy_with_logits(logits.double(), labels.double())
    metrics = {"eval/auc": auc(logits, labels), "eval/log_loss": float(log_loss)}
    return metrics | ({"eval/best_auc": auc(best[0], labels)} if best else {})


def save(loop: HybridLoop, metrics: Mapping[str, float]) -> None:
    """Save on every rank: rank 0 orders the servers to save once they have applied all gradients so far."""
    ctx, position = loop.ctx, loop.position
    loop.lookups.flush()
    dist.barrier(group=loop.groups.host)
    if ctx.is_main:
        loop.group.order("save", position.step, to=loop.group.of_role("parameter_server"))
    ctx.save(
        position.step,
        model=nn.ModuleDict({"dense": loop.model}),
        trainer={"optimizer": loop.optimizer.state_dict(), "position": asdict(position)},
        local=loop.meter.sums,
        metrics=metrics,
        shard=Shard(),
    )


'''
helpers=s[c:d]
e=s.index('@torch.no_grad()\ndef evaluate(')
f=s.index('def _export(')
s=s[:a]+loopcls+body+rest+helpers+s[d:e]+s[f:]
open(p,'w').write(s)

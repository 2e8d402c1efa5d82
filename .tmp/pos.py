import re
def rep(p,a,b):
    s=open(p).read(); assert a in s,(p,a); s=s.replace(a,b); open(p,'w').write(s)
def cut(p, start, end, new):
    s=open(p).read(); a=s.index(start); b=s.index(end,a); open(p,'w').write(s[:a]+new+s[b:])
for d in ('ddp','rl','rnn','hybrid','pipeline'):
    p=f'hpcdist/trainers/{d}/train.py'; s=open(p).read()
    name={'ddp':'DdpLoop','rl':'RlLoop','rnn':'RnnLoop','hybrid':'HybridLoop','pipeline':'PipelineLoop'}[d]
    s=s.replace(f'@dataclass(frozen=True, kw_only=True)\nclass {name}',f'@dataclass(frozen=True)\nclass {name}'); open(p,'w').write(s)
cut('hpcdist/trainers/ddp/train.py','    return DdpLoop(','\n\ndef train_epoch','''    position = TrainingPosition.resume(saved.trainer["position"] if saved else None, steps_per_epoch, cfg.stop)
    meter = Meter(saved.local if saved else None, ctx.device)
    return DdpLoop(ctx, cfg, data, model, optimizer, scaler, position, meter)
''')
cut('hpcdist/trainers/rl/train.py','    return RlLoop(','\n\ndef train_policy','''    observers = ObserverGroup(group, cfg, pending)
    test_envs = make_environments(problem, rl.num_eval_episodes, random_numbers(cfg.seed, 1, 0))
    position = TrainingPosition.resume(saved.trainer["position"] if saved else None, rl.updates_per_epoch, cfg.stop)
    meter = Meter(saved.trainer["meter"] if saved else None, ctx.device)
    history = History(**saved.trainer["history"]) if saved else History()
    began = time.perf_counter()
    return RlLoop(
        ctx, cfg, problem, policy, optimizer, observers, group, test_envs, position, meter, history, began
    )
''')
cut('hpcdist/trainers/rnn/train.py','    return RnnLoop(','\n\ndef train_epoch','''    position = TrainingPosition.resume(saved.trainer["position"] if saved else None, len(columns), cfg.stop)
    meter = Meter(local["meter"] if local else None)
    return RnnLoop(ctx, cfg, learner, group, columns, held_out, vocab_size, position, meter, deque())
''')
cut('hpcdist/trainers/hybrid/train.py','    return HybridLoop(','\n\ndef train_epoch','''    position = TrainingPosition.resume(saved.trainer["position"] if saved else None, steps_per_epoch, cfg.stop)
    meter = Meter(saved.local if saved else None)
    return HybridLoop(
        ctx, cfg, groups, group, data, test, num_eval_batches, model, optimizer, lookups, position, meter
    )
''')
rep('hpcdist/trainers/hybrid/train.py','''    num_test[ctx.role_index] = len(test)

    saved''','''    num_test[ctx.role_index] = len(test)
    num_eval_batches = math.ceil(max(_sum_over_trainers(groups, num_test)) / hybrid.eval_batch_size)
    lookups = Lookups(groups.exchange, ctx.ranks_of("parameter_server"), layout, plan)

    saved''')
cut('hpcdist/trainers/pipeline/train.py','    saved, steps_per_epoch = setup','\n\ndef train_epoch','''    num_micro_batches = select_micro_batches(ctx, cfg, setup)
    saved, steps_per_epoch = setup.saved, len(setup.data.train) // cfg.data.batch_size
    position = TrainingPosition.resume(saved.trainer["position"] if saved else None, steps_per_epoch, cfg.stop)
    return PipelineLoop(ctx, cfg, setup, num_micro_batches, position, Meter(saved.local if saved else None, ctx.device))
''')

import re,pathlib
p=pathlib.Path('hpcdist/rank/context.py'); s=p.read_text()
a=s.index('    # --- ranks and roles'); b=s.index('    # --- progress and stopping'); s=s[:a]+s[b:]
def sub(x,y):
    global s
    assert s.count(x)==1,(s.count(x),x); s=s.replace(x,y)
sub('class Context:\n','class Context(RankInfo):\n')
sub('from hpcdist.rank.roles import Roles\n','from hpcdist.rank.rank_info import RankInfo\n')
sub('''        self.config = config
        self.run = run
        self.attempt = attempt
        self.topology = topology
        self.roles = Roles.of(config.roles, topology.world_size)
''','''        super().__init__(topology, config.roles)
        self.config = config
        self.run = run
        self.attempt = attempt
''')
sub('''            config=config,
            run=run,
            attempt=attempt,
            topology=topology,
            device=device,
            groups=groups,
            journal=journal,
''','''            config=config, run=run, attempt=attempt, topology=topology, device=device, groups=groups, journal=journal
''')
sub('''        """Let only some ranks take part in the agreement of `should_stop`, because the others do not count steps.

        Call it on every rank, before the first step. The other ranks must not call `should_stop` afterwards.

        Args:
            ranks: the ranks that call `should_stop`.
        """''','''        """Let only `ranks` take part in the agreement of `should_stop`, because the others do not count steps.

        Call it on every rank, before the first step. The other ranks must not call `should_stop` afterwards.
        """''')
sub('''        """Return the path at which to write an artifact of the MLflow run.

        Write the file on one rank. It is uploaded while the run continues, and again after each change.

        Args:
            name: path relative to the artifacts, such as `returns.png` or `samples/step-100.txt`.

        Returns:
            The path; its parent folder exists.
        """''','''        """Return the path at which to write an artifact of the MLflow run; its parent folder exists.

        Write the file on one rank. It is uploaded while the run continues, and again after each change.

        Args:
            name: path relative to the artifacts, such as `returns.png` or `samples/step-100.txt`.
        """''')
sub('''        """Return the sum of each value over all ranks, in double precision. Call it on every rank.

        Args:
            values: numbers in host memory, the same number of them on each rank.
        """''','''        """Return the sum of each value over all ranks, in double precision.

        Call it on every rank, with the same number of values in host memory.
        """''')
sub('''        """Return whether a checkpoint is due after `step` steps.

        A checkpoint is due every `checkpoint.every_steps` steps and when the ranks have agreed to stop, unless this
        step is saved already.

        Args:
            step: number of steps done.
        """''','''        """Return whether a checkpoint is due after `step` steps.

        A checkpoint is due every `checkpoint.every_steps` steps and when the ranks have agreed to stop, unless this
        step is saved already.
        """''')
sub('''        The call restores the random number generators. The trainer itself loads model and optimizer from the result.

        Returns:
            The checkpoint, or None at the first start of the run.

        Raises:
            CheckpointError: the checkpoint cannot be read.
        """''','''        The call restores the random number generators. The trainer itself loads model and optimizer from the result,
        which is None at the first start of the run. Raises CheckpointError if the checkpoint cannot be read.
        """''')
sub('''        """Wait until checkpoints and metrics are on disk. The worker calls it after `train`.

        Raises:
            CheckpointError: a save has failed, or the trainer stopped without saving its last step.
        """''','''        """Wait until checkpoints and metrics are on disk. The worker calls it after `train`.

        Raises CheckpointError if a save has failed, or if the trainer stopped without saving its last step.
        """''')
sub('''        Raises:
            CheckpointError: the save cannot start, or an earlier one has failed.
        """''','''        Raises CheckpointError if the save cannot start, or if an earlier one has failed.
        """''')
sub('''        Args:
            module: the model, equal on all ranks. It remains accessible as `.module` of the result.
            **options: arguments of DistributedDataParallel, such as `static_graph=True` for a model without
                data-dependent branches.

        Returns:
            The wrapped model; its backward pass averages gradients over all ranks.
        """''','''        Args:
            module: the model, equal on all ranks. It remains accessible as `.module` of the result.
            **options: arguments of DistributedDataParallel, such as `static_graph=True` for a model without
                data-dependent branches.
        """''')
p.write_text(s)

import sys; sys.path.insert(0,'.tmp')
from e import F
f=F('hpcdist/checkpoint/host_copy.py')
f.cut('The training thread waits','"""\n\nfrom','''The training thread waits for this copy at each save: for 200 MB on a CPU it takes 18 ms, a memcpy 13 ms and
`torch.save` 157 ms (`benchmarks/checkpoint_stall.py`). `DefaultStager` of `torch.distributed.checkpoint` (torch 2.15)
is not used: it copies the whole storage of a view, and on CUDA the training thread must wait for the copies before it
changes the weights; here they are queued on the stream of the training.
''')
f.save()
f=F('hpcdist/checkpoint/store.py')
f.sub('''        """Load one checkpoint folder into host memory.

        Args:
            path: the checkpoint folder.
            verify: check the hashes first; not needed if `latest()` has just checked them.

        Raises CheckpointError if it is incomplete, has changed, or contains anything other than plain data.
        """''','''        """Load one checkpoint folder into host memory. `verify` checks the hashes, unless `latest()` has just done so.

        Raises CheckpointError if it is incomplete, has changed, or contains anything other than plain data.
        """''')
f.sub('''        A valid checkpoint of the same step is kept and the new one is dropped, because both contain the same state.

        Args:
            snapshot: the state to write.
            before_publish: called directly before the rename to the final name.
''','''        A valid checkpoint of the same step is kept and the new one is dropped, because both contain the same state.
        `before_publish` is called directly before the rename to the final name.
''')
f.save()
f=F('hpcdist/checkpoint/saver.py')
f.sub('''        """Copy the state to host memory and write it in the background; later changes of the state are not saved.

        Waits for the previous save first. If the step is saved already, the call only adds the metrics.

        Args:
            step: number of steps done; not less than the step of the newest checkpoint.
            model: state dict of the bare model.
            trainer: the trainer's state, equal on all ranks.
            rank_states: one state for each rank, by rank.
            metrics: metrics of this checkpoint.
            collect_shards: moves the shards of other ranks into the checkpoint folder; see `shards.py`.
            block: return only after the checkpoint is on disk.
''','''        """Copy the state to host memory and write it in the background; later changes of the state are not saved.

        Waits for the previous save first. If the step is saved already, the call only adds the metrics. With `block`
        it returns only after the checkpoint is on disk. The other arguments are the fields of `Snapshot`; `step` must
        not be less than the step of the newest checkpoint.
''')
f.sub('''    The next `save()`, `wait()` or `close()` raises an error of the background thread and does nothing else. If the file
    system was unreachable, only `wait()` and `close()` raise. The thread starts at the first `save()`. The caller must
    restore before the first save.
''','''    An error of the background thread is raised as by `BackgroundWriter`; if the file system was unreachable, only
    `wait()` and `close()` raise it. The caller must restore before the first save.
''')
f.save()

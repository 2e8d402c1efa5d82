import sys,re; sys.path.insert(0,'.tmp')
from e import F
f=F('hpcdist/rank/network/own_sockets.py')
f.cut('    ended = (psutil','zzz' if False else '\x00','') if False else None
i=f.t.index('    ended = (psutil.CONN'); f.t=f.t[:i]+'''    ended = (psutil.CONN_LISTEN, psutil.CONN_TIME_WAIT)
    return {
        _address(own.raddr)
        for own in psutil.net_connections("tcp")
        if own.raddr and own.laddr and own.laddr.port == port and own.status not in ended
    }
'''
f.save()
f=F('hpcdist/rank/context.py')
f.sub('''        """Write the final model in MLflow's format, for `mlflow.pytorch.load_model`. Only rank 0 writes.

        Args:
            module: the bare model (`wrapped.module`). It is moved to the CPU and set to evaluation mode.
            example: one input batch of at least two samples, from which MLflow infers the model's signature.
        """''','''        """Write the final model in MLflow's format, for `mlflow.pytorch.load_model`. Only rank 0 writes.

        `module` is the bare model (`wrapped.module`); it is moved to the CPU and set to evaluation mode. `example` is
        one input batch of at least two samples, from which MLflow infers the model's signature.
        """''')
f.sub('''        """Record metrics of a step. Only rank 0 records; on other ranks the call has no effect.

        The call writes to the run's journal and takes microseconds; a separate process sends the journal to MLflow.
        Values must be numbers in host memory: `float(tensor)` of a CUDA tensor waits for the GPU, so log only every
        few steps.

        Args:
            metrics: values by metric name, such as `{"train/loss": 0.3}`.
            step: number of steps done, the x-axis in MLflow.
        """''','''        """Record metrics of a step. Only rank 0 records; on other ranks the call has no effect.

        The call writes to the run's journal and takes microseconds; a separate process sends the journal to MLflow.
        Values must be numbers in host memory: `float(tensor)` of a CUDA tensor waits for the GPU, so log only every
        few steps. `step` is the x-axis in MLflow.
        """''')
f.sub('''        timer: step timing of this rank. `wrap` and `should_stop` feed it; use `with ctx.timer.waiting():` around code
            that waits for other ranks.
        end_reason: one sentence that explains why the trainer returned. Set it at the end of `train`; the status of the
            run shows it.
''','''        timer: step timing of this rank; use `with ctx.timer.waiting():` around code that waits for other ranks.
        end_reason: why the trainer returned, one sentence for the status of the run. Set it at the end of `train`.
''')
f.save()

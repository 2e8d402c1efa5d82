import sys,re; sys.path.insert(0,'.tmp')
from e import F
# topology -> device
f=F('hpcdist/rank/topology.py')
i=f.t.index('def ranks_on_node('); j=f.t.index('def _build(')
block=f.t[i:j]; f.t=f.t[:i]+f.t[j:]
f.sub('from collections.abc import Iterable, Mapping, Sequence\n','from collections.abc import Iterable, Mapping\n')
f.sub('''    place = {
        "rank": 0,
        "world_size": 1,
        "local_rank": 0,
        "local_world_size": 1,
        "node_rank": 0,
        "num_nodes": 1,
    }
    return''','''    place = {"rank": 0, "world_size": 1, "local_rank": 0, "local_world_size": 1, "node_rank": 0, "num_nodes": 1}
    return''')
f.sub('''_SLURM_FIX''','_SLURM_FIX') if f.t.count('_SLURM_FIX')==1 else None
f.t=f.t.replace('_SLURM_FIX','SLURM_FIX')
f.save()
block=block.replace('''def _numbers(text: str) -> list[str]:
    parts = text.split(",")
    if not all(re.fullmatch(r"[0-9]{1,10}", part) for part in parts):
        raise TopologyError(f"must be whole numbers separated by commas, got {shortened(text)!r}")
    return parts


''','').replace('''        return [int(rank) for rank in Variables(env, _SLURM_FIX).parsed("SLURM_GTIDS", _numbers)]
''','''        return Variables(env, SLURM_FIX).parsed("SLURM_GTIDS", _numbers)
''')
block+='''def _numbers(text: str) -> list[int]:
    if re.fullmatch(r"[0-9]{1,10}(,[0-9]{1,10})*", text) is None:
        raise TopologyError(f"must be whole numbers separated by commas, got {shortened(text)!r}")
    return [int(part) for part in text.split(",")]
'''
f=F('hpcdist/rank/device.py')
f.t=f.t.rstrip()+'\n\n\n'+block
f.sub('from hpcdist.rank.topology import Topology, cuda_index, ranks_on_node\n','from hpcdist.rank.topology import SLURM_FIX, Topology\nfrom hpcdist.rank.variables import Variables\n')
f.sub('from hpcdist.errors import ConfigError\n','from hpcdist.errors import ConfigError, TopologyError, shortened\n')
f.sub('from collections.abc import Mapping\n','import re\nfrom collections.abc import Mapping, Sequence\n')
f.save()
f=F('tests/fuzz/test_fuzz_slurm.py')
f.sub('from hpcdist.rank.topology import Topology, port_for, ranks_on_node\n','from hpcdist.rank.device import ranks_on_node\nfrom hpcdist.rank.topology import Topology, port_for\n'); f.save()
# roles
f=F('hpcdist/rank/roles.py')
f.cut('    def rank_of(','    def of_rank('); f.save()
# state dict
f=F('hpcdist/checkpoint/state_dict.py')
f.cut('def load_clean_state_dict','def _wrapper_prefixes')
f.sub('from hpcdist.errors import CheckpointError\n\n\n','\n'); f.sub('from collections.abc import Mapping\n\n','')
f.save()
# stop agreement
f=F('hpcdist/rank/stop_agreement.py')
f.cut('    @property\n    def signalled','    def agree_in')
f.t=f.t.replace('self._flag','self.flag')
f.sub('            self._skip = min(int(AGREEMENT_INTERVAL_S / max(step_s, 1e-6)), 10_000)\n        elif','            self._skip_for(step_s)\n        elif')
f.sub('            self._skip = min(int(AGREEMENT_INTERVAL_S / max(step_s, 1e-6)), 10_000)\n            return\n','            self._skip_for(step_s)\n            return\n')
f.cut('    def _wanted(self','    def close(self)','''    def _skip_for(self, step_s: float) -> None:
        self._skip = min(int(AGREEMENT_INTERVAL_S / max(step_s, 1e-6)), 10_000)

    def _wanted(self, now: float) -> bool:
        if self.flag.is_set:
            return True
        if not self._watch_request or now < self._next_check:
            return False
        self._next_check = now + REQUEST_INTERVAL_S
        try:
            found = self._request.exists()
        except OSError as error:
            if not self._is_unreachable:
                log.warning("%s: %s; the next check for a stop request is in a second", self._request, error.strerror)
            self._is_unreachable = True
            return False
        self._is_unreachable = False
        return found

''')
f.save()
f=F('hpcdist/rank/context.py')
f.sub('return self._stop.signalled','return self._stop.flag.is_set'); f.sub('self._stop.request_stop()','self._stop.flag.is_set = True')
f.sub('''        Call it on every rank after every step. All ranks receive the same answer at the same step. The call also
        updates the heartbeat: a rank that does not call it (or `alive`) within `launch.hang_timeout_s` counts as hung.

        Args:
            step: number of steps done.
            total_steps: number of steps of the whole training, for the progress display; None if unknown.

        Returns:
            True once the ranks have agreed to stop, after a stop signal or `hpcdist stop`; it stays True.

        Raises:
            CheckpointError: a save has failed in the background since the last call.
            RuntimeError: another rank has died.
''','''        Call it on every rank after every step. All ranks receive the same answer at the same step: True once they have
        agreed to stop, after a stop signal or `hpcdist stop`. The call also updates the heartbeat: a rank that does not
        call it (or `alive`) within `launch.hang_timeout_s` counts as hung.

        Args:
            step: number of steps done.
            total_steps: number of steps of the whole training, for the progress display; None if unknown.

        Raises CheckpointError if a save in the background has failed, and RuntimeError if another rank has died.
''')
f.sub('''        """Wait until every rank has called `barrier`."""
''','''        """Wait until every rank has called `barrier`."""
''')
f.save()
# own_sockets
f=F('hpcdist/rank/network/own_sockets.py')
i=f.t.index('def connections_to('); f.t=f.t[:i]+'''def connections_to(port: int) -> set[Address]:
    """Return the peers of all connections to a port of this machine, including those not accepted yet."""
    ended = (psutil.CONN_LISTEN, psutil.CONN_TIME_WAIT)
    found = psutil.net_connections("tcp")
    return {_address(own.raddr) for own in found if own.laddr and own.laddr.port == port and own.status not in ended}
'''
f.sub('from pathlib import Path\n','\nimport psutil\n'); f.save()
# heartbeat
f=F('hpcdist/rank/telemetry/heartbeat.py')
f.sub('''        """Record the latest values of metrics; metrics beyond MAX_METRICS are ignored."""
        if len(self.metrics) + len(metrics) <= MAX_METRICS:
            self.metrics.update(metrics)
            return
        for''','''        """Record the latest values of metrics; metrics beyond MAX_METRICS are ignored."""
        for''')
f.sub('''            self._failed = True
            self._close_file()
            return''','''            self._failed = True
            if self._file is not None:  # opened again by the next write: a stale handle does not recover
                with suppress(OSError):
                    os.close(self._file)
                self._file = None
            return''')
i=f.t.index('    def _close_file'); f.t=f.t[:i].rstrip()+'\n'
f.save()

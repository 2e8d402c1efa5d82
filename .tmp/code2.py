import re
def sub(p, pairs):
    s=open(p).read()
    for a,b in pairs:
        assert a in s,(p,a)
        s=s.replace(a,b)
    open(p,'w').write(s)
def cut(p, start, end, new=''):
    s=open(p).read(); a=s.index(start); b=s.index(end,a); open(p,'w').write(s[:a]+new+s[b:])

E='hpcdist/trainers/rl/environments.py'
cut(E,'class Environments(Protocol):','def make_environments(')
sub(E,[('from typing import Any, NamedTuple, Protocol\n','from typing import Any, NamedTuple, TypeAlias\n'),
('''    def begin(self, rng: np.random.Generator) -> None:
        self._inner.np_random = rng

    def reset(self) -> None:
        before''','''    def begin(self, rng: np.random.Generator) -> None:
        """Draw all random numbers from `rng` from now on."""
        self._inner.np_random = rng

    def reset(self) -> None:
        """Start a new episode in every environment."""
        before'''),
('''        step = Step(*self._env.step(actions)[:4])''','''        """Step with actions in the environment's units. Environments in `skip` may be left out."""
        step = Step(*self._env.step(actions)[:4])'''),
('''    def state(self) -> dict[str, Any]:
        values =''','''    def state(self) -> dict[str, Any]:
        """Return the state for `load_state` as tensors and lists, without the generator: call `begin` after loading."""
        values ='''),
('''    """Environments that are stepped in a Python loop.

''','''    """Environments that are stepped in a Python loop, with the methods of `Vectorized`.

'''),
('''def _is_array_or_number(''','''Environments: TypeAlias = Vectorized | Separate
"""n environments that are stepped together.

`observations` [n, num_inputs] are the input of the next action. `over` [n] holds whether an episode has ended, so that
the next step resets its environment.
"""


def _is_array_or_number('''),
])
X='hpcdist/trainers/rnn/text.py'
cut(X,'class TextParams(Protocol):','@dataclass(frozen=True)\nclass Corpus')
cut(X,'class Tokenizer(Protocol):','class ByteTokenizer:')
sub(X,[('from typing import Protocol\n','from typing import TypeAlias\n'),
('    """UTF-8."""\n','    """The bytes of UTF-8 as tokens."""\n'),
('''    @property
    def size(self) -> int:
        return int(self._library''','''    @property
    def size(self) -> int:
        """Number of different tokens."""
        return int(self._library'''),
('@dataclass(frozen=True)\nclass Corpus','Tokenizer: TypeAlias = ByteTokenizer | WordTokenizer\n\n\n@dataclass(frozen=True)\nclass Corpus'),
('def load_corpus(params: TextParams, seed: int)','def load_corpus(cfg: RnnConfig, seed: int)'),
('params.','cfg.'),
('from hpcdist.errors import ConfigError\n','from hpcdist.errors import ConfigError\nfrom hpcdist.trainers.rnn.schema import RnnConfig\n'),
])
G='hpcdist/trainers/pipeline/engines.py'
cut(G,'class Engine(Protocol):','class RpcEngine:')
sub(G,[('from typing import Any, Protocol\n','from typing import Any, TypeAlias\n'),
('''class RpcEngine:
    """Runs a schedule over `Wire`; see `Engine`."""
''','''class RpcEngine:
    """Runs a schedule of this rank's stage over `Wire`.

    `idle_s` counts the seconds that the stage has waited for others in `step`.
    """
'''),
('''    def step(self, images: Tensor | None, labels: Tensor | None, num_micro_batches: int) -> Tensor:
        image_parts''','''    def step(self, images: Tensor | None, labels: Tensor | None, num_micro_batches: int) -> Tensor:
        """Add the gradients of the batch's mean cross-entropy to the stage's parameters.

        Args:
            images: [B, 3, H, W], for the first stage; None elsewhere.
            labels: int64 [B], for the last stage; None elsewhere.

        Returns the loss in the last stage, zero elsewhere. Every stage calls it with the same `num_micro_batches`.
        """
        image_parts'''),
('''    def infer(self, batches: Iterable[Tensor | None]) -> Iterator[Tensor | None]:
        num_ahead = 0''','''    def infer(self, batches: Iterable[Tensor | None]) -> Iterator[Tensor | None]:
        """Yield the logits of each batch in the last stage, None elsewhere. All batches have the same size."""
        num_ahead = 0'''),
('''    """Runs the stages by torch.distributed.pipelining over the process group; see `Engine`.
''','''    """Runs the stages by torch.distributed.pipelining over the process group, with the methods of `RpcEngine`.
'''),
])
s=open(G).read().rstrip()+'\n\n\nEngine: TypeAlias = RpcEngine | PipeliningEngine\n'
open(G,'w').write(s)
sub('hpcdist/trainers/pipeline/stages.py',[
('context_fn=partial(_contexts, unit))','context_fn=partial(_contexts, unit))'),
])
O='hpcdist/trainers/rl/observers.py'
cut(O,'def call_timeout_s(','@remote\ndef _collect')
sub(O,[('''        infer = functools.partial(request_inference, self._ctx.role_index, call_timeout_s(self._cfg))
''','''        infer = functools.partial(request_inference, self._ctx.role_index, self._cfg.launch.hang_timeout_s)
'''),
('''        self._pending = [
            rpc.rpc_async(name, _collect, (number, weights), timeout=call_timeout_s(self._cfg)) for name in self._names
        ]
''','''        timeout_s = self._cfg.launch.hang_timeout_s  # longer than any rollout: the supervisor detects a hung rank
        self._pending = [rpc.rpc_async(name, _collect, (number, weights), timeout=timeout_s) for name in self._names]
''')])
# click files
C='hpcdist/trainers/hybrid/click_logs.py'
s=open(C).read()
a=s.index('# --- files'); b=s.index('def padded(')
files=s[a:b]; 
s=s[:a]+s[b:]
s=s.replace('import zlib\n','').replace('from pathlib import Path\nfrom typing import TYPE_CHECKING, Any\n\nimport numpy as np\n','\n').replace('''if TYPE_CHECKING:
    import pyarrow as pa

''','')
d=s.index('#: Exceptions of pyarrow'); e=s.index('\n\n@dataclass',d)
s=s[:d].rstrip()+'\n'+s[e:]
s=s.replace('''    source = _SyntheticLog(cfg, seed) if not cfg.file else _FileLog(cfg)
''','''    if cfg.file:
        from hpcdist.trainers.hybrid.click_files import FileLog  # pyarrow takes 0.3 s

        source: FileLog | _SyntheticLog = FileLog(cfg)
    else:
        source = _SyntheticLog(cfg, seed)
''')
s=s.replace('"""Click logs: bags of ids, numeric features and a label per sample, from a Parquet or CSV file or synthetic.','"""Click logs: bags of ids, numeric features and a label per sample, from a file (`click_files.py`) or synthetic.')
s=s.replace('# --- synthetic\n\n\n','')
s=s.replace('''    lengths = clicks.bags.offsets.diff()
    bag = torch.arange(len(lengths)).repeat_interleave(lengths)
    place = torch.arange(len(clicks.bags.ids)) - clicks.bags.offsets[:-1].repeat_interleave(lengths)
    keep = place < bag_size
    ids = torch.full((len(lengths), bag_size), -1.0, dtype=torch.float64)
    ids[bag[keep], place[keep]] = clicks.bags.ids[keep].double()
    return torch.cat([clicks.numeric.double(), ids.view(len(clicks), -1)], dim=1)
''','''    ids = torch.full((len(clicks.bags), bag_size), -1.0, dtype=torch.float64)
    for row, bag in zip(ids, clicks.bags.ids.tensor_split(clicks.bags.offsets[1:-1]), strict=True):
        row[: len(bag)] = bag[:bag_size]
    return torch.cat([clicks.numeric.double(), ids.view(len(clicks), -1)], dim=1)
''')
open(C,'w').write(s)
files=files.replace('# --- files\n\n\n','').replace('class _FileLog:','class FileLog:\n    """A click log in a Parquet or CSV file."""\n')
files=files.replace('''        import pyarrow as pa
        from pyarrow import csv, parquet

''','').replace('        import pyarrow as pa\n        import pyarrow.compute as pc\n\n','').replace('        import pyarrow as pa\n\n','').replace('    import pyarrow as pa\n\n','')
files=files.replace('except (*_DAMAGED, pa.ArrowException) as error','except _DAMAGED as error')
files=files.replace('''                if min([0, *(group.num_rows for group in groups)]) < 0 or self._num_rows != sum(
                    group.num_rows for group in groups
                ):
''','''                sizes = [group.num_rows for group in groups]
                if any(size < 0 for size in sizes) or self._num_rows != sum(sizes):
''').replace('''                groups = [self._parquet.metadata.row_group(number) for number in range(self._parquet.num_row_groups)]
                sizes = [group.num_rows for group in groups]
''','''                groups = range(self._parquet.num_row_groups)
                sizes = [self._parquet.metadata.row_group(number).num_rows for number in groups]
''')
files=files.replace('''        numeric = (
            torch.stack([self._numbers(table, name) for name in cfg.numeric_columns], dim=1)
            if cfg.numeric_columns
            else None
        )
''','''        numeric = torch.zeros(len(labels), len(cfg.numeric_columns))
        for number, name in enumerate(cfg.numeric_columns):
            numeric[:, number] = self._numbers(table, name)
''').replace('''        empty = torch.zeros(len(labels), 0)
        return Clicks(whole.take(order), empty if numeric is None else numeric, labels, tuple(cfg.tables))
''','''        return Clicks(whole.take(order), numeric, labels, tuple(cfg.tables))
''')
head='''"""Click logs in Parquet and CSV files."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from pyarrow import csv, parquet
from torch import Tensor

from hpcdist.errors import DataError
from hpcdist.trainers.hybrid.click_logs import Bags, Clicks
from hpcdist.trainers.hybrid.schema import HybridConfig

#: Exceptions of pyarrow for damaged content: its kernels document none.
_DAMAGED = (
    *(OSError, ValueError, TypeError, LookupError, ArithmeticError, MemoryError, NotImplementedError),
    pa.ArrowException,
)


'''
open('hpcdist/trainers/hybrid/click_files.py','w').write(head+files.rstrip()+'\n')

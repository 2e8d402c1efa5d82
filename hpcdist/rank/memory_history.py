"""The history of a GPU's allocations: a rank without memory left names the lines of code that hold it.

torch notes the stack of Python at each allocation, and forgets it with the memory: 0.8 µs of CPU time for 5 frames, 1.3
for 60. That is little beside the start of a kernel, and nothing where a step waits for the GPU, while a lack of memory
comes once and unexpectedly: so the history is always on. `benchmarks/gpu_probes.py history` measures whole steps.

Nothing here ends a run: other allocators, such as `backend:cudaMallocAsync`, have no history.
"""

import importlib.util
import logging
import re
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from hpcdist.run.device_memory import OUT_OF_MEMORY_BESIDE_TORCH, DeviceMemory

log = logging.getLogger(__name__)
#: Of GPUs of NVIDIA and AMD. torch has no such history of others.
_MODULE = "torch.cuda"
#: In the message of a lack of memory, with the number of the GPU in this process.
_FULL_GPU = re.compile(r"\bGPU (\d+) has a total capacity")
#: torch.OutOfMemoryError, of any device. A script without torch does not import it here.
_OUT_OF_MEMORY = "OutOfMemoryError"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that the GPU of this process is out of memory."""
    if isinstance(error, RuntimeError) and re.search(OUT_OF_MEMORY_BESIDE_TORCH, str(error)):
        return True
    return type(error).__name__ == _OUT_OF_MEMORY


def record_when_used() -> None:
    """Record the lines of code that allocate a GPU's memory, from the first use of a GPU in this process on.

    Neither imports torch nor initialises a GPU: a script may set variables first, or fork.
    """
    if _MODULE in sys.modules:
        _record_when_initialized()
    else:
        sys.meta_path.insert(0, _AfterImport(_MODULE, _record_when_initialized))


def _record_when_initialized() -> None:
    from torch.cuda import _lazy_call  # the rest of torch may not be imported yet

    _lazy_call(begin)


def begin() -> None:
    """Record the lines of code that allocate memory from now on."""
    import torch

    try:
        # Without the events of the past, which grow in number, and without the frames of C++, which take longer.
        torch.cuda.memory._record_memory_history("state", context="state", stacks="python")
    except Exception as error:
        log.debug("a lack of GPU memory will not be explained by lines of code: %s", error)


def memory_record(message: str) -> dict[str, Any] | None:
    """Return the allocations of a full GPU by line of code, as a record of `DeviceMemory`; None if torch does not say.

    Args:
        message: of the error. A script may use another GPU than torch's current one.
    """
    # Other libraries have errors of this name, too: a script without torch does not import it here.
    cuda = sys.modules.get(_MODULE)
    if cuda is None or not cuda.is_initialized():
        return None
    named = _FULL_GPU.search(message)
    try:
        index = cuda.current_device()
        if named is not None:
            index = int(named[1])
        free_bytes, total_bytes = cuda.mem_get_info(index)
        memory = DeviceMemory.of_snapshot(cuda.memory._snapshot(), index, free_bytes, total_bytes)
    except Exception as error:  # the lack of memory is the error to report
        log.debug("the lack of GPU memory is not explained by lines of code: %s", error)
        return None
    return memory.record()


class _AfterImport(MetaPathFinder, Loader):
    """Calls a function after the first import of a module, which others find and load.

    It stays in `sys.meta_path`: if it were removed, the next finder would take its place. An import in another thread
    that is just going through the list would skip that finder, and miss a module.
    """

    def __init__(self, module: str, function: Callable[[], None]) -> None:
        self._module = module
        self._function = function
        self._loader: Any = None
        self._is_done = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's spec, with this object as loader; None for another module."""
        if fullname != self._module or self._is_done:
            return None
        self._is_done = True
        spec = importlib.util.find_spec(fullname)
        if spec is not None:
            self._loader = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Create the module as its own loader does."""
        created: ModuleType | None = self._loader.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module, which has its own loader from then on, and call the function."""
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._function()

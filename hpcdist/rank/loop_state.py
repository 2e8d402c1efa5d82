"""The state that `Context.steps` saves and loads for a loop, and checks for mistakes that only a resume would show."""

import hashlib
import logging
from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_flatten

from hpcdist.checkpoint.in_place import Stateful
from hpcdist.checkpoint.sharded import is_dtensor, map_leaves
from hpcdist.checkpoint.state import clean_state_dict
from hpcdist.errors import CheckpointError, TrainerError
from hpcdist.rank.process_group import Groups

if TYPE_CHECKING:
    from hpcdist.rank.context import Context, Restored

log = logging.getLogger(__name__)


class LoopState:
    """The objects of a loop; a checkpoint holds their states.

    Args:
        ranks: the ranks that execute the loop.
        model: the model, wrapped or bare.
        states: further objects by their names, equal on all ranks.
        local: an object that has another state on each rank.

    Raises TrainerError if an object has no state, or if an optimizer changes parameters, or has a scheduler, that are
    not passed.
    """

    def __init__(
        self,
        ctx: "Context",
        ranks: Groups,
        model: nn.Module,
        states: Mapping[str, Stateful],
        local: Stateful | None,
    ) -> None:
        self._ctx = ctx
        self._ranks = ranks
        self._is_saved = False
        self.model = model
        self.states = states
        self.local = local
        self._stepped: list[Optimizer] = []  #: optimizers that the loop has used so far
        for name, value in {**states, "local": local}.items():
            if value is not None and not _has_state(value):
                raise TrainerError(
                    f"ctx.steps: {name} is of type {type(value).__name__}, which has no state_dict and load_state_dict:"
                    " pass an object that has both"
                )
        for name, optimizer in self._optimizers().items():
            self._check_parameters(name, optimizer)
            self._check_scheduler(name, optimizer)
        self._hook = register_optimizer_step_pre_hook(self._note_optimizer)

    def _optimizers(self) -> dict[str, Optimizer]:
        return {name: value for name, value in self.states.items() if isinstance(value, Optimizer)}

    def _check_parameters(self, name: str, optimizer: Optimizer) -> None:
        known = {id(parameter) for parameter in self.model.parameters()}
        for value in self.states.values():
            if isinstance(value, nn.Module):
                known |= {id(parameter) for parameter in value.parameters()}
        updated: list[Tensor] = []
        for group in optimizer.param_groups:
            updated += group["params"]
        num_unknown = sum(id(parameter) not in known for parameter in updated)
        if num_unknown:
            raise TrainerError(
                f"ctx.steps: {name} updates {num_unknown} of {len(updated)} tensors that are not parameters of model,"
                " so no checkpoint would have them: pass the module that has them, such as critic=critic"
            )

    def _check_scheduler(self, name: str, optimizer: Optimizer) -> None:
        # A scheduler adds `initial_lr` to the groups of its optimizer, which it holds.
        is_scheduled = any("initial_lr" in group for group in optimizer.param_groups)
        others = [state for state in self.states.values() if state is not optimizer]
        if is_scheduled and not any(_holds(state, optimizer) for state in others):
            raise TrainerError(
                f"ctx.steps: the learning rate of {name} has a scheduler, which is not passed: pass it as well, such as"
                " scheduler=scheduler"
            )

    def _note_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if not any(optimizer is known for known in self._stepped):
            self._stepped.append(optimizer)

    def load(self, saved: "Restored") -> None:
        """Load the state that a checkpoint holds for each object under its name."""
        dropped = [name for name in saved.stored.trainer if name not in self.states]
        if dropped:
            raise TrainerError(
                f"ctx.steps: the checkpoint of step {saved.step} has the state of {', '.join(dropped)}, which is not"
                " passed: pass it under this name, or start a new run"
            )
        for name in self.states:
            if name not in saved.stored.trainer:
                log.warning("the checkpoint of step %d has no state of %s, which begins anew", saved.step, name)
        saved.stored.load(self.model, self.states)
        if self.local is not None and saved.local is not None:
            self.local.load_state_dict(saved.local)

    def save(self, step: int, metrics: Mapping[str, float]) -> None:
        """Save a checkpoint; before the first one, check the state."""
        if not self._is_saved:
            self.check()
            self._is_saved = True
            self._hook.remove()
            self._stepped.clear()
        local = None
        if self.local is not None:
            local = self.local.state_dict()
        self._ctx.save(step, model=self.model, trainer=states_of(self.states), local=local, metrics=metrics)

    def check(self) -> None:
        """Raise TrainerError if a resume would not continue the loop exactly. Call it on all ranks of the loop."""
        for optimizer in self._stepped:
            if not any(_holds(state, optimizer) for state in self.states.values()):
                raise TrainerError(
                    f"ctx.steps: the loop uses an optimizer ({type(optimizer).__name__}) that is not passed, so no"
                    " checkpoint would have its state: pass it, such as optimizer=optimizer"
                )
        by_rank = self._ranks.all_gather(self._digests())
        for name in by_rank[0]:
            if all(digests[name] == by_rank[0][name] for digests in by_rank):
                continue
            if name == "model":
                raise TrainerError(
                    "ctx.steps: the ranks have different weights, and a checkpoint would have those of one rank alone:"
                    " train the model that ctx.wrap returns, which averages the gradients"
                )
            raise TrainerError(
                f"ctx.steps: the state of {name} differs between the ranks, and a checkpoint would have that of one"
                f" rank alone: pass it as local={name}"
            )

    def _digests(self) -> dict[str, str]:
        """Return a digest of each state that must be equal on all ranks."""
        # DDP keeps parameters equal, and with them the states of optimizers. Of a DTensor each rank has its own part.
        digests = {
            name: _digest(value.state_dict())
            for name, value in self.states.items()
            if not isinstance(value, nn.Module | Optimizer)
        }
        if not any(isinstance(part, DistributedDataParallel) for part in self.model.modules()):
            # Without buffers: those of batch normalisation may differ.
            digests["model"] = _digest([value for value in self.model.parameters() if not is_dtensor(value)])
        return digests


def states_of(objects: Mapping[str, Stateful]) -> dict[str, Any]:
    """Return the state of each object for a checkpoint.

    Raises CheckpointError for a sharded state of an optimizer that a resume could not place.
    """
    states = {}
    for name, value in objects.items():
        if isinstance(value, nn.Module):
            states[name] = clean_state_dict(value)
        else:
            states[name] = value.state_dict()
            _require_restorable(name, value, states[name])
    return states


def _require_restorable(name: str, value: Stateful, state: Any) -> None:
    """Raise CheckpointError for sharded tensors of an optimizer whose parameter a resume would not find."""

    def check(path: tuple[Any, ...], leaf: Any) -> Any:
        if not is_dtensor(leaf):
            return leaf
        if isinstance(value, Optimizer):
            is_deep = path[0] == "state" and len(path) > len(("state", "index of the parameter", "name"))
            if is_deep:
                raise CheckpointError(
                    f"the state of {name} has sharded tensors (DTensor) in lists, as LBFGS has them, which cannot be"
                    " restored: use an optimizer with one tensor by name and parameter, such as AdamW"
                )
            return leaf
        for before, after in pairwise(path):
            if before == "state" and isinstance(after, int):
                raise CheckpointError(
                    f"the state of {name}, a {type(value).__name__}, contains that of an optimizer with sharded tensors"
                    " (DTensor), which cannot be restored: pass each optimizer under its own name, such as muon=…,"
                    " adamw=…"
                )
        return leaf

    map_leaves(check, state)


def _has_state(value: object) -> bool:
    """Return whether an object has the methods of `Stateful`."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _holds(state: object, optimizer: Optimizer) -> bool:
    """Return whether a state is an optimizer, or an object that has it as an attribute and saves it."""
    return state is optimizer or any(value is optimizer for value in getattr(state, "__dict__", {}).values())


def _digest(state: Any) -> str:
    digest = hashlib.blake2b(digest_size=16)
    values, structure = tree_flatten(state)
    digest.update(repr(structure).encode())
    for value in values:
        if is_dtensor(value):
            continue
        if isinstance(value, Tensor):
            content = value.detach().cpu().contiguous().flatten().view(torch.uint8)
            digest.update(content.numpy().tobytes())
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()

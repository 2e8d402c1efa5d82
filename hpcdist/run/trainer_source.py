"""Checks of a trainer's source code, which is parsed but not executed.

They find the names that a module defines, and the sections of the config that a training function reads.
"""

import ast
import warnings
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from hpcdist.config.schema import INITIAL_WEIGHT_KEYS, Config, is_unused, unused_sections
from hpcdist.config.trainer_declaration import find_trainer, shared_sections, trainer_sections
from hpcdist.errors import few
from hpcdist.run.snapshot import find_module, trainer_place

#: Keys of a trainer's sections that hpcdist reads itself.
_READ_BY_HPCDIST = ("data.global_batch_size", "data.root", "stop.nan_losses")
#: Functions by which code can define a name that its source does not contain.
_DYNAMIC = {"exec", "globals", "setattr", "vars"}
#: One of these words is in the source of each script that reads the stored config of its run.
_STORED_CONFIG = ("HPCDIST_RUN_DIR", "config.yaml")


def defined_names(tree: ast.Module) -> set[str] | None:
    """Return the names that a module defines when it is imported; None if its source does not show all of them."""
    for node in ast.walk(tree):
        is_star = isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
        is_dynamic = isinstance(node, ast.Name) and node.id in _DYNAMIC
        if is_star or is_dynamic or isinstance(node, ast.Global):
            return None
    names = set(_names_of(tree))
    if "__getattr__" in names:
        return None
    return names


def _names_of(node: ast.AST) -> Iterator[str]:
    """Yield the names that the statements below a node define, without those inside of functions and classes."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield child.name
        elif isinstance(child, ast.Import | ast.ImportFrom):
            for alias in child.names:
                yield alias.asname or alias.name.partition(".")[0]
        elif isinstance(child, ast.Name):
            if isinstance(child.ctx, ast.Store):
                yield child.id
        elif not isinstance(child, ast.Lambda):
            yield from _names_of(child)


def sections_read(tree: ast.Module, function: str) -> set[str] | None:
    """Return the sections of the config that a training function reads; None if its source does not show all.

    The function is called with the context, the config and, if it has a third argument, the section `params`.
    """
    definition = _definition(tree, function)
    if definition is None:
        return None
    arguments = [argument.arg for argument in (*definition.args.posonlyargs, *definition.args.args)]
    if len(arguments) <= 1:
        return None
    ctx, config, *others = arguments
    sections: set[str] = set()
    num_read = num_used = 0
    for node in ast.walk(definition):
        if isinstance(node, ast.Name) and node.id in (ctx, config):
            num_used += 1
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == config:
                num_read += 1
                sections.add(node.attr)
            elif node.value.id == ctx and node.attr != "config":
                num_read += 1
    # Any other use, such as an argument of a call, may read every section.
    if num_read != num_used:
        return None
    if others:
        sections.add("params")
    return sections


def _definition(tree: ast.Module, function: str) -> ast.FunctionDef | None:
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return node
    return None


def module_specs(module: str, cwd: Path) -> Iterator[tuple[str, ModuleSpec | None]]:
    """Yield the names in a dotted module name with their specs, outermost first, up to the first without a spec."""
    folders: Sequence[str] = [str(cwd)]
    for number, name in enumerate(module.split(".")):
        spec = find_module(name, folders) if number == 0 else PathFinder.find_spec(name, folders)
        yield name, spec
        if spec is None:
            return
        folders = spec.submodule_search_locations or []


def parse_module(spec: ModuleSpec | None) -> ast.Module | None:
    """Return the syntax tree of a module; None without a source file of this version of Python."""
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(Path(spec.origin).read_bytes(), spec.origin)
    except (OSError, SyntaxError, ValueError):
        return None


def unread_keys(config: Config, keys: Sequence[str], cwd: Path) -> str:
    """Return a sentence that names the keys without effect, because the trainer does not read them.

    It is empty if there is no such key, or if the sections that the trainer reads are unknown.

    Args:
        keys: dotted keys that the user has set.
        cwd: folder in which the module of a trainer is searched first.
    """
    sections = {*trainer_sections(), *shared_sections(), "params", "stop"}
    declared = find_trainer(config.trainer.target)
    unread_in_sections: tuple[str, ...] = ()
    if config.trainer.script:
        name = config.trainer.script_name
        read: set[str] = set()
        if _reads_stored_config(config):
            read = sections
        why = f"{name} does not get the config: give it arguments behind its name"
    elif declared is not None:
        name = config.trainer.target
        read = sections - unused_sections(name) - {"params"}
        unread_in_sections = declared.unread_keys
        why = f"the trainer {name} does not read them"
    else:
        name = config.trainer.target
        read = _read_by_function(name, cwd) or sections
        why = f"{name} does not read them from its config"
    unread = sections - read
    keys_without_effect = []
    for key in keys:
        has_effect = key.partition(".")[0] not in unread or key in _READ_BY_HPCDIST
        if key in INITIAL_WEIGHT_KEYS:  # those of a trainer of your own are read by `ctx.init_from`
            has_effect = not is_unused(config.trainer.target, key)
        if not has_effect or key in unread_in_sections:
            keys_without_effect.append(key)
    if not keys_without_effect:
        return ""
    return f"without effect: {few(keys_without_effect)}, since {why}"


def _reads_stored_config(config: Config) -> bool:
    """Return whether a script may read the config in the folder of its run."""
    place = trainer_place(config, [])
    if place is None or not place.is_file():
        return True
    text = place.read_text(errors="replace")
    return any(word in text for word in _STORED_CONFIG)


def _read_by_function(target: str, cwd: Path) -> set[str] | None:
    module, _, function = target.partition(":")
    *_, (_, spec) = module_specs(module, cwd)
    tree = parse_module(spec)
    if tree is None:
        return None
    return sections_read(tree, function)

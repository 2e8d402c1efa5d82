"""Scripts that start their ranks themselves, by `mp.spawn` for example: recognised by their source, which is parsed but
not executed.

A script counts as one if a function for its new processes calls `init_process_group` or `init_rpc`. It does not count
if its source mentions a variable in which a launcher passes the rank: then it may start no processes below a launcher.
Modules of the user beside the script are read as far as its functions call them. Calls that the source does not show,
such as by `getattr`, are not recognised.
"""

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.machinery import ModuleSpec
from pathlib import Path

from hpcdist.config.cluster_schema import ClusterConfig
from hpcdist.config.schema import Config
from hpcdist.run.folder import RunDir
from hpcdist.run.snapshot import code_state, import_path
from hpcdist.run.trainer_source import parse_module

#: Functions that connect a process to the others, by the last part of their names.
_CONNECTS = ("init_process_group", "init_rpc")
#: Modules with functions that start processes, and these functions.
_STARTERS = ("multiprocessing", "torch.multiprocessing", "torch.distributed.elastic.multiprocessing")
_STARTS = ("spawn", "start_processes", "Process")
#: Variables by which launchers tell a process its rank or its node.
_OF_LAUNCHERS = {
    *("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "TORCHELASTIC_RUN_ID", "SLURM_PROCID", "SLURM_NODEID"),
    *("HPCDIST_RANK", "HPCDIST_ROLE", "HPCDIST_ROLE_INDEX", "OMPI_COMM_WORLD_RANK"),
    *("--local_rank", "--local-rank"),  # options that launchers pass
}
_ASKS_TORCH = "is_torchelastic_launched"
#: Statements of a function or class: its code runs later than that around it.
_LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)


@dataclass(frozen=True, kw_only=True)
class Spawn:
    """The call by which a script starts its ranks."""

    script: str  #: name of the script's file or module
    call: str  #: the function, such as `torch.multiprocessing.spawn`
    place: str  #: file and line of the call

    @property
    def sentence(self) -> str:
        """Return that the script starts its own ranks, and where."""
        return f"{self.script} starts its own ranks ({self.call} in {self.place})"

    def problems(self, config: Config, cluster: ClusterConfig | None) -> list[str]:
        """Return the keys that would start the script several times. `cluster`: of a run on Slurm, else None."""
        counts = {}
        if cluster is None:
            counts["launch.num_ranks"] = config.launch.num_ranks
        else:
            counts["cluster.nodes"] = cluster.nodes
            counts["cluster.tasks_per_node"] = cluster.tasks_per_node
        fix = "or let the script read RANK, WORLD_SIZE and LOCAL_RANK, as under torchrun, instead of starting processes"
        problems = []
        if config.roles:
            problems.append(f"roles need a process for each rank, but {self.sentence}: remove roles, {fix}")
        several = {key: count for key, count in counts.items() if count > 1}
        if several:
            got = " ".join(f"{key}={count}" for key, count in several.items())
            once = " ".join(f"{key}=1" for key in several)
            problems.append(f"{got}, but {self.sentence}: set {once}, {fix}")
        return problems


def find_spawn(config: Config, folders: Sequence[Path]) -> Spawn | None:
    """Return the call by which the script of a config starts its own ranks; None if there is none.

    Args:
        folders: in which modules of the user are searched, in this order; the folder of the script precedes them.
    """
    file = config.trainer.script_file
    if not config.trainer.script:
        return None
    if file is None:
        file = _file_of(config.trainer.script_name, folders)
        if file is not None and file.name == "__init__.py":
            file = file.with_name("__main__.py")
    if file is None:
        return None
    return _Sources([file.parent, *folders]).find_spawn(file, config.trainer.script_name)


def find_spawn_in_copy(config: Config, run: RunDir) -> Spawn | None:
    """Return the result of `find_spawn` for the copy of the code in the folder of a run."""
    code = code_state(run)
    folders = [Path(folder) for folder in (*import_path(code, run), code.cwd)]
    copy = None
    if config.trainer.script_file is not None:
        copy = run.snapshot_of(config.trainer.script_file)
    if copy is None:
        return find_spawn(config, folders)
    return _Sources([copy.parent, *folders]).find_spawn(copy, config.trainer.script_name)


def _file_of(module: str, folders: Sequence[Path]) -> Path | None:
    """Return the file of a module of the user; None if none of the folders has it."""
    for folder in folders:
        path = folder.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file
    return None


class _Source:
    """The syntax tree of one file."""

    def __init__(self, file: Path, tree: ast.Module) -> None:
        self.file = file
        self.tree = tree
        #: Dotted names that the file's own names stand for; those of relative imports begin with dots.
        self.aliases: dict[str, str] = {}
        #: First parts of the names that the file imports: their functions are not methods of the file's objects.
        self.imported: set[str] = set()
        #: Functions by name, with the constructors of classes.
        self.functions: dict[str, list[ast.AST]] = {}
        self.methods: dict[str, list[ast.AST]] = {}
        for node in ast.walk(tree):  # a class precedes its methods
            self._note(node)

    def _note(self, node: ast.AST) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                self.imported.add(alias.name.partition(".")[0])
                if alias.asname:
                    self.aliases[alias.asname] = alias.name
        elif isinstance(node, ast.ImportFrom):
            # `from . import name`: of the package's `__init__.py`, or a module beside it.
            module = "." * node.level + (node.module or "__init__")
            self.imported.add(module.partition(".")[0])
            for alias in node.names:
                self.aliases[alias.asname or alias.name] = f"{module}.{alias.name}"
        elif isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                    self.methods.setdefault(part.name, []).append(part)
            constructors = [part for part in self.methods.get("__init__", ()) if part in node.body]
            self.functions.setdefault(node.name, []).extend(constructors)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node not in self.methods.get(node.name, ()):
                self.functions.setdefault(node.name, []).append(node)
        elif isinstance(node, ast.Assign):
            self._note_context(node.targets[0], node.value)

    def _note_context(self, target: ast.AST, value: ast.AST) -> None:
        """Note that `context` of `context = mp.get_context("spawn")` has the functions of `mp`."""
        if not isinstance(target, ast.Name) or not isinstance(value, ast.Call):
            return
        if self.name_of(value.func).endswith(".get_context"):
            self.aliases[target.id] = self.name_of(value)

    def name_of(self, node: ast.AST) -> str:
        """Return the dotted name of an expression, with imported names in full; `?` is an unknown part."""
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id, node.id)
        if isinstance(node, ast.Attribute):
            return f"{self.name_of(node.value)}.{node.attr}"
        if isinstance(node, ast.Call):
            return self.name_of(node.func).removesuffix(".get_context")
        return "?"

    def starter(self, node: ast.AST) -> str:
        """Return the function that starts processes, if a call or the base of a class is one; else empty."""
        if isinstance(node, ast.Call):
            node = node.func
        name = self.name_of(node)
        module, _, function = name.rpartition(".")
        if module in _STARTERS and function in _STARTS:
            return name
        return ""

    @cached_property
    def mentions_launcher(self) -> bool:
        """Whether the file reads a variable of launchers, or asks torch whether it was launched.

        A file that only sets such variables, as for its child processes, does not read them.
        """
        set_names = set()
        set_nodes = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                set_nodes.add(node.slice)
            elif isinstance(node, ast.Dict):
                set_nodes.update(key for key in node.keys if key is not None)
        for node in set_nodes:
            if isinstance(node, ast.Constant):
                set_names.add(node.value)
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
                if node.slice.value in set_names:  # the value that the file itself has set
                    set_nodes.add(node.slice)
            elif isinstance(node, ast.Attribute | ast.Name) and self.name_of(node).endswith(_ASKS_TORCH):
                return True
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Constant) and node not in set_nodes and node.value in _OF_LAUNCHERS:
                return True
        return False


#: A function, class or module, and the file that contains it.
_Place = tuple[_Source, ast.AST]


class _Sources:
    """The files of the user's code, read when a function in them is called."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self._by_file: dict[Path, _Source | None] = {}

    def find_spawn(self, file: Path, script: str) -> Spawn | None:
        """Return the first call that starts ranks in a script, or in the functions that it calls."""
        source = self._read(file)
        if source is None:
            return None
        begin: list[_Place] = [(source, source.tree)]
        for functions in source.functions.values():
            begin += [(source, function) for function in functions]
        for methods in source.methods.values():
            begin += [(source, method) for method in methods]
        reached = self._reachable(begin)
        found = None
        for part, node in reached:
            for starter in ast.walk(node):
                if found is None and self._starts_ranks(part, starter, source, reached):
                    found = part, starter
        if found is None or any(read is not None and read.mentions_launcher for read in self._by_file.values()):
            return None
        part, starter = found
        call = part.starter(starter)
        if isinstance(starter, ast.ClassDef):
            call = next(filter(None, map(part.starter, starter.bases)))
        return Spawn(script=script, call=call, place=f"{part.file.name}:{getattr(starter, 'lineno', 1)}")

    def _starts_ranks(self, source: _Source, node: ast.AST, script: _Source, reached: Sequence[_Place]) -> bool:
        """Return whether a node starts processes that connect to each other."""
        if isinstance(node, ast.ClassDef):
            is_process = any(map(source.starter, node.bases))
            return is_process and self._connects(self._reachable([(source, node)]))
        if not isinstance(node, ast.Call) or not source.starter(node):
            return False
        functions = self._given(source, node)
        if functions:
            return self._connects(self._reachable(functions))
        # The function is an argument of the one around: any that is given to a function may be it.
        in_this_process = self._reachable([(script, script.tree)])
        for part, caller in reached:
            for call in _calls(caller):
                functions += self._given(part, call)
        return self._connects(self._reachable(functions)) and not self._connects(in_this_process)

    def _given(self, source: _Source, call: ast.Call) -> list[_Place]:
        """Return the user's functions that the arguments of a call name."""
        functions = []
        for argument in (*call.args, *call.keywords):
            for name in ast.walk(argument):
                if isinstance(name, ast.Name | ast.Attribute):
                    functions += self._functions(source, source.name_of(name))
        return functions

    def _connects(self, places: Sequence[_Place]) -> bool:
        for source, node in places:
            for call in _calls(node):
                if source.name_of(call.func).rpartition(".")[2] in _CONNECTS:
                    return True
        return False

    def _reachable(self, begin: Sequence[_Place]) -> list[_Place]:
        """Return places of code, and the functions that they call in the same process."""
        reached = list(begin)
        for source, node in reached:  # grows
            for call in _calls(node):
                functions = self._functions(source, source.name_of(call.func))
                if not functions and not source.starter(call):
                    # Functions of others call what they get, as in `app.run(main)`.
                    for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
                        if isinstance(argument, ast.Name):
                            functions += self._functions(source, source.name_of(argument))
                reached += [place for place in functions if place not in reached]
        return reached

    def _functions(self, source: _Source, name: str) -> list[_Place]:
        """Return the user's functions of a dotted name; a method has any object in front of its name."""
        module, _, function = name.rpartition(".")
        if not module:
            return [(source, node) for node in source.functions.get(function, ())]
        imported = self._imported(source, module)
        if imported is None:
            if name.partition(".")[0] in source.imported:
                return []
            return [(source, node) for node in source.methods.get(function, ())]
        passed_on = imported.aliases.get(function, "")
        if passed_on and imported is not source:  # as `__init__.py` imports functions of its package
            return self._functions(imported, passed_on)
        return [(imported, node) for node in imported.functions.get(function, ())]

    def _imported(self, source: _Source, module: str) -> _Source | None:
        """Return the user's module of a dotted name, which dots in front make relative to the file of `source`."""
        name = module.lstrip(".")
        folders = self._folders
        num_up = len(module) - len(name)
        name = name.removeprefix("__init__.")
        if num_up > 0:
            folders = [source.file.parents[num_up - 1]] if num_up <= len(source.file.parents) else []
        file = _file_of(name, folders) if name else None
        if file is None:
            return None
        return self._read(file)

    def _read(self, file: Path) -> _Source | None:
        if file not in self._by_file:
            tree = parse_module(ModuleSpec(file.stem, None, origin=str(file)))
            self._by_file[file] = None if tree is None else _Source(file, tree)
        return self._by_file[file]


def _calls(node: ast.AST) -> Iterator[ast.Call]:
    """Yield the calls in a function, in all methods of a class, or in the statements that an import executes."""
    if isinstance(node, ast.Call):
        yield node
    for child in ast.iter_child_nodes(node):
        if isinstance(node, ast.Module | ast.If | ast.Try | ast.With | ast.For) and isinstance(child, _LATER):
            continue
        yield from _calls(child)

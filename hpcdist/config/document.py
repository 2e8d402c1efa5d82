"""Config files: their YAML as plain containers, short forms of sections, and texts that a config cannot contain."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml

import hpcdist
from hpcdist.config.schema import ParamTexts
from hpcdist.errors import ConfigError, shown, suggestion
from hpcdist.host import retry
from hpcdist.host.files import read_regular

T = TypeVar("T")
#: Sections that may be written as one value, each with the key that this value sets.
SHORT_FORMS = {"trainer": "target", "preflight": "mode"}
#: A range of numbers of nodes: `cluster.nodes: 2-8`.
NODE_RANGE = "^[0-9]{1,9}-[0-9]{1,9}$"
#: GPUs of one type: `cluster.gpus_per_node: a100:4`; both may be interpolations. In `gpu:4` of `--gres`, `gpu` is no
#: type.
TYPED_GPUS = r"^(?!gpu:)([A-Za-z0-9][A-Za-z0-9_.+-]*|\$\{[^{}]+\}):([0-9]{1,9}|\$\{[^{}]+\})$"
#: Limit of a config file that a user writes.
MAX_BYTES = 1 << 20
#: Limit of the levels of a document, and of an override's key. A few thousand levels overflow the stack of libyaml's
#: recursive composer, which ends the interpreter.
MAX_DEPTH = 40
#: Integers of Python have no bounds, but JSON readers, NumPy, PyTorch and MLflow use 64 bits.
_MAX_INTEGER = 2**63 - 1
_TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"
#: In C if PyYAML has it, which is seven times as fast.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_INT, _FLOAT, _TIMESTAMP, _TEXT, _MERGE = (
    f"tag:yaml.org,2002:{name}" for name in ("int", "float", "timestamp", "str", "merge")
)


class _ConfigLoader(_Loader):  # type: ignore[misc]
    """Reads numbers as YAML 1.2 does, and dates and keys as text. A duplicate key is a mistake.

    In YAML 1.1, `3e-4` is a text, `010` is 8, and `30:00` is 1800.
    """

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        return int(node.value)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if key.tag == _MERGE:
                continue
            if isinstance(key, yaml.ScalarNode):
                # On the command line, in JSON and for a reader, `1.10` and `on` are names.
                key.tag = _TEXT
            if (key.tag, str(key.value)) in seen:
                raise yaml.MarkedYAMLError(problem=f"found duplicate key {key.value}", problem_mark=key.start_mark)
            seen.add((key.tag, str(key.value)))
        found: dict[Any, Any] = super().construct_mapping(node, deep)
        return found


_SIGNS_AND_DIGITS = list("-+0123456789")
_ConfigLoader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag not in (_INT, _FLOAT, _TIMESTAMP)]
    for first, resolvers in _ConfigLoader.yaml_implicit_resolvers.items()
}
# Python also accepts underscores between the digits.
_WHOLE_NUMBER = re.compile(r"[-+]?[0-9]+(_[0-9]+)*$")
_REAL_NUMBER = re.compile(
    r"[-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9][0-9_]*)$"
    r"|[-+]?([0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$"
    r"|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)


class _TextLoader(_ConfigLoader):
    """Reads each value as its text; merges mappings as `_ConfigLoader` does."""


_TextLoader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag == _MERGE]
    for first, resolvers in _ConfigLoader.yaml_implicit_resolvers.items()
}


class _ConfigDumper(yaml.SafeDumper):
    """Puts a text in quotes that YAML 1.1 or `_ConfigLoader` would read as something else."""


class _Unquoted(str):
    """A text that the file contains without quotes."""


def _represent_unquoted(dumper: yaml.SafeDumper, text: _Unquoted) -> yaml.ScalarNode:
    # A text of the type that its form implies needs no quotes.
    resolve: Callable[..., str] = dumper.resolve
    tag = resolve(yaml.ScalarNode, str(text), (True, False))
    return dumper.represent_scalar(tag, str(text))


_ConfigDumper.add_representer(_Unquoted, _represent_unquoted)

for _reader in (_ConfigLoader, _ConfigDumper):
    _reader.add_implicit_resolver(_INT, _WHOLE_NUMBER, _SIGNS_AND_DIGITS)
    _reader.add_implicit_resolver(_FLOAT, _REAL_NUMBER, [*_SIGNS_AND_DIGITS, "."])
_ConfigLoader.add_constructor(_INT, _ConfigLoader.construct_yaml_int)


def dump(tree: Mapping[str, Any], texts: ParamTexts | None = None) -> str:
    """Return plain containers as YAML, which `parse` reads as the same values.

    Args:
        texts: the texts with which some values are written, by path.
    """
    if texts:
        tree = _unquoted(tree, texts, ())
    return str(yaml.dump(tree, Dumper=_ConfigDumper, sort_keys=False, allow_unicode=True))


def _unquoted(value: Any, texts: ParamTexts, path: tuple[str, ...]) -> Any:
    if isinstance(value, Mapping):
        return {name: _unquoted(entry, texts, (*path, name)) for name, entry in value.items()}
    if isinstance(value, list):
        return [_unquoted(entry, texts, (*path, str(index))) for index, entry in enumerate(value)]
    # A text in place of the value is a redacted secret.
    if path not in texts or isinstance(value, str):
        return value
    return _Unquoted(texts[path])


def find_config(source: str | Path, folder: str = "") -> Path:
    """Return the path of a config file. Raises ConfigError with the nearest known name if there is none.

    Args:
        source: a path, or the name of a shipped config.
        folder: folder of the shipped configs, below `configs`.
    """
    try:
        path = Path(source).expanduser()
        if path.is_file():
            return path
    except (OSError, RuntimeError, ValueError) as error:
        # A name that is too long, an unknown user, or a NUL character.
        raise ConfigError(f"cannot be a config file: {error}", source=str(source)) from error
    shipped = shipped_configs(folder)
    if str(source) in shipped:
        return shipped[str(source)]
    beside = _yaml_files_beside(path)
    same_stem = [file for file in beside if Path(file).stem == path.stem]
    if same_stem:
        hint = f"did you mean {same_stem[0]!r}?"
    else:
        hint = suggestion(str(source), [*shipped, *beside], f"shipped configs are {', '.join(shipped)}")
    raise ConfigError(f"no such config file: {hint}", source=str(source))


def _yaml_files_beside(path: Path) -> list[str]:
    """Return the YAML files in the folder of a path; none if the folder cannot be read."""
    with suppress(OSError):
        return [str(file) for file in sorted(path.parent.iterdir()) if file.suffix in (".yaml", ".yml")]
    return []


def shipped_configs(folder: str = "") -> dict[str, Path]:
    """Return the config files that hpcdist contains, by name; `folder` is one below `configs`."""
    package = Path(hpcdist.__file__).resolve().parent
    configs = package / "configs"
    if not configs.is_dir():  # in the source tree
        configs = package.parent / "configs"
    return {path.stem: path for path in sorted((configs / folder).glob("*.yaml"))}


def read_document(path: Path) -> tuple[dict[str, Any], Any]:
    """Return the keys and values of a YAML file, with unresolved interpolations, and the result of `parse_texts`."""
    text = read_text(path)
    try:
        tree = parse(text) or {}  # an empty file means the defaults
    except ValueError as error:
        raise ConfigError(str(error), source=str(path)) from error
    if not isinstance(tree, dict):
        kind = type(tree).__name__
        raise ConfigError(f"must hold keys and values, but its top level is of type {kind}", source=str(path))
    return tree, parse_texts(text)


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """Return the text of a file. Raises ConfigError."""
    try:
        return retry.retry(lambda: read_regular(path, max_bytes), path).decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError("no such file", source=str(path)) from None
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror or error}", source=str(path)) from error
    except UnicodeDecodeError as error:
        raise ConfigError("is not UTF-8 text", source=str(path)) from error
    except ValueError as error:
        raise ConfigError(f"cannot be read: {error}", source=str(path)) from error


def parse(text: str) -> Any:
    """Return the plain value of a YAML text, with strings as keys; `3e-4` is a number, and a date is text.

    Raises ValueError with one line: the mistake, and its line number if it is known.
    """
    depth = 0
    try:
        for event in yaml.parse(text, Loader=_Loader):  # in contrast to yaml.load, it does not recurse
            line = 1
            if event.start_mark:
                line = event.start_mark.line + 1
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if depth > MAX_DEPTH:
                raise ValueError(f"line {line}: {_TOO_DEEP}")
            # Other explicit tags construct objects, or fail on values of another form.
            if getattr(event, "tag", None) not in (None, "!", "tag:yaml.org,2002:str"):
                fix = "put a value that begins with '!' in quotes"
                raise ValueError(f"line {line}: explicit tags are not supported: {fix}")
        value = yaml.load(text, _ConfigLoader)  # noqa: S506  # a SafeLoader
        _check_depth(value)
        return value
    except yaml.YAMLError as error:
        message = " ".join(str(error).split())
        # An unquoted password may start like an alias or a tag: `*p4ss`.
        raise ValueError(re.sub(r"(alias|anchor|tag) '[^']*'", r"\1", message)) from None


def parse_texts(text: str) -> Any:
    """Return the containers that `parse` returns, with the text of each value instead of the value."""
    return yaml.load(text, _TextLoader)  # noqa: S506  # a SafeLoader


def escaped(value: T) -> T:
    """Return plain containers with texts that OmegaConf resolves to those of `value`, also if they contain `${`."""
    result: Any = value
    if isinstance(value, dict):
        result = {key: escaped(item) for key, item in value.items()}
    elif isinstance(value, list):
        result = [escaped(item) for item in value]
    elif isinstance(value, str):
        result = re.sub(r"(\\*)\$\{", lambda match: match[1] * 2 + r"\${", value)
    return cast(T, result)


def unfit_values(tree: object, path: str = "") -> Iterator[str]:
    """Yield a line for every key and value of plain containers that cannot be stored or passed to other programs."""
    if isinstance(tree, Mapping):
        for key, value in tree.items():
            problems = list(unfit_values(key, f"{path or 'the config'}: a key"))
            if problems:
                yield from problems
                continue
            key_path = str(key)
            if path:
                key_path = f"{path}.{key}"
            yield from unfit_values(value, key_path)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from unfit_values(value, path)
    elif isinstance(tree, int) and not -_MAX_INTEGER <= tree <= _MAX_INTEGER:
        yield f"{path} must fit in 64 bits, got {shown(tree)}"
    elif isinstance(tree, str) and "\0" in tree:
        yield f"{path} must not contain a NUL character, got {shown(tree)}"
    elif isinstance(tree, str) and not tree.isascii() and tree != tree.encode(errors="ignore").decode():
        yield f"{path} must be UTF-8 text, got {shown(tree)}"


def _check_depth(value: Any, depth: int = 0) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"{_TOO_DEEP}, by aliases (`*`) of aliases or one that contains itself")
    if isinstance(value, list):
        for entry in value:
            _check_depth(entry, depth + 1)
    elif isinstance(value, dict):
        for entry in value.values():
            _check_depth(entry, depth + 1)


def leaves(tree: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield each value that is not a mapping, or is an empty one, with the keys that lead to it.

    Keys are a tuple, not a dotted path, because free keys such as MLflow's tags may contain dots.
    """
    for key, value in tree.items():
        path = (*above, str(key))
        if isinstance(value, Mapping) and value:
            yield from leaves(value, path)
        else:
            yield path, value


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of `leaves` by dotted key."""
    return {".".join(path): value for path, value in leaves(tree)}


def parse_value(raw: str) -> Any:
    """Return the value of a YAML text, such as that of an override; a text that is not valid YAML stays as it is."""
    try:
        return parse(raw)
    except ValueError:
        return raw


def expand_short_forms(tree: dict[str, Any]) -> None:
    """Replace short forms: `trainer: ddp`, `preflight: off`, `cluster.nodes: 2-8`, `cluster.gpus_per_node: a100:4`."""
    for section in SHORT_FORMS:
        _expand(tree, section)
    cluster = tree.get("cluster")
    split_gpus(cluster)
    if not isinstance(cluster, dict):
        return
    nodes = str(cluster.get("nodes"))
    if re.match(NODE_RANGE, nodes):
        least, _, most = nodes.partition("-")
        if cluster.get("min_nodes") is None:
            cluster["min_nodes"] = int(least)
        cluster["nodes"] = int(most)


def split_gpus(cluster: object) -> None:
    """Write typed GPUs in the section `cluster` as number and type, so that another number keeps the type.

    If the section has another type as well, the text of both stays as a value that is refused.
    """
    if not isinstance(cluster, dict):
        return
    match = re.fullmatch(TYPED_GPUS, str(cluster.get("gpus_per_node")))
    if match is None:
        return
    kind, number = match.groups()
    if number.isdecimal():  # else an interpolation
        number = int(number)
    other = cluster.get("gpu_type")
    if other is not None and str(other) != kind:
        number = f"{match[0]} beside gpu_type={other}"
    cluster |= {"gpu_type": kind, "gpus_per_node": number}


def insert(tree: dict[str, Any], path: Sequence[str], value: Any) -> bool:
    """Set a value in nested dicts. Return False if a part of the path is a value already."""
    *parents, leaf = path
    for index, parent in enumerate(parents):
        if index == 0:
            _expand(tree, parent)
        child = tree.setdefault(parent, {})
        if child is None:
            child = tree[parent] = {}
        if not isinstance(child, dict):
            return False
        tree = child
    tree[leaf] = value
    return True


def _expand(tree: dict[str, Any], section: str) -> None:
    value = tree.get(section)
    if isinstance(value, bool):
        value = "on" if value else "off"  # YAML reads these words as booleans
    if section in SHORT_FORMS and isinstance(value, str):
        tree[section] = {SHORT_FORMS[section]: value}

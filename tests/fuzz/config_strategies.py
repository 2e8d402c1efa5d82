"""Strategies for configs, overrides and sweep axes: valid values, mutated values, and random text."""

import json
import re
from contextlib import suppress
from typing import Any

import yaml
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from hpcdist.config.describe import describe

ROWS = [(path.replace("ROLE", "trainer"), kind) for path, kind, _, _ in describe()]
KEYS = [path for path, _ in ROWS]
SECTIONS = sorted({path.rpartition(".")[0] for path in KEYS} - {""})

#: Texts that have caused errors in parsers, or may.
NASTY = [
    "", " ",
    "~", "~nosuchuser/x", "~nosuchuser", "~/x", "/", "..", "../..", "a/b", "a\nb", "a\0b", "\x1b[31m", "\ufeff",
    "\udcff", "\ud800", "é", "n" * 300, "x" * 5000, "9" * 5000, "-" + "9" * 5000, "1" * 100, "0x" + "f" * 5000,
    "1e400", "-1e400", ".nan", ".inf", "-.inf", "nan", "inf", "1_000", "1:30", "1:2:3:4:5:6:7:8", "0o17", "0b1", "1.",
    "yes", "off", "True", "Null", "2020-01-01", "2020-13-45", "2020-01-01T25:00:00Z",
    "${", "${}", "${x}", "${x.${y}}", "${seed}", "${..seed}", "${optim}", "${optim.lr}",
    "${oc.env:NOSUCH}", "${oc.env:NOSUCH,}", "${oc.decode:'${'}", "${oc.decode:${oc.env:PATH}}", "${oc.create:{a: 1}}",
    "${oc.dict.keys:optim}", "${oc.dict.values:nosuch}", "${nosuch:${nosuch:}}", "\\${x}", "\\\\${seed}",
    "$" * 50, "${" * 200, "${a:" * 200, "}", "{", "[", "]", "[" * 100, "{a: " * 100, "- " * 100, "[" * 20000,
    "{a: {b: [1, {c: ", "&a [*a]", "&a {b: *a}", "*a", "{<<: *x}", "{<<: 1}", "{<<: [1, {a: 2}]}",
    "!!python/object/apply:os.system [echo]", "!!set {a}", "!!binary %", "!!timestamp x", "!!bool x",
    "!!omap [1]", "!x y",
    "!!int " + "9" * 5000, "{1: a, '1': b}", "{true: a, 'True': b}", "{null: a}",
    "{[1]: a}", "{a: 1, a: 2}", "{a: {b: 1}, a.b: 2}", "{!!binary aGk=: a}", "? [a]\n: b",
    "'", '"', "'unclosed", '"unclosed', '"\\x', '"\\ud800"', "|", "|\n  a", ">", "%YAML 9.9",
    "---", "...", "--- a\n--- b",
    "#", "# c", "a: b: c", "@", "`", "%", "???",
    "a=b", "=", "a,b", "key=value", "ddp", "cpu", "gloo", "auto",
    "package.module:function", ":", "a:", ":b", "a.b:c:d", "256M",
    "1.5.5K", "9" * 400 + "G", "1e999G", "sqlite:///x",
    "sqlite:///~nosuchuser/x", "sqlite:///", "http://[", "http://a:b@c@d/", "/a:/b:ro",
    "/a:b", "{agent: 1, observer: 2}",
    "{a: {b: 1}}", "{a: -1}", "{a: 1.5}", "{a: x}", "[1, [2, [3]]]", "[null]", "[{}]", "{}", "[]", "***", "{a: ***}",
]  # fmt: skip

words = st.one_of(
    st.sampled_from(NASTY),
    st.text(max_size=20),
    st.text(alphabet="${}[]:,.'\"\\!&*<>|%@#~ \n\t-=ab01", max_size=40),
    st.text(st.characters(codec=None), max_size=8),
)
numbers: SearchStrategy[Any] = st.one_of(
    st.integers(-3, 300), st.integers(), st.floats(), st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**400, 1e308])
)
scalars: SearchStrategy[Any] = st.one_of(st.none(), st.booleans(), numbers, words, st.binary(max_size=8), st.dates())
keys: SearchStrategy[Any] = st.one_of(
    st.sampled_from([path.rpartition(".")[2] for path in KEYS]), st.text(max_size=8), st.integers(0, 2), st.booleans(),
    st.sampled_from(["1", "True", "a.b", "", "${x}", "<<", "trainer", "x" * 300, "1.0", "a b", "[", "é"]), st.floats(),
)  # fmt: skip
values: SearchStrategy[Any] = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3), max_leaves=6
)


def _is_json(value: Any) -> bool:
    with suppress(TypeError, ValueError):
        json.dumps(value)
        return True
    return False


json_values = values.filter(_is_json)


def likely(kind: str) -> SearchStrategy[Any]:
    """Draw values of a declared type, most of them valid."""
    if kind.startswith("Literal"):
        return st.sampled_from(re.findall(r"'([^']*)'", kind))
    if kind.startswith("list"):
        return st.lists(likely(kind[5:-1]), max_size=3)
    if kind.startswith("dict"):
        return st.dictionaries(st.sampled_from(["trainer", "server", "a", "KEY"]), likely(kind[10:-1]), max_size=3)
    plain: dict[str, SearchStrategy[Any]] = {
        "int": st.integers(0, 8),
        "float": st.floats(0, 1),
        "bool": st.booleans(),
        "str": st.sampled_from(["a", "x1", "/srv/x", "~/x", "runs", "ddp", "auto"]),
    }
    return st.one_of(*[plain.get(part.strip(), values) for part in kind.split("|")])


def _nested(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in pairs:
        *parents, leaf = path.split(".")
        inner: Any = tree
        for parent in parents:
            inner = inner.setdefault(parent, {})
            if not isinstance(inner, dict):
                break
        else:
            inner[leaf] = value
    return tree


pairs = st.sampled_from(ROWS).flatmap(
    lambda row: st.tuples(st.just(row[0]), st.one_of(likely(row[1]), likely(row[1]), likely(row[1]), values))
)
trees = st.lists(pairs, max_size=6).map(_nested)
section_values = st.tuples(st.sampled_from(SECTIONS), values).map(lambda pair: _nested([pair]))


def _dumped(tree: Any) -> str:
    return str(yaml.dump(tree, allow_unicode=True, sort_keys=False))


def _lines(drawn: list[tuple[str, str]]) -> str:
    """Return lines `section:` and `  key: text` without quotes around the text."""
    text = ""
    for path, value in drawn:
        *parents, leaf = path.split(".")
        text += "".join(f"{'  ' * depth}{parent}:\n" for depth, parent in enumerate(parents))
        text += f"{'  ' * len(parents)}{leaf}: {value}\n"
    return text


@st.composite
def mutated(draw: st.DrawFn, texts: SearchStrategy[str]) -> str:
    """Draw text with some pieces removed, doubled or replaced."""
    text = draw(texts)
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 20)))
        middle = draw(st.one_of(st.just(""), st.just(text[start:end] * 2), words))
        text = text[:start] + middle + text[end:]
    return text


texts = st.one_of(
    trees.map(_dumped),
    section_values.map(_dumped),
    values.map(_dumped),
    st.lists(st.tuples(st.sampled_from(KEYS), words), max_size=4).map(_lines),
    mutated(trees.map(_dumped)),
    words,
)
files: SearchStrategy[bytes] = st.one_of(
    texts.map(lambda text: text.encode("utf-8", "surrogatepass")),
    texts.map(lambda text: text.encode("utf-16", "surrogatepass")),
    texts.map(lambda text: text.encode("utf-8-sig", "surrogatepass")),
    texts.map(lambda text: text.replace("\n", "\r\n").encode("utf-8", "surrogatepass")),
    st.binary(max_size=60),
)
override_keys = st.one_of(
    st.sampled_from(KEYS),
    st.sampled_from(KEYS),
    st.sampled_from(SECTIONS),
    st.builds(lambda key, more: f"{key}.{more}", st.sampled_from(KEYS), st.text(max_size=5)),
    st.sampled_from(
        ["", ".", "..", "a..b", ".a", "a.", "+seed", "~seed", "++seed", "-x", "--x", "seed[0]", "params.a[0]",
         "params",
         "params.a.b.c.d", "params." + "a." * 2000 + "b", "a" * 5000, "roles.a", "roles", "cluster.roles.a.nodes",
         "launch.env.A", "tracking.tags.a.b", "${x}", "params.${x}", "a b", "a\nb", "params.\udcff", "params.1"]
    ),
    st.text(max_size=10),
)  # fmt: skip
flow_text = values.map(lambda value: yaml.dump(value, default_flow_style=True, width=10**6, allow_unicode=True).strip())
overrides = st.one_of(
    st.builds(lambda key, value: f"{key}={value}", override_keys, st.one_of(words, flow_text, mutated(flow_text))),
    pairs.map(lambda pair: f"{pair[0]}={yaml.dump(pair[1], default_flow_style=True, width=10**6).strip()}"),
    words,
)
_axis_keys = st.sampled_from(["seed", "optim.lr", "params.a", "optim", "trainer", "name", "model.name"])
_axis_values = st.one_of(
    st.integers(0, 5).map(str), st.sampled_from(["0.1", "1e-3", "adam", "[1,2]", "'a,b'", "{a: 1}"]), words
)
axes = st.one_of(
    st.builds(
        lambda key, parts: f"{key}={','.join(parts)}",
        st.one_of(_axis_keys, override_keys),
        st.lists(_axis_values, max_size=4),
    ),
    words,
)

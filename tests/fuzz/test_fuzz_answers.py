"""Answers of container engines, images and nodes that are not as expected give own errors only."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

from container_facts import SPEC
from fuzzing import check_message, fuzz
from hypothesis import strategies as st

import hpcdist
from hpcdist.containers.images import _of, inspected, parse, require_fit
from hpcdist.containers.probe import probe_outcome
from hpcdist.containers.steps import Engine
from hpcdist.errors import ImageError

VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5)),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=5,
)


def answers(keys: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return objects with valid and other values for these keys."""
    return st.fixed_dictionaries({}, optional={key: st.one_of(st.just(it), VALUES) for key, it in keys.items()})


CONFIG = answers({"Entrypoint": ["tini"], "User": "1000", "Labels": {"hpcdist.cuda": "13.2"}, "Env": ["A=1"]})
DESCRIPTION = {"Id": "ab", "Architecture": "amd64", "Size": 7, "RepoDigests": ["a@sha256:1"], "Config": {}}
IMAGES = st.builds(lambda found, config: [found | {"Config": config}], answers(DESCRIPTION), CONFIG)


@fuzz(found=st.one_of(IMAGES, VALUES))
def test_description_of_an_image(found: Any) -> None:
    try:
        image = inspected(Engine("podman"), "x", json.dumps(found))
        _of("x", image)
        with suppress(ImageError):
            require_fit(parse("x", image))
    except ImageError as error:
        check_message(error)


FACTS = {"node": "n1", "hpcdist": hpcdist.__version__, "python": "3.12.1", "cuda": "13.2", "driver": "1", "source": ""}


@fuzz(facts=answers(FACTS), cut=st.integers(0, 60))
def test_answer_of_an_image(facts: Any, cut: int) -> None:
    text = json.dumps(facts)
    for line in (text, text[cut:], text[:-cut]):
        probe_outcome(SPEC, f"hpcdist-image {line}\n", "", "n1")

"""MkDocs hook: the output of the generator NAME follows each line `<!-- generated: NAME -->` of a page.

An unknown name fails the build. Text up to a line `<!-- end -->` is replaced: pages with such a line keep the output,
to be read without a build. `python docs/hooks.py` renews it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from generators import answers, commands, config, environment, findings, messages, packages, runtimes

#: A kept output has no line of the form of a marker.
MARKER = re.compile(r"^<!-- generated: ([\w-]+) -->$(?:\n(?:(?!<!-- ).*\n)*(<!-- end -->)$)?", re.MULTILINE)
#: The first line of a code block with words for the tests that run it, such as `console test`: the renderer would not
#: take it for a code block.
WORDS_FOR_TESTS = re.compile(r"^( *```[a-z]+) .*$", re.MULTILINE)
GENERATORS: dict[str, Callable[[], str]] = {
    "answers": answers.answers,
    "cli": commands.commands,
    "config": config.config_keys,
    "configs": config.shipped_configs,
    "doctor": findings.doctor_findings,
    "environment": environment.environment_variables,
    "errors": messages.error_classes,
    "failures": findings.failure_patterns,
    "messages": messages.error_messages,
    "modules": packages.packages,
    "preflight": findings.preflight_findings,
    "run-folder": packages.run_folder,
    "runtimes": runtimes.recorded_tests,
    "waiting": findings.waiting_reasons,
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Add the generated parts of a page, and remove words that only the tests of the documentation read."""
    return WORDS_FOR_TESTS.sub(r"\1", MARKER.sub(lambda match: GENERATORS[match[1]](), markdown))


def with_kept(markdown: str) -> str:
    """Return the text of a page with its kept outputs as they are now."""

    def kept(match: re.Match[str]) -> str:
        if not match[2]:
            return match[0]
        return f"<!-- generated: {match[1]} -->\n\n{GENERATORS[match[1]]().strip()}\n\n<!-- end -->"

    return MARKER.sub(kept, markdown)


if __name__ == "__main__":
    for page in sorted(Path(__file__).parent.rglob("*.md")):
        page.write_text(with_kept(page.read_text()))

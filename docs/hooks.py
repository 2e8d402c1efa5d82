"""MkDocs hook: replace each line `<!-- generated: NAME -->` of a page by the output of the generator NAME.

An unknown name fails the build.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from generators import answers, commands, config, environment, findings, messages, packages, runtimes

MARKER = re.compile(r"^<!-- generated: ([\w-]+) -->$", re.MULTILINE)
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
    """Replace the markers of a page."""
    return MARKER.sub(lambda match: GENERATORS[match[1]](), markdown)

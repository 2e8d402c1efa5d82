#!/usr/bin/env python3
"""Print an image's software bill of materials as CycloneDX JSON: its Debian packages and those of one Python.

    /opt/sbom/bin/python sbom.py IMAGE VERSION PYTHON

It runs in a build stage on top of the image's content, so that the image does not contain its tools.
"""

import json
import subprocess
import sys
from pathlib import Path

SCHEMA = "1.6"


def output(tool: str, *options: str) -> dict[str, list[dict[str, object]]]:
    """Return the bill of materials that a tool prints."""
    program = Path(sys.prefix, "bin", tool)
    done = subprocess.run([program, *options], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"sbom: {tool} failed (exit code {done.returncode}):\n{done.stderr}")
    found: dict[str, list[dict[str, object]]] = json.loads(done.stdout)
    return found


name, version, python = sys.argv[1:]
schema = ("--cdx-schema-version", SCHEMA)
image = ("--distro-name", name, "--distro-version", version)
merged = output("debsbom", "generate", "--sbom-type", "cdx", *schema, *image, "--out", "-")
packages = output("cyclonedx-py", "environment", "--spec-version", SCHEMA, "--output-format", "JSON", python)
for key in ("components", "dependencies"):
    merged[key] += packages[key]
json.dump(merged, sys.stdout)

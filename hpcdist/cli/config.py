"""`hpcdist config`: print a resolved config, or all config keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from hpcdist.cli.options import (
    Cluster,
    ExperimentKey,
    Json,
    OptionalConfigName,
    Overrides,
    RunsDirKey,
    TrackingUriKey,
    flag,
    with_options,
)
from hpcdist.errors import UserMistake
from hpcdist.host.log_files import say

app = typer.Typer()


@app.command("config")
def show_config(
    config: OptionalConfigName = None,
    overrides: Overrides = None,
    cluster: Cluster = None,
    schema: Annotated[
        bool, flag("--schema", "Print every key with type, default and meaning; with CONFIG those of its trainer.")
    ] = False,
    for_editors: Annotated[bool, flag("--json-schema", "Print the JSON Schema of a config.")] = False,
    as_json: Json = False,
    experiment: ExperimentKey = None,
    runs_dir: RunsDirKey = None,
    tracking_uri: TrackingUriKey = None,
) -> None:
    """Print a resolved config with secrets redacted, or the schema of all configs.

    Examples:

        hpcdist config ddp_mnist optim.lr=0.01

        hpcdist config --schema

        hpcdist config regression.yaml --schema

        hpcdist config --json-schema > config.schema.json
    """
    from hpcdist.config.loading import load_config
    from hpcdist.config.shipped import shipped_configs
    from hpcdist.config.written import redacted, to_yaml

    if for_editors:
        from hpcdist.config.describe import json_schema

        say(json.dumps(json_schema(), indent=2, ensure_ascii=False))
    elif schema:
        from hpcdist.config.describe import describe
        from hpcdist.config.written import describe_trainer

        entries = describe() if config is None else describe_trainer(load_config(config, overrides or []), Path.cwd())
        keys = [dict(zip(("key", "type", "default", "help"), entry, strict=True)) for entry in entries]
        if as_json:
            say(json.dumps(keys, indent=2, default=str))
            return
        for key in keys:
            say(f"{key['key']}: {key['type']} = {key['default']!r}\n    {key['help']}")
    elif config is None:
        raise UserMistake(f"CONFIG is missing: shipped configs are {', '.join(shipped_configs())}; or use --schema")
    else:
        words = with_options(overrides, experiment=experiment, runs_dir=runs_dir, tracking_uri=tracking_uri)
        loaded = load_config(config, words, cluster=cluster)
        say(json.dumps(redacted(loaded), indent=2) if as_json else to_yaml(loaded).rstrip("\n"))

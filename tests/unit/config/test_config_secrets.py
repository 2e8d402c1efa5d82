"""Written configs, error messages and command lines contain no secrets; the environment restores them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from config_files import Write, problems

from hpcdist.config.loading import load_config, load_run_config
from hpcdist.config.written import redacted_argument, secrets_of, to_yaml
from hpcdist.errors import ConfigError
from hpcdist.slurm.flags import exposed_secrets

SECRETS = """
tracking:
  uri: http://ada:p@ss-w0rd@mlflow:5000/x
  tags: {mlflow.note.content: "see the wiki", team.token: tag-s3cret}
launch:
  env: {WANDB_API_KEY: env-s3cret, PLAIN: visible}
params:
  hf_token: param-s3cret
  nested: {token: nested-s3cret}
  my.password: dotted-s3cret
  credentials: {user: ada, code: below-s3cret}
  mirrors: ["ftp://bob:list-s3cret@mirror/", plain]
  api_keys: [one-s3cret, two-s3cret]
  tokenizer: visible-too
  empty_secret: ""
"""


def test_written_config_contains_no_secrets(write: Write) -> None:
    written = to_yaml(load_config(write(SECRETS)))
    assert "s3cret" not in written
    assert "w0rd" not in written
    shown = yaml.safe_load(written)
    assert shown["tracking"]["uri"] == "http://ada:***@mlflow:5000/x"
    assert shown["tracking"]["tags"] == {"mlflow.note.content": "see the wiki", "team.token": "***"}
    assert shown["launch"]["env"] == {"WANDB_API_KEY": "***", "PLAIN": "visible"}
    assert shown["params"] == {
        "hf_token": "***",
        "nested": {"token": "***"},
        "my.password": "***",
        "credentials": {"user": "***", "code": "***"},
        "mirrors": ["ftp://bob:***@mirror/", "plain"],
        "api_keys": ["***", "***"],
        "tokenizer": "visible-too",
        "empty_secret": "",
    }


def test_secrets_are_restored_from_the_environment(write: Write, tmp_path: Path) -> None:
    config = load_config(write(SECRETS))
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    env = secrets_of(config)
    assert env["WANDB_API_KEY"] == "env-s3cret"
    assert env["HPCDIST_TRACKING_URI"] == "http://ada:p@ss-w0rd@mlflow:5000/x"
    assert load_run_config(path, [], {"HOME": "/", **env}) == config


FROM_VARIABLES = """
experiment: ${oc.env:PLAIN}
trainer: {script: [train.py, --dsn, "${oc.env:DB_PASSWORD}", "${oc.env:PLAIN}"]}
tracking: {tags: {"a.b": "x ${params.dsn} y"}}
launch: {env: {DSN: "${oc.env:DB_PASSWORD}", PLAIN: "${oc.env:PLAIN}"}}
cluster: {env: {DSN2: "pw=${oc.env:DB_PASSWORD}"}, setup: ["module load x", "login ${oc.env:DB_PASSWORD}"]}
notify: {command: "/bin/${oc.env:DB_PASSWORD}"}
params:
  dsn: postgres://user/${oc.env:DB_PASSWORD}/ada
  other: ${oc.env:UNSET_TOKEN,default-s3cret}
  name: DB_PASSWORD
  computed: <${oc.env:${params.name}}>
  port: ${oc.decode:${oc.env:PORT_TOKEN}}
  words: ${oc.decode:${oc.env:LIST_TOKEN}}
  short: ${oc.env:SHORT_PWD}
  empty: ${oc.env:UNSET_TOKEN,''}
  none: ${oc.env:UNSET_TOKEN,null}
  my_key: named-s3cret
  phrase: "-- ${params.my_key} --"
  same: ada
  rows: [{at: "${oc.env:DB_PASSWORD}"}, plain]
"""


def test_value_of_a_variable_with_the_name_of_a_secret_is_redacted_anywhere(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"DB_PASSWORD": "var-s3cret", "PORT_TOKEN": "54321", "LIST_TOKEN": "[ab-s3cret, 7]", "SHORT_PWD": "a"}
    for name, value in {**variables, "PLAIN": "visible"}.items():
        monkeypatch.setenv(name, value)
    config = load_config(write(FROM_VARIABLES), ["params.given=${oc.env:DB_PASSWORD}"])
    assert config.params["dsn"] == "postgres://user/var-s3cret/ada"
    written = to_yaml(config)
    assert "s3cret" not in written
    shown = yaml.safe_load(written)
    assert shown["experiment"] == "visible"
    assert shown["trainer"]["script"][1:] == ["--dsn", "***", "visible"]
    assert shown["tracking"]["tags"] == {"a.b": "x postgres://user/***/ada y"}
    assert shown["launch"]["env"] == {"DSN": "***", "PLAIN": "visible"}
    assert shown["cluster"]["setup"] == ["module load x", "login ***"]
    assert shown["notify"]["command"] == "/bin/***"
    assert shown["params"] == {
        "dsn": "postgres://user/***/ada",
        "other": "***",
        "name": "DB_PASSWORD",
        "computed": "<***>",
        "port": "*** (number)",
        "words": ["***", "*** (number)"],
        "short": "***",
        "empty": "",
        "none": None,
        "my_key": "***",
        "phrase": "-- *** --",
        "same": "ada",
        "rows": [{"at": "***"}, "plain"],
        "given": "***",
    }
    assert [line.split()[0] for line in exposed_secrets(config)] == ["cluster.setup"]
    # A process that restores the values redacts the same.
    path = tmp_path / "config.yaml"
    path.write_text(written)
    env = secrets_of(config)
    assert (env["DSN"], env["DSN2"], env["HPCDIST_PARAMS_PORT"]) == ("var-s3cret", "pw=var-s3cret", "54321")
    again = load_run_config(path, [], env)
    assert again == config
    assert to_yaml(again) == written
    changed = load_run_config(path, ["seed=1", "params.more=${oc.env:DB_PASSWORD}"], env)
    assert to_yaml(replace(changed, seed=0)) == written + "  more: '***'\n"


def test_missing_secret_is_reported_with_its_variable(write: Write, tmp_path: Path) -> None:
    config = load_config(write(SECRETS))
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    env = secrets_of(config)
    del env["WANDB_API_KEY"], env["HPCDIST_PARAMS_HF_TOKEN"]
    with pytest.raises(ConfigError) as caught:
        load_run_config(path, [], env)
    assert caught.value.problems == (
        "launch.env.WANDB_API_KEY was redacted when the run was written: set WANDB_API_KEY in the environment",
        "params.hf_token was redacted when the run was written: set HPCDIST_PARAMS_HF_TOKEN in the environment",
    )
    incomplete = load_run_config(path, [], env, require_secrets=False)
    assert (incomplete.launch.env["WANDB_API_KEY"], incomplete.params["hf_token"]) == ("***", "***")
    assert incomplete.params["nested"] == {"token": "nested-s3cret"}
    config = load_run_config(path, ["launch.env.WANDB_API_KEY=new", "params.hf_token=new"], env)
    assert (config.launch.env["WANDB_API_KEY"], config.params["hf_token"]) == ("new", "new")


def test_restored_secrets_keep_their_types(write: Write, tmp_path: Path) -> None:
    config = load_config(
        write("""
            params: {pin_pwd: 1234, my_key: "1234", ratio_key: 1.5, use_auth: true, words: [--token, s3cret]}
            cluster: {env: {WANDB_API_KEY: s3cret-1, BOTH_KEY: s3cret-2, HTTPS_PROXY: "http://u:s3cret@proxy"}}
            launch: {env: {BOTH_KEY: s3cret-3}}
        """)
    )
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert "s3cret" not in path.read_text()
    assert "1234" not in path.read_text()
    env = secrets_of(config)
    assert env["WANDB_API_KEY"] == "s3cret-1"
    assert (env["BOTH_KEY"], env["HPCDIST_CLUSTER_ENV_BOTH_KEY"]) == ("s3cret-3", "s3cret-2")
    assert env["HTTPS_PROXY"] == "http://u:s3cret@proxy"
    assert load_run_config(path, [], env) == config
    with pytest.raises(ConfigError, match=r"HPCDIST_PARAMS_PIN_PWD in the environment must hold JSON, such as 3"):
        load_run_config(path, [], {**env, "HPCDIST_PARAMS_PIN_PWD": "[1"})


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        ("launch: {env: {API_KEY: {x: hunter-s3cret}}}", []),
        ("launch: {env: {API_KEY: [hunter-s3cret]}}", []),
        ("", ["launch.env.API_KEY={a: hunter-s3cret}"]),
        ("launch: {env: ['API_KEY=hunter-s3cret']}", []),
        ("launch: {env: [{API_KEY: hunter-s3cret}]}", []),
        ("params: {password: *hunter-s3cret}", []),
        ("tracking: {uri: 'http://u:hunter-s3cret@h', log_every_steps: 'http://u:hunter-s3cret@h'}", []),
        ("params: {my_key: hunter-s3cret}\nseed: ${params.my_key}", []),
        ("params: {my_key: hunter-s3cret}\nexperiment: a/${params.my_key}", []),
        ("seed: ${oc.env:MINE}", []),
        ("experiment: ${oc.env:MINE}", []),
        ("launch: {device: '${oc.env:MINE}'}", []),
        ("launch: {devices: {trainer: '${oc.env:MINE}'}}", []),
        ("container: {env: ['${oc.env:MINE}'], mounts: ['${oc.env:MINE}'], runtime: podman}", []),
        ("params: {a: '${oc.decode:${oc.env:MINE}}'}", []),
        ("params: {which: MINE}\nseed: ${oc.env:${params.which}}", []),
        ("model: {name: '${oc.env:MINE}'}", []),
        ("", ["seed=${oc.env:MINE}"]),
        ("", ["roles.trainer=${oc.env:MINE}"]),
        ("", ["token hunter-s3cret", "API_KEY:hunter-s3cret", "--password=hunter-s3cret"]),
    ],
)
def test_errors_contain_no_secrets_and_no_environment_variables(
    write: Write, monkeypatch: pytest.MonkeyPatch, text: str, overrides: list[str]
) -> None:
    monkeypatch.setenv("MINE", "{a/hunter-s3cret")
    with pytest.raises(ConfigError) as caught:
        load_config(write(text), overrides)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None or "s3cret" not in str(caught.value.__cause__)


@pytest.mark.parametrize(
    "override", ["launch.env.API_KEY={a: other-s3cret}", "seed=${params.my_key}", "params.my_key.x=1"]
)
def test_errors_of_a_run_contain_no_secrets(write: Write, tmp_path: Path, override: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(load_config(write(r"params: {my_key: 'hunter-\${x}-s3cret'}"))))
    with pytest.raises(ConfigError) as caught:
        load_run_config(path, [override], {"HPCDIST_PARAMS_MY_KEY": "hunter-${x}-s3cret"})
    assert "s3cret" not in str(caught.value)


def test_short_value_of_a_variable_is_replaced_only_where_it_is_quoted(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MINE", "0")
    assert problems(write("cluster: {nodes: '${oc.env:MINE}'}")) == ("cluster.nodes must be >= 1, got ${oc.env:MINE}",)


@pytest.mark.parametrize(
    ("argument", "shown"),
    [
        ("run", "run"),
        ("--dry-run", "--dry-run"),
        ("optim.lr=0.1", "optim.lr=0.1"),
        ("params.tokenizer=gpt2", "params.tokenizer=gpt2"),
        ("launch.env.API_TOKEN=abc", "launch.env.API_TOKEN=***"),
        ("launch.env={API_TOKEN: abc}", "launch.env=***"),
        ("tracking.uri=http://u:p@h", "tracking.uri=***"),
        ("http://u:p@h/?a=b", "http://u:***@h/?a=b"),
    ],
)
def test_secrets_in_arguments_are_redacted(argument: str, shown: str) -> None:
    assert redacted_argument(argument) == shown

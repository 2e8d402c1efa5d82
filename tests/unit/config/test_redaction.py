"""Detection and redaction of secrets, and similar names and texts that are not secrets."""

import random
import string
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from config_files import Write, problems

import hpcdist
from hpcdist.config.describe import describe, describe_trainer
from hpcdist.config.loading import load_config, load_run_config
from hpcdist.config.redaction import (
    REDACTED,
    REDACTED_NUMBER,
    is_redacted,
    is_secret_name,
    redact_text,
    redact_tree,
    redact_words,
)
from hpcdist.config.schema import Config
from hpcdist.config.trainer_declaration import find_trainer
from hpcdist.config.training_schema import TrainerConfig
from hpcdist.config.written import (
    StoredConfig,
    arguments_of,
    build,
    declaration,
    read_stored,
    redacted_argument,
    run_yaml,
    secrets_of,
    to_yaml,
)
from hpcdist.errors import ConfigError, RunFolderError
from hpcdist.job.srun import exposed_secrets
from hpcdist.run.sweeps import make_sweep

SECRET_NAMES = """
    token TOKEN hf_token HfToken accessToken apitoken auth_token HF-TOKEN team.token token2
    password PASSWORD db_password PGPASSWORD passwd dbPasswd password1 password_file passphrase KEY_PASSPHRASE
    pwd MYSQL_PWD pass DB_PASS SMTP_PASS2 auth proxy_auth auth_header Authorization jwt SLURM_JWT jwt_value
    pat GITHUB_PAT secret client_secret secrets AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID access_key private_key
    ssh_key WANDB_API_KEY wandb.api-key apiKey APIKey apikey api_keys encryption_key signing-key my_key credentials
    aws_credential azure_storage_account_key webhook slack_webhook
"""
HARMLESS_NAMES = """
    tokens tokenizer max_tokens tokens_per_batch token_ids num_token pad_token eos_token path PATH pattern patience
    compass passes passed bypass forward_pass keyboard keys num_keys key num_key_value_heads key_dim monkey keyword
    primary_key sort_key image_key public_key author authors authority patch patches spat compat
    secretary_of_state passenger signature
"""


def test_names_of_secrets_are_told_from_harmless_names() -> None:
    assert [name for name in SECRET_NAMES.split() if not is_secret_name(name)] == []
    assert [name for name in HARMLESS_NAMES.split() if is_secret_name(name)] == []
    assert [path for path, *_ in describe() if any(map(is_secret_name, path.split(".")))] == ["notify.webhook"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:s3cret@host:5000", "http://me:***@host:5000"),
        ("http://a:s3cret@h/x http://b:s3cret@h,ftp://c:s3cret@h", "http://a:***@h/x http://b:***@h,ftp://c:***@h"),
        ("https://s3cret@host/x", "https://***@host/x"),
        ("postgresql://me:s3@cret:w@host/db", "postgresql://me:***@host/db"),
        ("ssh://git@host/x", "ssh://git@host/x"),
        ("postgresql://ada@host/x", "postgresql://ada@host/x"),
        ("http://h/?page=2&api_key=s3cret", "http://h/?page=2&api_key=***"),
        ("http://h/x?key=s3cret&sig=s3cret", "http://h/x?key=***&sig=***"),
        ("launch.env.MY_KEY='s3 cret' x=1", "launch.env.MY_KEY=*** x=1"),
        ("--env=A_KEY=s3cret --x=a=b", "--env=A_KEY=*** --x=a=b"),
        ("A_TOKEN=$(cat file) B_TOKEN=${oc.env:X} C_TOKEN=$C_TOKEN",
         "A_TOKEN=$(cat file) B_TOKEN=${oc.env:X} C_TOKEN=$C_TOKEN"),
        ("export DB_PASS=s3cret; ls", "export DB_PASS=***; ls"),
        ("Authorization: Bearer s3cret-0123456789", "Authorization: Bearer ***"),
        ("a ghp_0123456789abcdefghijABCDEFGHIJ456789 b", "a *** b"),
        ("-----BEGIN RSA PRIVATE KEY-----\ns3cret\n-----END RSA PRIVATE KEY-----\nx", "***\nx"),
        ("num_tokens=5 tokenizer=gpt2 path=/x key=a", "num_tokens=5 tokenizer=gpt2 path=/x key=a"),
        ("sk-learn-gradient-boosting-forest", "sk-learn-gradient-boosting-forest"),
        ("ranks=4, got -5", "ranks=4, got -5"),
    ],
)  # fmt: skip
def test_secrets_in_text_are_redacted(text: str, shown: str) -> None:
    assert redact_text(text) == shown
    assert redact_text(shown) == shown


def test_redaction_takes_linear_time() -> None:
    began = time.process_time()
    for part in ("a", "a=", "token=$", "://", "a@:"):
        redact_text(text := part * 90_000)
        redact_text(f"http://{text}")
    assert time.process_time() - began < 20  # a quadratic pattern takes minutes


def test_redact_tree_covers_numbers_and_lists_but_not_roles() -> None:
    tree = {
        "params": {"pin_pwd": 1234, "pass": True, "my_key": None, "api_keys": ["a", 2], "text": "http://u:p@h", "n": 3},
        "roles": {"auth": 1},
        "launch": {"devices": {"token": "cpu"}, "env": {"A_TOKEN": ""}},
        "cluster": {"roles": {"pass": {"nodes": 2, "sbatch": {"x_token": "a"}}}},
    }
    shown = redact_tree(tree)
    assert shown == {
        "params": {
            "pin_pwd": REDACTED_NUMBER,
            "pass": True,
            "my_key": None,
            "api_keys": [REDACTED, REDACTED_NUMBER],
            "text": "http://u:***@h",
            "n": 3,
        },
        "roles": {"auth": 1},
        "launch": {"devices": {"token": "cpu"}, "env": {"A_TOKEN": ""}},
        "cluster": {"roles": {"pass": {"nodes": 2, "sbatch": {"x_token": REDACTED}}}},
    }
    assert is_redacted(shown["params"]["pin_pwd"])
    assert is_redacted(shown["params"]["api_keys"])
    assert not is_redacted(shown["roles"])


# --- Tokens with a known prefix. They are put together from pieces: no scanner of secrets finds one in this file.


_RANDOM = random.Random(7)
ALNUM = string.ascii_letters + string.digits
UPPER = string.ascii_uppercase + string.digits
LOWER = string.ascii_lowercase + string.digits
HEX = "0123456789abcdef"


def made(chars: str, number: int) -> str:
    """Return random characters, a digit and a letter among them."""
    return "".join(_RANDOM.choices(chars, k=number - 2)) + "7" + next(char for char in chars if char.isalpha())


def _jwt() -> str:
    return ".".join("ey" + "J" + made(ALNUM, number) for number in (20, 60)) + "." + made(ALNUM, 43)


#: Tokens by the service that issues them, each as its documentation or GitHub's list of patterns describes it.
TOKENS = {
    "Hugging Face": "h" + "f_" + made(string.ascii_letters, 34),
    "Hugging Face, organization": "api" + "_org_" + made(string.ascii_letters, 34),
    "GitHub": "gh" + "p_" + made(ALNUM, 36),
    "GitHub, app": "gh" + "s_" + made(ALNUM, 36),
    "GitHub, fine-grained": "github" + "_pat_" + made(ALNUM, 22) + "_" + made(ALNUM, 59),
    "GitLab": "gl" + "pat-" + made(ALNUM, 20),
    "GitLab, runner": "gl" + "rt-" + made(ALNUM, 20),
    "OpenAI": "s" + "k-" + made(ALNUM, 20) + "T3Blbk" + "FJ" + made(ALNUM, 20),
    "OpenAI, project": "s" + "k-proj-" + made(ALNUM, 74),
    "Anthropic": "s" + "k-ant-api03-" + made(ALNUM, 93) + "AA",
    "Groq": "gs" + "k_" + made(ALNUM, 52),
    "Replicate": "r" + "8_" + made(ALNUM, 37),
    "Perplexity": "ppl" + "x-" + made(ALNUM, 48),
    "AWS": "AK" + "IA" + made(UPPER, 16),
    "AWS, session": "AS" + "IA" + made(UPPER, 16),
    "Google, key": "AI" + "za" + made(ALNUM, 35),
    "Google, access": "ya" + "29." + made(ALNUM, 60),
    "Google, client": "GOC" + "SPX-" + made(ALNUM, 28),
    "Azure, storage": "AccountKey=" + made(ALNUM, 86) + "==",
    "Azure, client": made(ALNUM, 3) + "8Q~" + made(ALNUM, 34),
    "Slack, bot": "xo" + "xb-123456789012-1234567890123-" + made(ALNUM, 24),
    "Slack, app": "xa" + "pp-1-A0" + made(UPPER, 9) + "-1234567890-" + made(HEX, 64),
    "Slack, webhook": "https://hooks." + f"slack.com/services/T{made(UPPER, 8)}/B{made(UPPER, 8)}/{made(ALNUM, 24)}",
    "Discord, webhook": "https://discord.com/api/web" + "hooks/123456789012345678/" + made(ALNUM, 68),
    "Discord, bot": "M" + made(ALNUM, 23) + "." + made(ALNUM, 6) + "." + made(ALNUM, 27),
    "Telegram": "1234567890:" + "AA" + made(ALNUM, 33),
    "Teams, webhook": "https://x.webhook.office.com/web" + "hookb2/" + made(HEX, 32) + "@" + made(HEX, 32),
    "Stripe": "s" + "k_live_" + made(ALNUM, 24),
    "Stripe, restricted": "r" + "k_test_" + made(ALNUM, 24),
    "Twilio": "S" + "K" + made(HEX, 32),
    "SendGrid": "S" + "G." + made(ALNUM, 22) + "." + made(ALNUM, 43),
    "Mailchimp": made(HEX, 32) + "-us" + "12",
    "Square": "sq0" + "csp-" + made(ALNUM, 43),
    "PyPI": "pypi-" + "AgEIcHlwaS5vcmc" + made(ALNUM, 80),
    "npm": "npm" + "_" + made(ALNUM, 36),
    "RubyGems": "ruby" + "gems_" + made(HEX, 48),
    "crates.io": "ci" + "o" + made(ALNUM, 32),
    "Docker Hub": "dckr" + "_pat_" + made(ALNUM, 27),
    "Databricks": "dap" + "i" + made(HEX, 32),
    "DigitalOcean": "do" + "p_v1_" + made(HEX, 64),
    "Vault": "hv" + "s." + made(ALNUM, 90),
    "Terraform Cloud": made(ALNUM, 14) + ".atlas" + "v1." + made(ALNUM, 60),
    "Grafana": "gls" + "a_" + made(ALNUM, 32) + "_" + made(HEX, 8),
    "Sentry": "sntr" + "ys_" + made(ALNUM, 60),
    "Linear": "lin" + "_api_" + made(ALNUM, 40),
    "Notion": "nt" + "n_" + made(ALNUM, 46),
    "Shopify": "shp" + "at_" + made(HEX, 32),
    "Atlassian": "ATA" + "TT3" + made(ALNUM, 60),
    "Age": "AGE-SECRET-" + "KEY-1" + made(UPPER, 58),
    "NVIDIA": "nv" + "api-" + made(ALNUM, 64),
    "Weights & Biases": "wandb" + "_v1_" + made(ALNUM, 40),
    "JWT": _jwt(),
}


@pytest.mark.parametrize("service", TOKENS)
def test_tokens_with_a_known_form_are_redacted(service: str) -> None:
    token = TOKENS[service]
    shown = redact_text(f"refused: {token} is not valid")
    assert REDACTED in shown
    assert token not in shown


# --- Stored configs, and parameters that a trainer of the user's own declares as a dataclass.


MODULE = '''
import torch_that_no_login_node_has
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, Optional

LOADED = torch_that_no_login_node_has.load("weights")


@dataclass
class MyParams:
    """Parameters of the regression."""

    total_steps: int
    """Number of optimizer steps."""
    hidden: int = 32
    rate: float = 1e-3
    act: Literal["relu", "tanh"] = "tanh"
    betas: tuple[float, float] = (0.9, 2 * 0.45)
    widths: list[int] = field(default_factory=lambda: [8, 8])
    limit: Optional[float] = None
    file: Path = Path('data')

    def __post_init__(self):
        torch_that_no_login_node_has.check(self)


def train(ctx, cfg, params: "MyParams"):
    raise SystemExit("not to be executed")
'''


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A current folder with a trainer that declares its parameters."""
    (tmp_path / "regression.py").write_text(MODULE)
    (tmp_path / "mine.yaml").write_text("trainer: regression:train\nparams: {total_steps: 10}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_defaults_are_filled_in_without_importing_the_module(project: Path) -> None:
    assert load_config("mine.yaml", ["params.rate=1"]).params == {
        "total_steps": 10,
        "hidden": 32,
        "rate": 1.0,
        "act": "tanh",
        "betas": [0.9, 0.9],
        "widths": [8, 8],
        "limit": None,
        "file": "data",
    }
    assert "regression" not in sys.modules


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("params.totl_steps=5", "command line: params.totl_steps is not a key: did you mean 'total_steps'?"),
        ("params.zzz=5", "command line: params.zzz is not a key: there are total_steps, hidden, rate, .*"),
        ("params.hidden=wide", "command line: params.hidden must be int, got 'wide'"),
        ("params.act=gelu", r"command line: params.act must be Literal\['relu', 'tanh'\], got 'gelu'"),
        ("params.betas=[1]", r"command line: params.betas must be tuple\[float, float\], got \[1\]"),
        ("params.widths=[a]", r"command line: params.widths must be list\[int\], got 'a' for params.widths.0"),
    ],
)
def test_mistake_is_named_before_the_run_starts(project: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("mine.yaml", [override])
    (project / "mine.yaml").write_text("trainer: regression:train\n")
    with pytest.raises(ConfigError, match=r"params\.total_steps is missing: MyParams has no default for it"):
        load_config("mine.yaml", ["params.rate=1"])


@pytest.mark.parametrize(
    "module",
    [
        "def train(ctx, cfg): ...",
        "def train(ctx, cfg, extra=None): ...",
        "from other import train",
        "def train(:",
        MODULE.replace("limit: Optional[float]", "limit: 'Optional[float]'"),  # not resolved outside of its module
        MODULE.replace("= 32", "= torch_that_no_login_node_has.size"),  # checked by the ranks
    ],
)
def test_trainer_without_a_declaration_takes_any_params(project: Path, module: str) -> None:
    (project / "regression.py").write_text(module)
    assert load_config("mine.yaml", ["params.anything=1"]).params == {"total_steps": 10, "anything": 1}


@pytest.mark.parametrize(
    "line",
    [
        "hidden: int = open('ran', 'w').write('')",
        "hidden: int = __import__('os').mkdir('ran') or 1",
        "hidden: \"__import__('os').mkdir('ran')\" = 1",
        "hidden: \"Literal[__import__('os').mkdir('ran')]\" = 1",
        "hidden: list[\"__import__('os').mkdir('ran')\"] = field(default_factory=list)",
        "hidden: int = field(default_factory=lambda: open('ran', 'w').close())",
        "hidden: int = [open('ran', 'w') for _ in range(1)]",
        "hidden: int = ().__class__.__base__.__subclasses__()",
        "hidden: int = typing.sys.modules['os'].mkdir('ran')",
        "open('ran', 'w')",
        "hidden: int = (lambda: open('ran', 'w'))()",
    ],
)
def test_code_in_a_declaration_is_not_executed(project: Path, line: str) -> None:
    (project / "regression.py").write_text(MODULE.replace("hidden: int = 32", line))
    config = load_config("mine.yaml")
    describe_trainer(config, project)
    assert not (project / "ran").exists()
    assert declaration(config.trainer, project) is None


def test_modules_are_found_in_packages_and_installed_folders(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "installed" / "pack").mkdir(parents=True)
    (project / "installed" / "pack" / "train.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(project / "installed"))
    found = declaration(TrainerConfig(target="pack.train:train"), project)
    assert found is not None
    assert found[0].__name__ == "MyParams"


def test_trainer_keys_come_first_and_give_sweeps_their_types(project: Path) -> None:
    rows = describe_trainer(load_config("mine.yaml"), project)
    assert rows[:2] == [
        ("params.total_steps", "int", "required", "Number of optimizer steps."),
        ("params.hidden", "int", 32, ""),
    ]
    assert not [key for key, *_ in describe_trainer(load_config("ddp_digits"), project) if key.startswith("rl.")]
    model_keys = [key for key, *_ in describe_trainer(load_config("rl_cartpole"), project) if key.startswith("model.")]
    assert model_keys == ["model.init_from", "model.init_from_skip"], "rl has no other use of the section"
    sweep = make_sweep({"params.rate": ("1", "2")}, lambda more: load_config("mine.yaml", more), lambda _: "regression")
    assert repr([cell.values for cell in sweep.cells]) == "[{'params.rate': 1.0}, {'params.rate': 2.0}]"


# --- in a rank


@dataclass(frozen=True)
class Inner:
    depth: int = 2


@dataclass
class Params:
    name: str
    act: Literal["relu", "tanh"] = "tanh"
    path: Path = Path("data")
    betas: tuple[float, ...] = (0.9, 0.95)
    inner: Inner = field(default_factory=Inner)
    limit: int | None = 3

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name must not be empty")


def train_with(ctx: Any, cfg: Any, params: Params) -> None: ...


def test_rank_passes_an_instance_with_values_of_their_types() -> None:
    values = {"name": "a", "path": "/b", "betas": [1, 0.5, 0.25], "inner": {"depth": 3}, "limit": None}
    expected = Params(name="a", path=Path("/b"), betas=(1.0, 0.5, 0.25), inner=Inner(depth=3), limit=None)
    assert arguments_of(train_with, values) == [expected]
    assert arguments_of(lambda ctx, cfg: None, values) == []


def test_rank_rejects_what_the_source_does_not_show() -> None:
    with pytest.raises(ConfigError, match=r"params\.name must not be empty"):
        build(Params, {"name": ""})
    with pytest.raises(ConfigError, match=r"params.nam is not a key: did you mean 'name'"):
        arguments_of(train_with, {"nam": "a"})
    with pytest.raises(ConfigError, match=r"params\.inner must be Inner, got 1 for params\.inner\.dept"):
        build(Params, {"name": "a", "inner": {"dept": 1}})


# --- Configs that were written by other versions, edited or damaged.


def stored(tmp_path: Path, text: str) -> StoredConfig:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return read_stored(path)


def test_a_stored_config_is_a_config_with_redacted_secrets(tmp_path: Path) -> None:
    config = load_config("rl_cartpole", ["cluster.env.API_TOKEN=abc", "optim.lr=3e-4", "tracking.tags={note: '3e-4'}"])
    found = stored(tmp_path, run_yaml(config))
    assert found.config == replace(config, cluster=replace(config.cluster, env={"API_TOKEN": "***"}))
    assert found.values["cluster.env.API_TOKEN"] == "***"
    assert (found.trainer, found.problem) == (find_trainer("rl"), "")


def test_unknown_keys_of_another_version_are_named(tmp_path: Path) -> None:
    found = stored(tmp_path, "optim: {lr: 0.5, later: 1}\nfuture: {a: 1}\npreflight: off\nseed: [1]\nroles: {a: 2}\n")
    assert (found.config.optim.lr, found.config.seed, found.config.preflight.mode) == (0.5, 0, "off")
    assert found.problem == (
        f"config.yaml has keys or values that hpcdist {hpcdist.__version__} does not know: optim.later, future, seed"
    )
    assert found.values["future.a"] == 1


def test_invalid_stored_values_are_replaced_by_defaults(tmp_path: Path) -> None:
    for text, problem in (
        ("optim: {lr: " + "9" * 400 + "}", "optim.lr"),
        ("checkpoint: often", "checkpoint"),
        ("optim: {lr: -1.0}", "optim.lr must be > 0, got -1.0"),
        ("1: {2: [3]}", "1"),
    ):
        found = stored(tmp_path, text)
        assert found.problem.endswith(f"does not know: {problem}")
        assert found.config == Config()
    for text in ("", "- a", "[" * 1200, "a: &x [*x]", "a: !!python/name:os.system x", "{[1]: 2}"):
        with pytest.raises(ConfigError, match=r"config\.yaml"):
            stored(tmp_path, text)


def test_user_code_has_no_monitored_metric_by_default(write: Write) -> None:
    for text, expected in (
        ("trainer: mine:train\n", ""),
        ("trainer: {script: [train.py]}\n", ""),
        ("trainer: mine:train\ncheckpoint: {every_steps: 5, monitor: eval/f1}\n", "eval/f1"),
        ("checkpoint: {every_steps: 5}\n", "eval/accuracy"),
    ):
        assert load_config(write(text)).checkpoint.monitor == expected, text


def test_config_of_a_run_can_start_another_run(tmp_path: Path) -> None:
    """The format number is not a config key."""
    path = tmp_path / "config.yaml"
    path.write_text(run_yaml(load_config("ddp_digits")))
    assert path.read_text().startswith("format: 1\n")
    assert load_config(path).experiment == "digits"
    path.write_text(path.read_text().replace("format: 1", "format: 7"))
    with pytest.raises(RunFolderError, match=r"config\.yaml was written by a newer hpcdist"):
        load_config(path)


# --- Written configs, error messages and command lines contain no secrets; the environment restores them.


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


def test_secrets_are_restored_from_the_environment(write: Write, tmp_path: Path) -> None:
    config = load_config(write(SECRETS))
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    written = path.read_text()
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
    env = secrets_of(config)
    assert env["WANDB_API_KEY"] == "env-s3cret"
    assert env["HPCDIST_TRACKING_URI"] == "http://ada:p@ss-w0rd@mlflow:5000/x"
    assert load_run_config(path, [], {"HOME": "/", **env}) == config
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


def test_value_of_a_secret_variable_is_redacted_anywhere(
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
        (r"params: {my_key: 'hunter-\${x}-s3cret'}" + "\nseed: ${params.my_key}", []),
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
        (None, ["launch.env.API_KEY={a: other-s3cret}"]),
        (None, ["seed=${params.my_key}"]),
        (None, ["params.my_key.x=1"]),
    ],
)
def test_errors_contain_no_secrets_and_no_environment_variables(
    write: Write, monkeypatch: pytest.MonkeyPatch, text: str | None, overrides: list[str]
) -> None:
    """Without a text, the overrides are those of a resume."""
    monkeypatch.setenv("MINE", "{a/hunter-s3cret")
    stored = to_yaml(load_config(write(r"params: {my_key: 'hunter-\${x}-s3cret'}")))
    path, secrets = write(stored if text is None else text), {"HPCDIST_PARAMS_MY_KEY": "hunter-${x}-s3cret"}
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides) if text is not None else load_run_config(path, overrides, secrets)
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None or "s3cret" not in str(caught.value.__cause__)


def test_short_secret_is_replaced_only_where_it_is_quoted(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINE", "0")
    assert problems(write("cluster: {nodes: '${oc.env:MINE}'}")) == ("cluster.nodes must be >= 1, got ${oc.env:MINE}",)


def test_secrets_in_arguments_are_redacted() -> None:
    for argument, shown in (
        ("optim.lr=0.1", "optim.lr=0.1"),
        ("params.tokenizer=gpt2", "params.tokenizer=gpt2"),
        ("launch.env.API_TOKEN=abc", "launch.env.API_TOKEN=***"),
        ("launch.env={API_TOKEN: abc}", "launch.env=***"),
        ("tracking.uri=http://u:p@h", "tracking.uri=***"),
        ("http://u:p@h/?a=b", "http://u:***@h/?a=b"),
    ):
        assert redacted_argument(argument) == shown
    words = ["train.py", "--api-key", "s3cret", "--lr", "1", "--token", "--verbose", "--pwd=s3cret"]
    assert redact_words(words) == ["train.py", "--api-key", "***", "--lr", "1", "--token", "--verbose", "--pwd=***"]

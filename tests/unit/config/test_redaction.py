"""Detection and redaction of secrets, and similar names and texts that are not secrets."""

from __future__ import annotations

import time

import pytest

from hpcdist.config.describe import describe
from hpcdist.config.redaction import (
    REDACTED,
    REDACTED_NUMBER,
    holds_secret,
    is_redacted,
    is_secret_name,
    redact_text,
    redact_tree,
    redact_words,
)

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
    secretary_of_state passenger signature webhook_file
"""


@pytest.mark.parametrize("name", SECRET_NAMES.split())
def test_name_of_a_secret_is_detected(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", HARMLESS_NAMES.split())
def test_harmless_name_is_not_detected(name: str) -> None:
    assert not is_secret_name(name)


def test_schema_has_one_key_with_the_name_of_a_secret() -> None:
    assert [path for path, *_ in describe() if any(map(is_secret_name, path.split(".")))] == ["notify.webhook"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("http://me:s3cret@host:5000", "http://me:***@host:5000"),
        ("http://a:s3cret@h/x http://b:s3cret@h,ftp://c:s3cret@h", "http://a:***@h/x http://b:***@h,ftp://c:***@h"),
        ("https://s3cret@host/x", "https://***@host/x"),
        ("ssh://git@host/x", "ssh://git@host/x"),
        ("postgresql://ada@host/x", "postgresql://ada@host/x"),
        ("http://h/?token=s3cret&page=2", "http://h/?token=***&page=2"),
        ("http://h/?page=2&api_key=s3cret", "http://h/?page=2&api_key=***"),
        ("http://h/x?key=s3cret&sig=s3cret", "http://h/x?key=***&sig=***"),
        ("--password=s3cret --lr=1", "--password=*** --lr=1"),
        ("launch.env.MY_KEY='s3 cret' x=1", "launch.env.MY_KEY=*** x=1"),
        ("--env=A_KEY=s3cret --x=a=b", "--env=A_KEY=*** --x=a=b"),
        (
            "A_TOKEN=$(cat file) B_TOKEN=${oc.env:X} C_TOKEN=$C_TOKEN",
            "A_TOKEN=$(cat file) B_TOKEN=${oc.env:X} C_TOKEN=$C_TOKEN",
        ),
        ("export DB_PASS=s3cret; ls", "export DB_PASS=***; ls"),
        ("Authorization: Bearer s3cret-0123456789", "Authorization: Bearer ***"),
        ("a ghp_0123456789abcdefghijABCDEFGHIJ456789 b", "a *** b"),
        ("x=glpat-0123456789abcdefghij", "x=***"),
        ("hf_abcdefghijABCDEFGHIJ0123456789", "***"),
        ("sk-proj-abcdefghij0123456789", "***"),
        ("AKIAIOSFODNN7EXAMPLE", "***"),
        ("xoxb-123456789012-abcdef", "***"),
        ("-----BEGIN RSA PRIVATE KEY-----\ns3cret\n-----END RSA PRIVATE KEY-----\nx", "***\nx"),
        ("num_tokens=5 tokenizer=gpt2 path=/x key=a", "num_tokens=5 tokenizer=gpt2 path=/x key=a"),
        ("sk-learn-gradient-boosting-forest", "sk-learn-gradient-boosting-forest"),
        ("ranks=4, got -5", "ranks=4, got -5"),
    ],
)
def test_secrets_in_text_are_redacted(text: str, shown: str) -> None:
    assert redact_text(text) == shown
    assert redact_text(shown) == shown


def test_redaction_takes_linear_time() -> None:
    texts = [
        "a" * 300_000,
        "a=" * 90_000,
        "token=$" * 50_000,
        "://" * 90_000,
        "http://" + "a" * 300_000,
        "a@:" * 90_000,
    ]
    began = time.process_time()
    for text in texts:
        redact_text(text)
        holds_secret(text, code=False)
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


def test_value_after_a_secret_option_is_redacted() -> None:
    words = ["train.py", "--api-key", "s3cret", "--lr", "1", "--token", "--verbose", "--pwd=s3cret"]
    assert redact_words(words) == ["train.py", "--api-key", "***", "--lr", "1", "--token", "--verbose", "--pwd=***"]


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ('password = "hunter2"', True),
        ("    'api_key': 'abcdef0123456789',", True),
        ('client_secret="sommer"', True),
        ("url = 'http://ada:hunter2@mlflow'", True),
        ("x = 'ghp_0123456789abcdefghijABCDEFGHIJ456789'", True),
        ("-----BEGIN OPENSSH PRIVATE KEY-----", True),
        ("WANDB_API_KEY=abcdef0123456789", False),
        ("export DB_PASSWORD=hunter2", False),
        ("  password: hunter2  # mine", False),
    ],
)
def test_line_with_a_secret_is_detected(line: str, code: bool) -> None:
    assert holds_secret(line, code=code)


@pytest.mark.parametrize(
    "line",
    [
        "password = args.password",
        'token = os.environ["HF_TOKEN"]',
        'api_key=os.environ.get("WANDB_API_KEY", "")',
        'password = getpass("password: ")',
        'sort_key = "created_at"',
        'pad_token = "<pad>"',
        'password = "***"',
        'password = "${oc.env:DB_PASSWORD}"',
        "def login(password: str) -> None:",
        "url = f'http://{user}:{password}@host'",
        'password = "hunter2"  # pragma: allowlist secret',
        "parser.add_argument('--token', help='of the hub')",
    ],
)
def test_line_without_a_secret_is_not_detected(line: str) -> None:
    assert not holds_secret(line, code=True)


def test_secret_in_a_long_line_is_detected() -> None:
    assert holds_secret("x" * 100_000 + ' "api_key": "abcdef0123456789" ' + "y" * 100_000, code=True)
    assert not holds_secret("x" * 200_000, code=False)


def test_placeholder_in_a_settings_file_is_not_detected() -> None:
    assert not holds_secret("password: ${DB_PASSWORD}", code=False)
    assert not holds_secret("password: <yours>", code=False)

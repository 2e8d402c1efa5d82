"""The detector of secrets on a corpus of 100 lines with secrets and 100 without.

The secrets are random, and are put together here from pieces: no scanner finds one in this file.
"""

import base64
import random
import string
from pathlib import Path

from hpcdist.config.redaction import holds_secret, redact_text
from hpcdist.run.snapshot import _CODE

#: Further lines without secrets, each after the name of its file.
HARMLESS = Path(__file__).with_name("harmless_lines.txt")
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
WORD = "hun" + "ter2"
KEY = made(LOWER, 40)
BASIC = base64.b64encode(f"ada:{WORD}x".encode()).decode()
#: Lines and names of files: the suffix decides whether it is source code.
PLACES = [
    (f'os.environ["HF_TOKEN"] = "{KEY}"', "a.py"),
    (f"os.environ['WANDB_API_KEY']='{KEY}'", "a.py"),
    (f'os.environ.setdefault("HF_TOKEN", "{KEY}")', "a.py"),
    (f'os.putenv("DB_PASSWORD", "{WORD}")', "a.py"),
    (f'config["password"] = "{WORD}"', "a.py"),
    (f'settings.set("api_key", "{KEY}")', "a.py"),
    (f'os.getenv("DB_PASSWORD", "{WORD}")', "a.py"),
    (f'os.environ.get("API_TOKEN", "{KEY}")', "a.py"),
    (f'login(token="{KEY}")', "a.py"),
    (f'password = "{WORD}"', "a.py"),
    (f"DB_PASSWORD: str = '{WORD}'", "a.py"),
    (f'{{"client_secret": "{KEY}"}}', "a.json"),
    (f'wandb.login(key="{KEY}")', "a.py"),
    (f'headers = {{"Authorization": "Bearer {KEY}"}}', "a.py"),
    (f'headers = {{"Authorization": "Basic {BASIC}"}}', "a.py"),
    (f'headers["X-Api-Key"] = "{KEY}"', "a.py"),
    (f'headers = {{"PRIVATE-TOKEN": "{KEY}"}}', "a.py"),
    (f'curl -H "Authorization: Bearer {KEY}" https://h/', "a.sh"),
    (f"curl -H 'Authorization: token {KEY}' https://h/", "a.sh"),
    (f"curl -u ada:{WORD}x https://h/", "a.sh"),
    (f"curl https://ada:{WORD}@h/", "a.sh"),
    (f"mysql -u ada --password={WORD}", "a.sh"),
    (f"train.py --api-key {KEY}", "a.sh"),
    (f"//registry.npmjs.org/:_authToken={KEY}", "npmrc"),
    (f"_auth={BASIC}", "npmrc"),
    (f"machine h login ada password {WORD}", "netrc"),
    (f"  password {WORD}", "netrc"),
    (f"ENV X_TOKEN={KEY}", "Dockerfile"),
    (f"ENV X_TOKEN {KEY}", "Dockerfile"),
    (f'ARG DB_PASSWORD="{WORD}"', "Dockerfile"),
    (f"ENV A=1 DB_PASSWORD={WORD} B=2", "Dockerfile"),
    (f"RUN export HF_TOKEN={KEY} && pip install x", "Dockerfile"),
    (f"export HF_TOKEN={KEY}; python train.py", "a.sh"),
    (f"HF_TOKEN={KEY} python train.py", "a.sh"),
    (f"  - HF_TOKEN={KEY}", "a.yaml"),
    (f"  HF_TOKEN: {KEY}", "a.yaml"),
    (f"password: {WORD}  # mine", "a.yaml"),
    (f'  password: "{WORD}"', "a.yaml"),
    (f"db_password = {WORD}", "a.ini"),
    (f'access_key = "{KEY}"', "a.toml"),
    (f"aws_secret_access_key = {KEY}", "a.cfg"),
    (f"uri: postgresql://ada:{WORD}@h/x", "a.yaml"),
    (f"engine = create_engine('mysql://ada:{WORD}@h/x')", "a.py"),
    (f'client = redis.from_url("redis://:{WORD}@h:6379")', "a.py"),
    ("-----BEGIN OPENSSH PRIVATE" + " KEY-----", "a.txt"),
    (f"hf auth login --token {KEY}", "a.sh"),
    (f"setenv HF_TOKEN {KEY}", "a.csh"),
    (f'  "auth": "{BASIC}"', "a.json"),
]
TRUE = [(f'x = "{token}"', "a.py") for token in TOKENS.values()] + PLACES

SHA1, SHA256, UUID = (
    made(HEX, 40),
    made(HEX, 64),
    f"{made(HEX, 8)}-{made(HEX, 4)}-4{made(HEX, 3)}-a{made(HEX, 3)}-{made(HEX, 12)}",
)
INTEGRITY = base64.b64encode(made(ALNUM, 64).encode()).decode()
FALSE = [
    (f"torch==2.10.0 --hash=sha256:{SHA256}", "requirements.txt"),
    (f"    --hash=sha256:{SHA256}", "requirements.txt"),
    (f'"integrity": "sha512-{INTEGRITY}"', "package-lock.json"),
    (f'sha256 = "{SHA256}"', "poetry.lock"),
    (f'checksum = "{SHA256}"', "Cargo.lock"),
    (f"FROM python@sha256:{SHA256}", "Dockerfile"),
    (f"- uses: actions/checkout@{SHA1}", "ci.yml"),
    (f'commit = "{SHA1}"', "a.py"),
    (f'run_id = "{made(HEX, 32)}"', "a.py"),
    (f'uuid = "{UUID}"', "a.py"),
    (f'image = "data:image/png;base64,{INTEGRITY}"', "a.html"),
    (f'revision="{SHA1}"', "a.py"),
    (f'"id": "{made(HEX, 8)}"', "a.ipynb"),
    (f'"image/png": "iVBORw0KGgo{INTEGRITY}"', "a.ipynb"),
    (f"wandb: run {made(LOWER, 8)}", "a.md"),
    (f'etag = "{made(HEX, 32)}"', "a.py"),
    (f"index {made(HEX, 8)}..{made(HEX, 8)} 100644", "a.py"),
    (f"url = 'https://h/x/{made(ALNUM, 43)}'", "a.py"),
    (f"ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAI{made(ALNUM, 43)} ada@h", "a.pub"),
    ("-----BEGIN CERTIFICATE-----", "a.txt"),
    ("-----BEGIN PUBLIC KEY-----", "a.txt"),
    *((line, name) for name, _, line in (text.partition(": ") for text in HARMLESS.read_text().splitlines())),
]


def _found(cases: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(line, name) for line, name in cases if holds_secret(line, code=Path(name).suffix in _CODE)]


def test_all_100_secrets_are_found_and_none_of_100_other_lines() -> None:
    assert (len(set(TRUE)), len(set(FALSE))) == (100, 100)
    assert [case for case in TRUE if case not in _found(TRUE)] == []
    assert _found(FALSE) == []


def test_tokens_are_redacted_in_messages() -> None:
    for token in TOKENS.values():
        shown = redact_text(f"refused: {token} is not valid")
        assert "***" in shown, token
        assert token not in shown

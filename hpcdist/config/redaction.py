"""Detection and redaction of secrets in configs, messages and logs."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import Any

from hpcdist.errors import MAX_SHOWN, shown

REDACTED = "***"
#: Replaces a number, so that a reader of the config knows that the value is not a string.
REDACTED_NUMBER = "*** (number)"
#: Sections with names of roles as keys.
_ROLE_KEYED = (("roles",), ("launch", "devices"), ("cluster", "roles"))

# --- names

_PART = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
#: Endings of parts of a secret's name, such as PGPASSWORD.
_STEMS = ("password", "passwd", "passwort", "passphrase", "secret", "secrets", "credential", "credentials", "apikey")
#: Whole parts at any position.
_ANYWHERE = frozenset({"pwd", "jwt", "authorization", "passw"})
#: Pairs of adjacent parts: `access_key_id`, `api_keys`, `auth_header`.
_KEY_KINDS = frozenset({"api", "access", "private", "secret", "encryption", "signing", "auth", "ssh", "master"})
_KEY_NOUNS = frozenset({"key", "keys", "token", "tokens", "header"})
#: Last part of a secret's name → parts that make it harmless if they stand before it, as in `pad_token`: names of
#: machine learning and databases.
_HARMLESS = {
    "key": frozenset(
        {"num", "primary", "foreign", "public", "sort", "partition", "group", "index", "join", "dict", "metric"}
        | {"image", "label", "input", "output", "target", "feature", "text", "data", "cache", "query", "state"}
    ),
    "token": frozenset(
        {"pad", "eos", "bos", "unk", "mask", "sep", "cls", "start", "end", "stop", "special", "num", "max", "min"}
        | {"per", "image", "next", "first", "last", "prompt", "padding", "decoder"}
    ),
    "pass": frozenset({"forward", "backward", "num", "single", "first", "second", "by", "low", "high", "band"}),
    "auth": frozenset({"no"}),
    "pat": frozenset(),
    "webhook": frozenset(),
}


def is_secret_name(name: str) -> bool:
    """Return whether a key, variable, option or query parameter of this name is a secret."""
    parts = [part.lower() for part in _PART.findall(name) if not part.isdigit()]
    for part in parts:
        if part in _ANYWHERE or part.endswith(_STEMS):
            return True
        if part.endswith("token") and part != "token":
            return True
    if any(kind in _KEY_KINDS and noun in _KEY_NOUNS for kind, noun in pairwise(parts)):
        return True
    if not parts or parts[-1] not in _HARMLESS:
        return False
    if parts == ["key"]:  # usually the key of a mapping
        return False
    before = parts[-2] if len(parts) > 1 else ""
    return before not in _HARMLESS[parts[-1]]


# --- texts

# Up to the last @ before a slash, since a password may contain an @.
_USERINFO = re.compile(r"(?<=://)([^/:@\s]*):[^/\s]+@")
#: A user without a password, which in HTTP is a token.
_HTTP_USER = re.compile(r"(?<=http://|ttps://)(?!\*\*\*@)[^/:@\s?#]+@")
#: `name=value`, `--name=value`, `?name=value&`; quoted or up to the next separator.
_NAME = re.compile(r"(?<![\w.-])([\w.-]+)=")
_VALUE = re.compile(r"\"[^\"]*\"|'[^']*'|[^\s&;\"']+")
#: References to a value: `$(cat file)`, `${NAME}`, `$NAME`.
_REFERENCE = re.compile(r"[\"']?\$(?:[({]|[A-Z_][A-Z0-9_]*[\"']?$)")
_QUERY = re.compile(r"(?<=[?&])(key|sig|signature|code|X-Amz-Signature)=([^\s&;\"']+)", re.IGNORECASE)
#: Part of each token, and found faster.
_LONG = re.compile(r"[\w-]{15}")
_BEARER = re.compile(r"\b(bearer|basic|(?<=authorization: )token)\s+(?=[\w.~+/-]*\d)[\w.~+/-]{12,}=*", re.IGNORECASE)
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----.*?(?:-----END [A-Z ]+-----|\Z)", re.DOTALL)
_TOKEN = re.compile(
    r"(?<![A-Za-z0-9])(?:"
    r"gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|gl(?:pat|dt|ft|soat|rt|imt|ptt|agent|oas|cbt)-[\w-]{20,}"
    r"|(?:hf|api_org)_[A-Za-z0-9]{20,}|sk-(?=[\w-]*\d)[\w-]{20,}|[rs]k_(?:live|test)_[0-9A-Za-z]{16,}|nvapi-[\w-]{20,}"
    r"|(?:A3T[A-Z0-9]|ABIA|ACCA|AKIA|ASIA)[0-9A-Z]{16}|AIza[\w-]{35}|ya29\.[\w-]{20,}|GOCSPX-[\w-]{28}"
    r"|xox[abeoprs]-[\w-]{10,}|xapp-\d-[\w-]{20,}|SG\.[\w-]{22}\.[\w-]{43}|pypi-[\w-]{50,}|npm_[A-Za-z0-9]{36}"
    r"|dckr_pat_[\w-]{20,}|eyJ[\w-]{8,}\.eyJ[\w-]{8,}(?:\.[\w-]+)?|wandb_v1_\w{20,}|gsk_\w{50,}|r8_\w{37}|pplx-\w{40,}"
    r"|AccountKey=[\w+/]{86}==|\w{3}\dQ~[\w~.-]{31,34}|[MNO][\w-]{23,25}\.[\w-]{6}\.[\w-]{27,38}|\d{8,10}:AA[\w-]{33}"
    r"|SK[0-9a-f]{32}|[0-9a-f]{32}-us\d\d?|sq0[a-z]{3}-[\w-]{22,}|rubygems_[0-9a-f]{48}|cio[A-Za-z0-9]{32}"
    r"|dapi[0-9a-f]{32}|do[opr]_v1_[0-9a-f]{64}|hv[sb]\.[\w-]{24,}|\w{14}\.atlasv1\.[\w-]{60,}|glsa_\w{32,}"
    r"|sntr[yu]s_[\w=+/-]{40,}|lin_api_\w{40}|ntn_\w{40,}|shp[acps][at]_[0-9a-f]{32}|ATATT3[\w=-]{50,}"
    r"|AGE-SECRET-KEY-1[0-9A-Z]{58}"
    r")(?![A-Za-z0-9])"
)
_HOOK = re.compile(
    r"(hooks\.slack\.com/(?:services|workflows)/|discord(?:app)?\.com/api/webhooks/|webhook\.office\.com/webhookb2/)"
    r"(?=[\w/-]*\d)[\w/@-]+"
)
_MARKS = re.compile(r"[=@]|(?i:bearer|basic|token)\s|-----BEGIN|hook")


def redact_text(text: str) -> str:
    """Return `text` with `***` for secrets in URIs and query strings, values of `name=value` with the name of a secret,
    tokens with a known prefix, and private keys.
    """
    if _LONG.search(text):
        text = _TOKEN.sub(REDACTED, text)
    if _MARKS.search(text) is None:
        return text
    text = _PRIVATE_KEY.sub(REDACTED, text)
    text = _USERINFO.sub(rf"\1:{REDACTED}@", text)
    text = _HTTP_USER.sub(f"{REDACTED}@", text)
    pieces, end = [], 0
    for name in _NAME.finditer(text):
        if name.start() < end or not is_secret_name(name[1]):
            continue
        value = _VALUE.match(text, name.end())
        if value is not None and not _REFERENCE.match(value[0]):
            pieces += [text[end : name.end()], REDACTED]
            end = value.end()
    text = "".join([*pieces, text[end:]])
    text = _QUERY.sub(rf"\1={REDACTED}", text)
    text = _BEARER.sub(rf"\1 {REDACTED}", text)
    return _HOOK.sub(rf"\1{REDACTED}", text)


# --- trees of plain containers

Texts = Mapping[tuple[str, ...], Collection[str]]
_NO_TEXTS: Texts = {}


def redact_tree(tree: Mapping[str, Any], above: tuple[str, ...] = (), texts: Texts = _NO_TEXTS) -> dict[str, Any]:
    """Return a copy of a config's containers with `***` for each value that is a secret by its key or its form.

    Args:
        texts: further secrets by the path to the value that contains them, or from which they were converted.
    """
    named = above not in _ROLE_KEYED
    return {
        key: _redact((*above, str(key)), value, named and is_secret_name(str(key)), texts)
        for key, value in tree.items()
    }


def _redact(path: tuple[str, ...], value: Any, secret: bool, texts: Texts = _NO_TEXTS) -> Any:
    if path in texts:
        value = _without(value, sorted(texts[path], key=len, reverse=True))
        secret = secret or not is_redacted(value)
    if isinstance(value, Mapping):
        if not secret:
            return redact_tree(value, path, texts)
        return {key: _redact(path, inner, True) for key, inner in value.items()}
    if isinstance(value, list):
        if not secret:
            return redact_words(value)
        return [_redact(path, inner, True) for inner in value]
    if isinstance(value, str):
        if secret and value:
            return REDACTED
        return redact_text(value)
    if secret and isinstance(value, int | float) and not isinstance(value, bool):
        return REDACTED_NUMBER
    return value


def _without(value: Any, texts: list[str]) -> Any:
    """Return plain containers with `***` in the place of `texts`, which are ordered by length, the longest first."""
    if isinstance(value, Mapping):
        return {key: _without(inner, texts) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without(inner, texts) for inner in value]
    if not isinstance(value, str):
        return _redact((), value, str(value) in texts)
    for text in texts:
        if len(text) < _SHORT and text in value:
            return REDACTED
    for text in texts:
        value = value.replace(text, REDACTED)
    return value


def redact_words(words: list[Any]) -> list[Any]:
    """Return a redacted list, in which the word after an option such as `--token` is a secret."""
    shown: list[Any] = []
    for before, word in pairwise([None, *words]):
        is_option = isinstance(before, str) and before.startswith("--") and "=" not in before
        is_value = not (isinstance(word, str) and word.startswith("--"))
        shown.append(_redact((), word, is_option and is_value and is_secret_name(str(before))))
    return shown


_ENV_NAME = re.compile(r"oc\.env:\s*([^,}\s]*)")
#: A shorter value may be a word of the message, and is replaced only after `got` and in quotes.
_SHORT = 4


def hide_values(lines: Iterable[str], tree: Mapping[str, Any], env: Mapping[str, str]) -> list[str]:
    """Return the lines of an error with secrets redacted, and values of variables replaced by `${oc.env:NAME}`."""
    replacements: dict[str, str] = {}
    for text, replacement in _hidden(tree, env):
        if not text:
            continue
        # A message contains a value as it is, quoted, or shortened (`errors.shown`).
        replacements[text] = replacement
        replacements[repr(text)[1:-1]] = replacement
        if len(text) > MAX_SHOWN:
            replacements[shown(text)] = replacement
    if not replacements:
        return [redact_text(line) for line in lines]
    words = []
    quoted = []
    for text in sorted(replacements, key=len, reverse=True):
        escaped = re.escape(text)
        quoted.append(escaped)
        if len(text) < _SHORT:
            escaped = rf"(?<=got ){escaped}"
        words.append(escaped)
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(words)})(?!\w)|(?<=')(?:{'|'.join(quoted)})(?=')")
    return [redact_text(pattern.sub(lambda match: replacements[match[0]], line)) for line in lines]


#: The beginning of an interpolation, and of an escaped one, which is text: after an odd number of backslashes.
_INTERPOLATION, _ESCAPED = re.compile(r"(?<!\\)(?:\\\\)*\$\{"), re.compile(r"(\\*)\\\$\{")


def _hidden(value: Any, env: Mapping[str, str], secret: bool = False) -> Iterator[tuple[str, str]]:
    """Yield each value that must not occur in a message, with its replacement."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _hidden(inner, env, secret or is_secret_name(str(key)))
    elif isinstance(value, list):
        for inner in value:
            yield from _hidden(inner, env, secret)
    elif isinstance(value, str):
        for name in _ENV_NAME.findall(value):
            names = [name]
            if "$" in name:  # an interpolation, which can refer to any variable
                names = [other for other, text in env.items() if len(text) >= _SHORT]
            for variable in names:
                yield env.get(variable, ""), f"${{oc.env:{variable}}}"
        if secret and not _INTERPOLATION.search(value):
            yield _ESCAPED.sub(lambda match: match[1][::2] + "${", value), REDACTED
    elif secret and isinstance(value, int | float) and not isinstance(value, bool):
        yield str(value), REDACTED


def named_secrets(tree: Mapping[str, Any]) -> list[str]:
    """Return the texts below keys with the names of secrets; not short ones, which occur by chance."""
    return [text for text, shown in _hidden(tree, {}) if shown == REDACTED and len(text) >= _SHORT]


def hidden_texts(shown: Any, value: Any) -> tuple[str, ...]:
    """Return the texts of a value that are `***` in its redacted form."""
    if isinstance(shown, list) and isinstance(value, list) and len(shown) == len(value):
        texts: list[str] = []
        for shown_entry, entry in zip(shown, value, strict=True):
            texts += hidden_texts(shown_entry, entry)
        return tuple(texts)
    visible_parts = [re.escape(part) for part in str(shown).split(REDACTED)]
    match = re.fullmatch("(.+?)".join(visible_parts), str(value), re.DOTALL)
    if match is None:
        return (str(value),)
    return tuple(match.groups())


def is_redacted(value: Any) -> bool:
    """Return whether a value, or one in its containers, contains `***`."""
    if isinstance(value, Mapping):
        return any(is_redacted(inner) for inner in value.values())
    if isinstance(value, list):
        return any(is_redacted(inner) for inner in value)
    return isinstance(value, str) and REDACTED in value

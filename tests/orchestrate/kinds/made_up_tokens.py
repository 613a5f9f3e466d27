"""Tokens of the usual kinds: made up, of a valid shape, joined here so that no file holds one."""

import base64
import random
import string

_RNG = random.Random(46)
_ALPHANUMERIC = string.ascii_letters + string.digits
_HEX = "0123456789abcdef"


def _some(count, letters=_ALPHANUMERIC):
    return "".join(_RNG.choices(letters, k=count))


def _base64(count):
    return base64.b64encode(_RNG.randbytes(count)).decode()


def _segment(text):
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def _pem(kind, num_lines):
    body = "\n".join(_base64(48) for _ in range(num_lines)) + "\n" + _base64(20)
    return f"-----BEGIN {kind}PRIVATE KEY-----\n{body}\n-----END {kind}PRIVATE KEY-----", body


def _tokens():
    """By kind: the line that holds it, and what of it must never be seen."""
    whole = {
        "hugging face": "hf_" + _some(34, string.ascii_letters),
        "openai": "sk-proj-" + _some(74) + "T3Blbk" + "FJ" + _some(74),
        "openai old": "sk-" + _some(20) + "T3Blbk" + "FJ" + _some(20),
        "anthropic": "sk-ant-" + "api03-" + _some(93) + "AA",
        "github": "gh" + "p_" + _some(36),
        "github app": "gh" + "s_" + _some(36),
        "github fine": "github_" + "pat_" + _some(82),
        "gitlab": "glpat" + "-" + _some(20),
        "npm": "npm" + "_" + _some(36),
        "pypi": "pypi" + "-AgEIcHlwaS5vcmc" + _some(120),
        "slack bot": "xox" + "b-" + _some(12, string.digits) + "-" + _some(24),
        "stripe": "sk_" + "live_" + _some(24),
        "stripe restricted": "rk_" + "live_" + _some(24),
        "aws id": "AKIA" + _some(16, string.ascii_uppercase + "234567"),
        "google": "AIza" + _some(35),
        "prefect": "pnu" + "_" + _some(36),
        "jwt": _segment('{"alg":"HS256"}') + "." + _segment('{"sub":"12345678"}') + "." + _some(43),
        "sendgrid": "SG" + "." + _some(22) + "." + _some(43),
        "databricks": "dapi" + _some(32, _HEX),
        "digitalocean": "dop_" + "v1_" + _some(64, _HEX),
        "shopify": "shpat" + "_" + _some(32, _HEX),
        "grafana": "glsa" + "_" + _some(32) + "_" + _some(8, _HEX),
        "hashicorp": _some(14) + ".atlasv1." + _some(64),
        "telegram": _some(9, "123456789") + ":AA" + _some(33),
        "replicate": "r8" + "_" + _some(37),
        "nvidia": "nvapi" + "-" + _some(64),
    }  # fmt: skip
    found = {kind: (token, token) for kind, token in whole.items()}
    named = {
        "aws secret": ("aws_secret_access_key = ", _base64(30)),
        "wandb": ("WANDB_API_KEY=", _some(40, _HEX)),
        "bearer": ("Authorization: Bearer ", _some(40)),
        "basic": ("Authorization: Basic ", _base64(18)),
        "slack hook": (
            "https://hooks.slack.com/services/",
            f"T0{_some(8)}/B0{_some(8)}/{_some(24)}",
        ),
        "discord hook": (
            "https://discord.com/api/webhooks/",
            f"{_some(18, string.digits)}/{_some(68)}",
        ),
        "azure": ("DefaultEndpointsProtocol=https;AccountName=x;AccountKey=", _base64(64)),
        "azure signature": ("https://x.blob.core.windows.net/a?sv=2024&sig=", _some(43) + "%3D"),
        "cookie": ("Cookie: session=", _some(32)),
        "password": ("DB_PASS=", "Tr0ub4dor" + _some(6)),
        "mysql": ("MYSQL_PWD=", "corr3ct-horse" + _some(4)),
        "json password": ('{"user": "bob", "password": "', "s3cret" + _some(8)),
        "discord bot": ("DISCORD_TOKEN=", "MT" + _some(22) + "." + _some(6) + "." + _some(38)),
        "twilio": ("TWILIO_AUTH_TOKEN=", _some(32, _HEX)),
        "flag": ("curl --password ", "pw" + _some(12)),
        "prefect string": ("PREFECT_API_AUTH_STRING=", "admin:" + _some(20)),
    }  # fmt: skip
    ends = {"json password": '"}', "azure signature": "&se=1"}
    for kind, (start, token) in named.items():
        found[kind] = (start + token + ends.get(kind, ""), token)
    password = "p@ss" + _some(6) + "@" + _some(4)
    found["url"] = (f"postgres://bob:{password}@db.example.org:5432/x", password)
    return found


TOKENS = _tokens()
"""By kind: (a line, its secret part)."""

KEYS = {
    "rsa": _pem("RSA ", 24),
    "openssh": _pem("OPENSSH ", 6),
    "pkcs8": _pem("", 26),
}
"""By kind: (a private key of many lines, its body)."""


def text():
    """All of them, as a program would print them: each on its line, keys on theirs."""
    lines = [f"{kind}: {line}" for kind, (line, _) in TOKENS.items()]
    return "\n".join([*lines, *(key for key, _ in KEYS.values()), "the end"]) + "\n"


def seen_in(shown):
    """The kinds whose secret part can be read in a text or in bytes."""
    if isinstance(shown, bytes):
        shown = shown.decode("utf-8", "replace")
    tokens = [kind for kind, (_, token) in TOKENS.items() if token in shown]
    keys = [kind for kind, (_, body) in KEYS.items() for line in body.split("\n") if line in shown]
    return sorted({*tokens, *keys})

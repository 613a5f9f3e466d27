"""Our own rules for what looks like a secret: what Betterleaks leaves out, and values by name.

Knows bytes. A value by its name is `DB_PASSWORD=...`, `"token": "..."` or `--api-key ...`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from redco_flow.spec.secret_names import is_password_name, looks_secret_name
from redco_flow.spec.secret_rules import Rule, Span

OWN_RULES = (
    Rule(r"\bhf_[A-Za-z0-9]{16,}", ("hf_",)),
    Rule(r"\bsk-(?=[A-Za-z0-9_-]*[0-9])[A-Za-z0-9_-]{16,}", ("sk-",)),
    Rule(r"\bgh[pousr]_[A-Za-z0-9]{16,}", ("ghp_", "gho_", "ghu_", "ghs_", "ghr_")),
    Rule(r"\bgithub_pat_[A-Za-z0-9_]{16,}", ("github_pat_",)),
    Rule(r"\bglpat-[A-Za-z0-9_-]{16,}", ("glpat-",)),
    Rule(r"\bpnu_[A-Za-z0-9]{16,}", ("pnu_",)),
    Rule(r"\bnpm_[A-Za-z0-9]{30,}", ("npm_",)),
    Rule(r"\bpypi-[A-Za-z0-9_-]{50,}", ("pypi-",)),
    Rule(r"\bxox[abeprs]-[A-Za-z0-9-]{10,}", ("xox",)),
    Rule(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}", ("akia", "asia")),
    Rule(r"\bAIza[A-Za-z0-9_-]{30,}", ("aiza",)),
    Rule(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*", ("eyj",)),
    Rule(r"\bSG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}", ("sg.",)),
    Rule(r"\b[0-9a-f]{32}-us[0-9]{1,2}\b", ("-us",)),
    Rule(r"\b[0-9]{8,10}:AA[A-Za-z0-9_-]{33}\b", (":aa",)),
    Rule(r"hooks\.slack\.com/[a-z]+/([A-Za-z0-9_/+-]{16,})", ("hooks.slack.com",)),
    Rule(r"/api/(?:v[0-9]+/)?webhooks/([0-9]+/[\w-]{16,})", ("webhooks/",)),
    Rule(r"(?i)(?:Account|Access)Key=([A-Za-z0-9+/]{30,}={0,2})", ("accesskey=", "accountkey=")),
    Rule(r"(?i)[?&;]sig=([A-Za-z0-9%+/=]{20,})", ("sig=",)),
    Rule(r"(?i)[?&]X-Amz-(?:Signature|Security-Token)=([A-Za-z0-9%+/=]{20,})", ("x-amz-",)),
    Rule(r"(?i)\bbearer[ \t]+(?=\S*[0-9])([\w~+/.=-]{16,})", ("bearer",), entropy=2.5),
    Rule(r"\b[Bb]asic[ \t]+(?=\S*[0-9=])(?=\S*[A-Z])([A-Za-z0-9+/]{12,}={0,2})", ("basic",)),
    Rule(
        r"""(?i)\bauthorization['"\\]{0,3}[ \t]*[:=][ \t]*['"\\]{0,3}"""
        r"""(?:(?:basic|bearer|token|apikey|digest)[ \t]+)?"""
        r"""([^\s'",;\\$<{(\[][^\s'",;\\]{7,})""",
        ("authorization",),
    ),
    Rule(
        r"""(?i)(?<![\w.-])(?:set-)?cookie['"]?[ \t]*:[ \t]*['"]?"""
        r"""([^\s=;'"]+=[^\s'"]{8,}(?: [^\s=;'"]+=[^\s'"]+)*)""",
        ("cookie",),
    ),
    # A URL's password may itself hold an "@"; `$` begins a variable that stands for one.
    Rule(r"""(?<=://)[^\s/:@'"<>]*:[^\s/'"<>$]+(?=@[\w.\[-])""", ("://",)),
)

# Words that stand in every secret's name, as `looks_secret_name` has them.
_NAME_WORDS = (
    *("token", "secret", "pass", "pwd", "credential", "cookie", "authorization", "auth_string"),
    *("auth-string", "webhook", "connection", "database_url", "dsn", "keystring"),
    *(
        f"{first}{mid}key"
        for first in ("api", "access", "private", "auth")
        for mid in ("", "_", "-")
    ),
    *(f"pat{end}" for end in ("=", ":", '"', "'", " ")),
)
_NUMBER = re.compile(rb"[+-]?[0-9][0-9.,_:]*[a-zA-Z%/]{0,12}|0x[0-9a-fA-F]+")
_WORDS = re.compile(rb"[A-Za-z_]\w*(?:[.:/-]+[A-Za-z_]\w*)*[.:]?")
_CODE = re.compile(rb"[\[({|<]|->|=>|==")
_STAND_IN = re.compile(
    rb"(?i)[$<{%*\[(]|redacted|hidden|none\b|null\b|true\b|false\b|your[_-]|os\."
)


@dataclass(frozen=True)
class NamedValueRule(Rule):
    """A value whose name says that it is secret; its keywords are words of such names."""

    def find_at(self, data: bytes, at: int, end: int) -> Iterator[Span]:
        """Yield where the value stands."""
        match = self.pattern.match(data, at, end)
        if match is None:
            return
        start = at
        while start > 0 and data[start - 1] in _NAME_BYTES and at - start < _LONGEST_NAME:
            start -= 1
        name = data[start : match.end("name")].decode("ascii", "replace")
        quoted = match["double"] or match["single"]
        if looks_secret_name(name) and _could_be_secret(
            name, quoted or match["bare"], is_quoted=bool(quoted)
        ):
            yield next(match.span(n) for n in ("double", "single", "bare") if match[n])


_NAME_BYTES = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
_LONGEST_NAME = 80
_VALUE = (
    r"""(?:\\?"(?P<double>[^"\\\r\n]{8,})|\\?'(?P<single>[^'\\\r\n]{8,})"""
    r"""|(?P<bare>[^\s"',;\\]{8,}))"""
)
NAMED_VALUES = (
    NamedValueRule(
        r"""(?P<name>[\w.-]{0,80})(?:\\?["'])?[ \t]{0,3}"""
        rf"""(?::=|=>|=(?!=)|:(?!:))[ \t]{{0,3}}{_VALUE}""",
        _NAME_WORDS,
        is_at_keyword=True,
    ),
    NamedValueRule(  # --api-key VALUE
        rf"""--(?P<name>[\w-]{{0,80}})[ \t]+{_VALUE}""",
        tuple(f"--{word}" for word in ("token", "secret", "password", "api-key", "api_key")),
        is_at_keyword=True,
    ),
)


def _could_be_secret(name: str, value: bytes, *, is_quoted: bool) -> bool:
    if _STAND_IN.match(value) or _NUMBER.fullmatch(value) or not value.isascii():
        return False
    if is_password_name(name):
        return is_quoted or not _CODE.search(value)
    if b" " in value or _CODE.search(value):
        return False
    return (
        name.isupper()
        or any(byte in b"0123456789" for byte in value)
        or (not _WORDS.fullmatch(value))
    )

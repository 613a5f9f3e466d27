"""Find secrets by their looks and by their names, so that they are never stored or shown.

Text in, text out: reads no environment. Light, for supervisors mask logs with it.
A secret is given by the name of an environment variable (`token_env: HF_TOKEN`), never by value.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from redco_flow.spec.secret_rules import RuleSet, SecretRule, Span, betterleaks_rules

# A word of a name: HF_TOKEN, hfToken, api-key, APIKey all fall apart into words.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_WORD = re.compile(
    r"(?:api|auth|access)(?:key|token)|(?:secret|private)key|credentials?|pass(?:phrase|wd)"
    r"|(?:pg)?passwords?|pat|secrets?|authorization|cookies?|dsn"
)
_SECRET_PAIRS = frozenset(
    [
        *((first, "key") for first in ("api", "access", "private", "secret", "auth")),
        *((first, "url") for first in ("database", "db", "connection", "webhook")),
        *((first, "uri") for first in ("database", "db", "connection", "webhook")),
        *((first, "string") for first in ("auth", "connection", "conn")),
        ("auth", "header"),
    ]
)
# These say something of secrets at the end of a name alone: DB_PASS, MYSQL_PWD, SLACK_WEBHOOK.
_LAST_WORD = re.compile(r"pass|pwd|pw|webhook")
# What else passes, and what else is a PWD: forward_pass, OLD_PWD.
_OTHER_PASS = re.compile(
    r"backward|band|by|decode|each|eval|first|forward|full|high|last|low|main|max|multi|num|old|one"
    r"|per|pre|second|single|this|to|two|warmup|[0-9]+"
)
_PASSWORD_WORD = re.compile(r"pass(?:phrase|wd|words?)?|(?:pg)?passwords?|pwd|pw")
# Words that make "token" a piece of text: pad_token, token_id, max_tokens, tokens_per_second.
_TEXT_TOKEN_WORD = re.compile(
    r"additional|batch|begin|bos|budget|cls|count|decoder|dropout|embedding|end|eos|extra|forced"
    r"|generated|ids?|image|input|label|length|level|limit|loss|mask|max|mean|min|new|num|number"
    r"|output|pad|per|position|prefix|rate|ratio|second|sep|size|source|special|start|steps?"
    r"|suffix|target|text|total|types?|unk|vocab|vocabulary|weight|window"
)


def looks_secret_name(name: str) -> bool:
    """Tell whether a key or environment variable of this name would hold a secret.

    A name that ends in `_env` holds a variable's name, which is no secret.
    """
    if name.lower().endswith("_env"):
        return False
    words = [word.lower() for word in _WORD.findall(name)]
    if any(pair in _SECRET_PAIRS for pair in pairwise(words)):
        return True
    if any(_SECRET_WORD.fullmatch(word) for word in words):
        return True
    if len(words) > 1 and _LAST_WORD.fullmatch(words[-1]):
        return not _OTHER_PASS.fullmatch(words[-2])
    if "token" in words or "tokens" in words:
        return not any(_TEXT_TOKEN_WORD.fullmatch(word) for word in words)
    return name.lower().endswith(("password", "passwd"))


def is_password_name(name: str) -> bool:
    """Tell whether a secret of this name may be a word of a person's choice."""
    return any(_PASSWORD_WORD.fullmatch(word.lower()) for word in _WORD.findall(name))


OWN_RULES = (
    SecretRule(r"\bhf_[A-Za-z0-9]{16,}", ("hf_",)),
    SecretRule(r"\bsk-(?=[A-Za-z0-9_-]*[0-9])[A-Za-z0-9_-]{16,}", ("sk-",)),
    SecretRule(r"\bgh[pousr]_[A-Za-z0-9]{16,}", ("ghp_", "gho_", "ghu_", "ghs_", "ghr_")),
    SecretRule(r"\bgithub_pat_[A-Za-z0-9_]{16,}", ("github_pat_",)),
    SecretRule(r"\bglpat-[A-Za-z0-9_-]{16,}", ("glpat-",)),
    SecretRule(r"\bpn[ub]_[A-Za-z0-9]{16,}", ("pnu_", "pnb_")),
    SecretRule(r"\bnpm_[A-Za-z0-9]{30,}", ("npm_",)),
    SecretRule(r"\bpypi-[A-Za-z0-9_-]{50,}", ("pypi-",)),
    SecretRule(r"\bxox[abeprs]-[A-Za-z0-9-]{10,}", ("xox",)),
    SecretRule(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}", ("akia", "asia")),
    SecretRule(r"\bAIza[A-Za-z0-9_-]{30,}", ("aiza",)),
    SecretRule(r"\beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*", ("eyj",)),
    SecretRule(r"\bSG\.[A-Za-z0-9_-]{16,}\.[A-Za-z0-9_-]{16,}", ("sg.",)),
    SecretRule(r"\b[0-9a-f]{32}-us[0-9]{1,2}\b", ("-us",)),
    SecretRule(r"\b[0-9]{8,10}:AA[A-Za-z0-9_-]{33}\b", (":aa",)),
    SecretRule(r"hooks\.slack\.com/[a-z]+/([A-Za-z0-9_/+-]{16,})", ("hooks.slack.com",)),
    SecretRule(r"/api/(?:v[0-9]+/)?webhooks/([0-9]+/[\w-]{16,})", ("webhooks/",)),
    SecretRule(
        r"(?i)(?:Account|Access)Key=([A-Za-z0-9+/]{30,}={0,2})", ("accesskey=", "accountkey=")
    ),
    SecretRule(r"(?i)[?&;]sig=([A-Za-z0-9%+/=]{20,})", ("sig=",)),
    SecretRule(r"(?i)[?&]X-Amz-(?:Signature|Security-Token)=([A-Za-z0-9%+/=]{20,})", ("x-amz-",)),
    SecretRule(r"(?i)\bbearer[ \t]+(?=\S*[0-9])([\w~+/.=-]{16,})", ("bearer",), entropy=2.5),
    SecretRule(r"\b[Bb]asic[ \t]+(?=\S*[0-9=])(?=\S*[A-Z])([A-Za-z0-9+/]{12,}={0,2})", ("basic",)),
    SecretRule(
        r"""(?i)\bauthorization['"\\]{0,3}[ \t]*[:=][ \t]*['"\\]{0,3}"""
        r"""(?:(?:basic|bearer|token|apikey|digest)[ \t]+)?"""
        r"""([^\s'",;\\$<{(\[][^\s'",;\\]{7,})""",
        ("authorization",),
    ),
    SecretRule(
        r"""(?i)(?<![\w.-])(?:set-)?cookie['"]?[ \t]*:[ \t]*['"]?"""
        r"""([^\s=;'"]+=[^\s'"]{8,}(?: [^\s=;'"]+=[^\s'"]+)*)""",
        ("cookie",),
    ),
    # Temporary AWS credentials, Google's OAuth, Azure DevOps
    SecretRule(r"\bIQoJb3JpZ2luX2[A-Za-z0-9+/=]{40,}", ("iqojb3jpz2lux2",)),
    SecretRule(r"\bya29\.[A-Za-z0-9_-]{20,}", ("ya29.",)),
    SecretRule(r"\bGOCSPX-[A-Za-z0-9_-]{20,}", ("gocspx-",)),
    SecretRule(r"(?<![\w/])1//0[A-Za-z0-9_-]{30,}", ("1//0",)),
    SecretRule(r"\b[A-Za-z0-9]{40,80}AZDO[A-Za-z0-9]{4}\b", ("azdo",)),
    # Weights & Biases, Neptune, Kaggle, LangSmith, ZenML
    SecretRule(r"\bwandb[ \t]+login[ \t]+(?:--\S+[ \t]+)*([0-9a-f]{40})\b", ("wandb",)),
    SecretRule(r"\bwandb_v1_[A-Za-z0-9_-]{20,}", ("wandb_v1_",)),
    SecretRule(r"\beyJhcGlfYWRkcmVzcyI6[A-Za-z0-9+/=_-]{20,}", ("eyjhcglf",)),
    SecretRule(r""""username"[^}\r\n]{0,80}"key"[ \t]*:[ \t]*"([0-9a-f]{32})\"""", ('"username"',)),
    SecretRule(r"\bKGAT_[0-9a-f]{32}", ("kgat_",)),
    SecretRule(r"\blsv2_(?:pt|sk)_[0-9a-f]{32}_[0-9a-f]{10}", ("lsv2_",)),
    SecretRule(r"\bZEN(?:PRO)?KEY_[A-Za-z0-9]{20,}", ("zenkey_", "zenprokey_")),
    # Rented GPUs and models: Fireworks, RunPod, Modal, Lambda
    SecretRule(r"\bfw_(?=[A-Za-z]*[0-9])[A-Za-z0-9]{22,}\b", ("fw_",)),
    SecretRule(r"\brpa_[A-Za-z0-9]{30,}", ("rpa_",)),
    SecretRule(r"\ba[ks]-(?=[A-Za-z]*[0-9])[A-Za-z0-9]{22}\b", ("ak-", "as-")),
    SecretRule(r"\bsecret_[a-z0-9-]+_[A-Za-z0-9]{32}\.[A-Za-z0-9]{32,}", ("secret_",)),
    # Tailscale, Sentry, Notion, and the lines of a .netrc
    SecretRule(r"\btskey-[a-z]+-[A-Za-z0-9]+-[A-Za-z0-9]{16,}", ("tskey-",)),
    SecretRule(r"\bsntry[su]_[A-Za-z0-9+/=_-]{40,}", ("sntrys_", "sntryu_")),
    SecretRule(r"://([0-9a-f]{32})@[\w.-]*sentry", ("sentry",)),
    SecretRule(r"\bntn_[A-Za-z0-9]{40,}", ("ntn_",)),
    SecretRule(r"\blogin[ \t]+\S+[ \t]+password[ \t]+(\S{8,})", ("password",)),
    # A URL's password may itself hold an "@"; `$` begins a variable that stands for one.
    SecretRule(r"""(?<=://)[^\s/:@'"<>]*:[^\s/'"<>$]+(?=@[\w.\[-])""", ("://",)),
)

# Words of which every secret's name has one, as `looks_secret_name` has them.
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
class NamedValueRule(SecretRule):
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


__all__ = [
    "SHORTEST_SECRET",
    "PrivateKeys",
    "hide_secrets",
    "looks_secret_name",
    "looks_secret_value",
    "rule_set",
    "secret_values",
    "without",
]

SHORTEST_SECRET = 8
_HIDDEN = b"<hidden>"

_KEY_BEGINS = re.compile(
    rb"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|\bPrivate-Lines: [0-9]+"
)
_KEY_WORDS = (b"PRIVATE KEY", b"Private-Lines")  # looked for first: that is fast
_MAY_BEGIN = re.compile(rb"-----B|Private-L")
_KEY_ENDS = re.compile(rb"-----END|\bPrivate-MAC:")
_KEY_HEADER = re.compile(rb"[\s>+|'\"#-]*(?:Proc-Type|DEK-Info|Version|Comment|Hash): ")
_KEY_TEXT = re.compile(rb"(?:^[\s>+|'\"#-]*|[ \t:])([A-Za-z0-9+/=]+)(?:\\[nr])*['\",;\\ \t]*$")
_FULL_LINE = 40  # shorter ones stand at a key's end
_MOST_SHORT_LINES = 2
_MOST_LINES = 1000


@functools.cache
def rule_set() -> RuleSet:
    """Return all rules; made when first asked for."""
    return RuleSet.of([*OWN_RULES, *NAMED_VALUES, *betterleaks_rules()])


@dataclass
class PrivateKeys:
    """Find private keys of many lines, line by line: each key from its header to its end."""

    _lines_left: int = 0
    _short_lines: int = 0
    _has_prefixes: bool = False  # a logger's, before each line of the key

    @property
    def is_inside(self) -> bool:
        """Whether the next line may belong to a key."""
        return self._lines_left > 0

    def may_begin_at(self, line: bytes) -> int:
        """Return from where on a line that has not ended may be a key's; its length if nowhere."""
        if self.is_inside:
            return 0
        begins = _MAY_BEGIN.search(line)
        return begins.start() if begins else len(line)

    def find(self, data: bytes) -> list[Span]:
        """Return the spans of keys in the next lines."""
        spans: list[Span] = []
        at = 0
        if not self._lines_left and not any(word in data for word in _KEY_WORDS):
            return spans
        while at < len(data):
            if not self._lines_left:
                begins = _KEY_BEGINS.search(data, at)
                if begins is None:
                    break
                at = begins.start()
                self._lines_left, self._short_lines = _MOST_LINES, 0
                self._has_prefixes = False
                end, inside = _end_of_line(data, at), begins.end()
            else:
                end, inside = _end_of_line(data, at), at
            ends = _KEY_ENDS.search(data, inside, end)
            if ends is not None:
                spans.append((at, ends.start()))
                self._lines_left, at = 0, ends.end()
                continue
            span = (at, end) if inside > at else self._inside(data, at, end)
            if span is None:
                self._lines_left = 0
                continue
            self._lines_left -= 1
            spans.append(span)
            at = end + 1
        return [(start, end) for start, end in spans if start < end]

    def _inside(self, data: bytes, start: int, end: int) -> Span | None:
        """Return what of a line is the key's; None when the line is of something else."""
        line = data[start:end]
        if not line.strip(b" \t+>|") or _KEY_HEADER.match(line):
            return start, start
        text = _KEY_TEXT.search(line)
        if text is None:
            return None
        if len(text[1]) >= _FULL_LINE:
            self._has_prefixes = text.start() > 0
        else:
            self._short_lines += 1
            has_place = text.start() == 0 or self._has_prefixes
            if self._short_lines > _MOST_SHORT_LINES or not has_place:
                return None
        return start + text.start(1), start + text.end(1)


def without(data: bytes, spans: Iterable[Span], placeholder: bytes) -> bytes:
    """Return the data with each span replaced; spans may overlap."""
    shown: list[bytes] = []
    covered_to = 0
    for start, end in sorted(spans):
        if start >= covered_to:
            shown += data[covered_to:start], placeholder
        covered_to = max(covered_to, end)
    return b"".join((*shown, data[covered_to:]))


def looks_secret_value(text: str) -> bool:
    """Tell whether a text contains what looks like a token, a private key or a URL's password."""
    return bool(_spans(text.encode("utf-8", "surrogatepass")))


def hide_secrets(text: str) -> str:
    """Return the text with everything that looks like a secret replaced."""
    data = text.encode("utf-8", "surrogatepass")
    spans = _spans(data)
    return without(data, spans, _HIDDEN).decode("utf-8", "surrogatepass") if spans else text


def _spans(data: bytes) -> list[Span]:
    return PrivateKeys().find(data) + rule_set().find(data)


def _end_of_line(data: bytes, at: int) -> int:
    ends = (data.find(b"\n", at), data.find(b"\r", at))
    return min((end for end in ends if end >= 0), default=len(data))


def secret_values(environ: Mapping[str, str]) -> list[bytes]:
    """Return the values of secret-named variables, longest first, for redacting logs.

    Values under 8 characters are left out: they would blank ordinary words.
    """
    values = {
        value.encode("utf-8", "surrogateescape")
        for name, value in environ.items()
        if looks_secret_name(name) and len(value) >= SHORTEST_SECRET
    }
    return sorted(values, key=lambda value: (-len(value), value))

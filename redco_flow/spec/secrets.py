"""Recognise secrets by their names and by their looks, so that they are never stored or shown.

Pure text: reads no files. Standard library only, for supervisors redact logs with it too.
A secret is given by the name of an environment variable (`token_env: HF_TOKEN`), never by value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import pairwise

_SHORTEST_SECRET = 8
_HIDDEN = "<hidden>"

# A word of a name: HF_TOKEN, hfToken, api-key, APIKey all fall apart into words.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SECRET_WORD = re.compile(
    r"(?:api|auth|access)(?:key|token)|(?:secret|private)key|credentials?|pass(?:phrase|wd)"
    r"|(?:pg)?passwords?|pat|secrets?"
)
_SECRET_PAIRS = frozenset(
    [("api", "key"), ("access", "key"), ("private", "key"), ("secret", "key"), ("auth", "key")]
)
# Words that make "token" a piece of text: pad_token, token_id, max_tokens, tokens_per_second.
_TEXT_TOKEN_WORD = re.compile(
    r"additional|batch|begin|bos|budget|cls|count|decoder|dropout|embedding|end|eos|extra|forced"
    r"|generated|ids?|image|input|label|length|level|limit|loss|mask|max|mean|min|new|num|number"
    r"|output|pad|per|position|prefix|rate|ratio|second|sep|size|source|special|start|steps?"
    r"|suffix|target|text|total|types?|unk|vocab|vocabulary|weight|window"
)

_SECRET_VALUE = re.compile(
    r"""
      \bhf_[A-Za-z0-9]{16,}
    | \bsk-(?=[A-Za-z0-9_-]*[0-9])[A-Za-z0-9_-]{16,}
    | \bgh[pousr]_[A-Za-z0-9]{16,}
    | \bgithub_pat_[A-Za-z0-9_]{16,}
    | \bglpat-[A-Za-z0-9_-]{16,}
    | \bpnu_[A-Za-z0-9]{16,}
    | \bxox[abeprs]-[A-Za-z0-9-]{10,}
    | \b(?:AKIA|ASIA)[A-Z0-9]{12,}
    | \bAIza[A-Za-z0-9_-]{30,}
    | \beyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]*
    | -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----
    | (?<=://)[^\s/:@]+:[^\s/@]+(?=@)
    """,
    re.VERBOSE,
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
    if "token" in words or "tokens" in words:
        return not any(_TEXT_TOKEN_WORD.fullmatch(word) for word in words)
    return name.lower().endswith(("password", "passwd"))


def looks_secret_value(text: str) -> bool:
    """Tell whether a text contains what looks like a token, a private key or a URL's password."""
    return _SECRET_VALUE.search(text) is not None


def hide_secrets(text: str) -> str:
    """Return the text with everything that looks like a secret replaced."""
    return _SECRET_VALUE.sub(_HIDDEN, text)


def secret_values(environ: Mapping[str, str]) -> list[bytes]:
    """Return the values of secret-named variables, longest first, for redacting logs.

    Values under 8 characters are left out: they would blank ordinary words.
    """
    values = {
        value.encode("utf-8", "surrogateescape")
        for name, value in environ.items()
        if looks_secret_name(name) and len(value) >= _SHORTEST_SECRET
    }
    return sorted(values, key=lambda value: (-len(value), value))

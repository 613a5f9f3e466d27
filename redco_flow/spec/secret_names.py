"""Recognise secrets by their names: keys of a document, environment variables, headers."""

from __future__ import annotations

import re
from itertools import pairwise

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

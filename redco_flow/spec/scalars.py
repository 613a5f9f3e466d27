"""What a plain scalar means, by YAML 1.2's core rules made a little stricter.

`1e-4` is a float; `yes`, `no`, `on`, `off`, `1:30`, `12:30:00`, `010` and `1_000` are strings,
in files, on the command line and in environment variables alike. Also: which characters no
text of ours may contain.
"""

from __future__ import annotations

import math
import re

from redco_flow.spec.model import Scalar
from redco_flow.spec.wording import shown

_NULL = frozenset(("", "~", "null", "Null", "NULL"))
_BOOLEANS = {
    **dict.fromkeys(("true", "True", "TRUE"), True),
    **dict.fromkeys(("false", "False", "FALSE"), False),
}
_INTEGER = re.compile(r"[-+]?(?:0|[1-9][0-9]*)")
_OCTAL = re.compile(r"0o[0-7]+")
_HEXADECIMAL = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(
    r"[-+]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?",
)
_NOT_FINITE = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_LONGEST_NUMBER = 400

# C0 and C1 controls, line and paragraph separators, bidirectional overrides (text that shows
# other than it is), byte order marks, surrogates and non-characters.
_FORBIDDEN = (
    r"\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\ufffe\uffff"
)
FORBIDDEN_IN_FILES = re.compile(f"[{_FORBIDDEN}]")
FORBIDDEN_IN_VALUES = re.compile(f"[{_FORBIDDEN}\\r]")


def read_scalar(text: str) -> Scalar:
    """Return the value that an unquoted text stands for.

    Raises:
        ValueError: a number that is not finite, or does not fit in 64 bits.
    """
    if text in _NULL:
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _NOT_FINITE.fullmatch(text):
        raise ValueError(f"{text} is not a finite number; for text, put it in quotes")
    if len(text) <= _LONGEST_NUMBER:
        return _read_number(text)
    return text


def control_problem(text: str) -> str | None:
    """Say which control character stands in a value, or None; tabs and newlines are allowed."""
    found = FORBIDDEN_IN_VALUES.search(text)
    if found is None:
        return None
    return f"control character U+{ord(found.group()):04X} is not allowed in {shown(text)}"


def _read_number(text: str) -> Scalar:
    for pattern, base in ((_INTEGER, 10), (_OCTAL, 8), (_HEXADECIMAL, 16)):
        if pattern.fullmatch(text):
            number = int(text.removeprefix("0o").removeprefix("0x"), base)
            if not -(2**63) <= number < 2**63:
                raise ValueError(f"{shown(text)} does not fit in 64 bits; for text, quote it")
            return number
    if not _FLOAT.fullmatch(text):
        return text
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{shown(text)} is too large for a float; for text, put it in quotes")
    return value

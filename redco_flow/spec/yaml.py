"""Read and write YAML: plain values with the origin of each, or every mistake with its place.

A subset of YAML 1.2: mappings with text keys, lists, scalars, anchors and aliases. Refused, each
with line and column: duplicate keys, tags, merge keys, directives, several documents, recursive
aliases, control characters, and anything beyond the limits of size, depth and count. PyYAML scans
the text into events; everything else happens here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from redco_flow.errors import ConfigError, Problem
from redco_flow.spec.document import Document, KeyPath, Origin
from redco_flow.spec.names import shown

if TYPE_CHECKING:  # it brings pydantic, for which a reader of finished runs need not wait
    from redco_flow.spec.model import Scalar

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
    """Return the control character in a value, or None; tabs and newlines are allowed."""
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


MAX_BYTES = 1 << 20
MAX_LEVELS = 64
MAX_NODES = 20_000

_YAML_TAG = "tag:yaml.org,2002:"


def read_yaml(text: str, source: str) -> Document:
    """Read one YAML document.

    Raises:
        ConfigError: every mistake in the text; never any other exception.
    """
    document, problems = parse_yaml(text, source)
    if problems:
        raise ConfigError(problems)
    return document


def parse_yaml(text: str, source: str) -> tuple[Document, list[Problem]]:
    """Read one YAML document as far as possible; return it with the mistakes found."""
    reader = _Reader(source)
    document = Document(None, {(): Origin(source, 1, 1)})
    try:
        root = reader.compose(reader.clean(text))
        document = _flatten(root, reader) if root else document
    except _Unreadable as error:
        reader.problems.append(error.problem)
    return document, reader.problems


def parse_file(path: Path) -> tuple[Document, list[Problem]]:
    """Read a YAML file as far as possible; return it with the mistakes found."""
    source = Origin(str(path))
    empty = Document(None, {(): source})
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        return empty, [source.problem(f"cannot be read: {error.strerror}")]
    if len(content) > MAX_BYTES:
        return empty, [source.problem(_TOO_LARGE)]
    try:
        return parse_yaml(content.decode("utf-8"), str(path))
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        column = error.start - (content.rfind(b"\n", 0, error.start) + 1) + 1
        origin = Origin(str(path), line, column)
        return empty, [origin.problem("is not UTF-8 text; save the file as UTF-8")]


_TOO_LARGE = f"is larger than {MAX_BYTES >> 20} MiB, the limit for a configuration file"


class _Unreadable(Exception):
    """A mistake after which nothing more can be read."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.message)
        self.problem = problem


@dataclass
class _Node:
    """A scalar, a list or a mapping, where it begins; aliases share nodes."""

    origin: Origin
    value: Any = None
    items: list[_Node] | None = None
    entries: dict[str, tuple[Origin, _Node]] | None = None


@dataclass
class _Reader:
    """Turns PyYAML's events into nodes, collecting mistakes."""

    source: str
    problems: list[Problem] = field(default_factory=list)
    # The node of each anchor; None while it is still being read.
    anchors: dict[str, _Node | None] = field(default_factory=dict)
    num_nodes: int = 0

    def clean(self, text: str) -> str:
        """Check size and characters; return text that PyYAML's own reader will take."""
        if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
            raise _Unreadable(Origin(self.source).problem(_TOO_LARGE))
        text = text.removeprefix("\ufeff")
        for found in FORBIDDEN_IN_FILES.finditer(text):
            before = text[: found.start()]
            line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
            origin = Origin(self.source, line, column)
            code = f"U+{ord(found.group()):04X}"
            self.problems.append(origin.problem(f"control character {code} is not allowed"))
            if len(self.problems) >= 10:
                break
        return FORBIDDEN_IN_FILES.sub("\N{REPLACEMENT CHARACTER}", text) if self.problems else text

    def compose(self, text: str) -> _Node | None:
        """Read the one document of a text; None where it is empty."""
        events = self._events(text)
        root = None
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                if root is not None:
                    self._stop(event, "a second document begins here; one file is one document")
                if event.version or event.tags:
                    self._add(event, "directives (%YAML, %TAG) are not allowed; remove the line")
            elif isinstance(event, yaml.NodeEvent):
                root = self._node(event, events, level=1)
        return root

    def _events(self, text: str) -> Iterator[yaml.Event]:
        loader = None
        try:
            loader = yaml.SafeLoader(text)
            while loader.check_event():
                yield loader.get_event()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            raise self._unreadable(mark, _syntax_message(error, mark, text)) from error
        # PyYAML lets through what int() and chr() raise: "\UFFFFFFFF", %YAML 1.<5,000 digits>.
        except (yaml.YAMLError, ValueError, OverflowError, IndexError) as error:
            mark = loader.get_mark() if loader else None
            raise self._unreadable(mark, f"is not YAML: {shown(str(error))}") from error

    def _unreadable(self, mark: Any, message: str) -> _Unreadable:
        origin = (
            Origin(self.source, mark.line + 1, mark.column + 1) if mark else Origin(self.source)
        )
        return _Unreadable(origin.problem(message))

    def _node(self, event: yaml.NodeEvent, events: Iterator[yaml.Event], level: int) -> _Node:
        self.num_nodes += 1
        if level > MAX_LEVELS:
            self._stop(event, f"nested deeper than {MAX_LEVELS} levels")
        if self.num_nodes > MAX_NODES:
            self._stop(event, f"more than {MAX_NODES:,} values")
        if isinstance(event, yaml.AliasEvent):
            return self._alias(event)
        assert isinstance(event, yaml.ScalarEvent | yaml.CollectionStartEvent)
        node = _Node(self._origin(event))
        if event.anchor in self.anchors:
            self._add(event, f"anchor {shown(event.anchor)} is defined twice; rename one")
        if event.anchor:
            self.anchors[event.anchor] = None
        if event.tag is not None:
            tag = event.tag.replace(_YAML_TAG, "!!", 1)
            self._add(event, f"tag {shown(tag)} is not allowed; for text, use quotes")
        if isinstance(event, yaml.ScalarEvent):
            self._fill_scalar(node, event)
        elif isinstance(event, yaml.SequenceStartEvent):
            node.items = [self._node(item, events, level + 1) for item in _children(events)]
        else:
            node.entries = self._entries(events, level)
        if event.anchor:
            self.anchors[event.anchor] = node
        return node

    def _alias(self, event: yaml.AliasEvent) -> _Node:
        name = str(event.anchor)
        node = self.anchors.get(name)
        if node is not None:
            return node
        if name in self.anchors:
            self._add(event, f"alias {shown(name)} is recursive: it stands inside its own anchor")
        else:
            self._add(event, f"alias {shown(name)} has no anchor before it")
        return _Node(self._origin(event))

    def _fill_scalar(self, node: _Node, event: yaml.ScalarEvent) -> None:
        node.value = event.value
        problem = control_problem(event.value)
        if event.style is None and problem is None:
            try:
                node.value = read_scalar(event.value)
            except ValueError as error:
                problem = str(error)
        if problem:
            node.value = FORBIDDEN_IN_VALUES.sub("?", event.value)
            self._add(event, problem)

    def _entries(self, events: Iterator[yaml.Event], level: int) -> dict[str, tuple[Origin, _Node]]:
        entries: dict[str, tuple[Origin, _Node]] = {}
        for event in _children(events):
            key = self._key(event, events, level)
            value: Any = next(events)
            node = self._node(value, events, level + 1)
            if key in entries:
                first = entries[key][0].line
                self._add(event, f"duplicate key {shown(key)}; the first is in line {first}")
            elif key is not None:
                entries[key] = (self._origin(event), node)
        return entries

    def _key(self, event: yaml.NodeEvent, events: Iterator[yaml.Event], level: int) -> str | None:
        """Read a key; None where it is unusable (its value is still read, for its mistakes)."""
        if not isinstance(event, yaml.ScalarEvent):
            self._node(event, events, level + 1)
            self._add(event, "a key must be plain text, not a list, a mapping or an alias")
        elif event.value == "<<" and event.style is None:
            self._add(event, "merge keys (<<) are not allowed; write the keys out")
        elif not event.value:
            self._add(event, "a key is empty")
        elif event.tag is not None or event.anchor is not None:
            self._add(event, "a key cannot have a tag or an anchor")
        elif problem := control_problem(event.value):
            self._add(event, problem)
        else:
            # A key is text whatever it looks like: `on`, `1` and `null` are names here.
            return str(event.value)
        return None

    def _origin(self, event: yaml.Event) -> Origin:
        mark = event.start_mark
        assert mark is not None
        return Origin(self.source, mark.line + 1, mark.column + 1)

    def _add(self, event: yaml.Event, message: str) -> None:
        self.problems.append(self._origin(event).problem(message))

    def _stop(self, event: yaml.Event, message: str) -> None:
        raise _Unreadable(self._origin(event).problem(message))


def _children(events: Iterator[yaml.Event]) -> Iterator[Any]:
    """Yield the events that begin a collection's children, up to its end."""
    for event in events:
        if isinstance(event, yaml.CollectionEndEvent):
            return
        yield event


def _syntax_message(error: yaml.MarkedYAMLError, mark: Any, text: str) -> str:
    parts = [part for part in (error.context, error.problem) if part]
    message = "is not YAML: " + ", ".join(parts)
    lines = text.splitlines()
    line = lines[mark.line] if mark and mark.line < len(lines) else ""
    if "${" in line:
        message += "; inside [ ] or { }, put ${…} in quotes"
    elif "\t" in line:
        message += "; indent with spaces, not tabs"
    elif "character '@'" in message:
        message += '; put an alias in quotes: "@production"'
    return message


def _flatten(root: _Node, reader: _Reader) -> Document:
    """Return values and origins of a node tree, its aliases written out, within the limits."""
    origins: dict[KeyPath, Origin] = {}

    def write(node: _Node, origin: Origin, path: KeyPath) -> Any:
        origins[path] = origin
        if len(origins) > MAX_NODES:
            message = f"aliases make more than {MAX_NODES:,} values of it"
            raise _Unreadable(node.origin.problem(message))
        if len(path) >= MAX_LEVELS and (node.items or node.entries):
            raise _Unreadable(node.origin.problem(f"nested deeper than {MAX_LEVELS} levels"))
        if node.entries is not None:
            return {
                key: write(child, origin, (*path, key))
                for key, (origin, child) in node.entries.items()
            }
        if node.items is not None:
            return [write(item, item.origin, (*path, i)) for i, item in enumerate(node.items)]
        return node.value

    return Document(write(root, root.origin, ()), origins)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that our reader would take for something else."""


class _InlineDumper(_Dumper):
    """Also writes each text on one line."""


def write_yaml(values: Any) -> str:
    """Return values as YAML text: keys in their order, no aliases, unicode as it is."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def inline_yaml(value: Any) -> str:
    """Return a value as YAML on one line."""
    text = yaml.dump(
        [value],
        Dumper=_InlineDumper,
        sort_keys=False,
        allow_unicode=True,
        default_flow_style=True,
        width=math.inf,
    )
    return text.strip()[1:-1]


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if _is_read_as(text) else "'"
    style = '"' if "\n" in text and isinstance(dumper, _InlineDumper) else style
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _is_read_as(text: str) -> bool:
    try:
        return read_scalar(text) == text
    except ValueError:
        return False


_Dumper.add_representer(str, _text)
_Dumper.ignore_aliases = lambda self, data: True  # type: ignore[method-assign]

"""Names for checkpoints that move: `@quickstart/production` is whichever was promoted last.

An alias is one file, aliases/<model>/<alias>.json, with all that it ever named, the last one last:
what it names now is no second fact that could differ. Only `AliasStore.move` writes it, under a
kernel lock and by one rename, so it is whole however a promotion ends. Knows names and ids; whether
a checkpoint deserves its name is judged in `tracking.promotion`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from redco_flow.errors import DamagedRecord, UsageError
from redco_flow.records import digest_json, refuse_link, write_json
from redco_flow.tracking.locks import exclusive
from redco_flow.tracking.typed_records import find_record, unless_damaged
from redco_flow.tracking.workspace import Workspace, check_name

FORMAT = 2
_FIRST_WITH_DIGEST = 2
_MARK = "@"
_LAST_RUN = "@last"
_REMEDY = "Move it away; what it named is then promoted again by `redco-flow promote`."

EventKind = Literal["promoted", "rolled_back"]


@dataclass(frozen=True)
class AliasEvent:
    """One line of an alias's history.

    Args:
        event: promoted; or rolled_back, to what the alias named before.
        checkpoint: the id that the alias names from here on.
        time, by, host: when, for people, who, and on which machine.
        reason: why, in the person's words.
        metrics: the checkpoint's scores, as far as it was evaluated.
        comparisons: by what it was judged, one record for each condition.
        decision: the fingerprint of the stage that decided it; empty where a person did.
    """

    event: EventKind
    checkpoint: str
    time: str
    by: str
    host: str = ""
    reason: str = ""
    metrics: dict[str, float] = field(default_factory=dict)
    comparisons: list[dict[str, Any]] = field(default_factory=list)
    decision: str = ""


@dataclass(frozen=True)
class AliasRecord:
    """aliases/<model>/<alias>.json.

    Args:
        digest: of all the rest; records of format 1 have none.
    """

    model: str
    alias: str
    history: list[AliasEvent]
    format: int = FORMAT
    digest: str = ""

    def computed_digest(self) -> str:
        """Return the digest that the record should have."""
        record = asdict(self)
        for event in record["history"]:  # as they are read back
            event["metrics"] = {name: float(score) for name, score in event["metrics"].items()}
        return digest_json({key: value for key, value in record.items() if key != "digest"})


@dataclass(frozen=True)
class AliasName:
    """`@MODEL/ALIAS`; the model is a pipeline's name."""

    model: str
    alias: str

    def __post_init__(self) -> None:
        check_name(self.model, "model name")
        check_name(self.alias, "alias")
        if self.alias == _LAST_RUN[1:] or self.model == _LAST_RUN[1:]:
            raise UsageError(f"'{self}': @last is the last run; choose another name.")

    def __str__(self) -> str:
        return f"{_MARK}{self.model}/{self.alias}"

    @classmethod
    def parse(cls, text: str, model: str) -> AliasName:
        """Read `production`, `@production` or `@quickstart/production`.

        Args:
            model: the one that is meant where the text names none.

        Raises:
            UsageError: it is no name.
        """
        first, slash, rest = text.removeprefix(_MARK).partition("/")
        return cls(first, rest) if slash else cls(model, first)


@dataclass(frozen=True)
class Alias:
    """One alias and all that it named."""

    name: AliasName
    history: tuple[AliasEvent, ...]

    @property
    def current(self) -> AliasEvent:
        """The event by which it names what it names now."""
        return self.history[-1]

    @property
    def checkpoint(self) -> str:
        """The id of the artifact that it names."""
        return self.current.checkpoint

    @property
    def previous(self) -> str:
        """The checkpoint that a rollback leads to; empty where there is none.

        Rollbacks undo promotions one after the other: the second one goes a further step back.
        """
        standing = _standing(self.history)
        return standing[-2] if len(standing) > 1 else ""


def _standing(history: tuple[AliasEvent, ...]) -> list[str]:
    """The checkpoints whose promotion was not undone, the present one last."""
    standing: list[str] = []
    for one in history:
        if one.event == "promoted":
            standing.append(one.checkpoint)
        else:
            standing.pop()
    return standing


class AliasMoved(UsageError):
    """The alias was moved by another process since it was looked at; nothing was written."""


class AliasStore:
    """The aliases of one workspace."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._root = workspace.aliases

    def find(self, name: AliasName) -> Alias | None:
        """Return the alias, or None where nothing was promoted under this name.

        Raises:
            DamagedRecord: its file is damaged.
        """
        record = find_record(self._path(name), AliasRecord, remedy=_REMEDY)
        return None if record is None else _checked(record, name, self._path(name))

    def by_artifact(self) -> dict[str, tuple[Alias, ...]]:
        """Return the aliases that name an artifact now, by its id."""
        found: dict[str, tuple[Alias, ...]] = {}
        for alias in self._each():
            found[alias.checkpoint] = (*found.get(alias.checkpoint, ()), alias)
        return found

    def list(self, model: str = "") -> list[Alias]:
        """Return all aliases, or one model's, by name; a damaged one is said and left out."""
        return list(self._each(model))

    def get(self, text: str, model: str = "") -> Alias:
        """Return the alias that `@production` or `@quickstart/production` names.

        Args:
            model: the one that is meant where the text names none; empty: the only one that has it.

        Raises:
            UsageError: there is none of this name, or there are several; lists them.
            DamagedRecord: its file is damaged.
        """
        word = text.removeprefix(_MARK)
        if model or "/" in word:
            found = self.find(AliasName.parse(text, model))
            fitting = [found] if found else []
        else:
            fitting = [one for one in self.list() if one.name.alias == word]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            listed = ", ".join(str(one.name) for one in fitting)
            raise UsageError(f"{text!r} is an alias of {len(fitting)} models: {listed}. Say which.")
        known = ", ".join(str(one.name) for one in self.list()) or "none"
        raise UsageError(
            f"nothing was promoted as {text!r} in {self._workspace.root}; aliases: {known}. "
            "`redco-flow promote CHECKPOINT --as NAME` makes one."
        )

    def move(self, name: AliasName, event: AliasEvent, *, after: Alias | None) -> Alias:
        """Have an alias name a checkpoint from now on.

        Args:
            after: the alias as it was looked at; None: there was none.

        Raises:
            AliasMoved: it is not as it was looked at.
            OSError: the disk is full or read-only; names the path, and the alias is as it was.
        """
        path = self._path(name)
        for folder in (self._root, path.parent):
            refuse_link(folder)
            folder.mkdir(parents=True, exist_ok=True)
        with exclusive(path.with_name(f".{name.alias}.lock")) as held:
            for left_over in path.parent.glob(f".{path.name}.*.tmp"):
                left_over.unlink()  # its writer was killed: the lock is ours
            present = self.find(name)
            if present != after:
                now = present.checkpoint[:12] if present else "nothing"
                raise AliasMoved(
                    f"{name} was moved by another process meanwhile, and names {now} now; "
                    "nothing was changed. Look at `redco-flow aliases`, and decide again."
                )
            history = (*(present.history if present else ()), event)
            record = AliasRecord(name.model, name.alias, list(history))
            held.check()
            write_json(path, asdict(replace(record, digest=record.computed_digest())))
        return Alias(name, history)

    def _path(self, name: AliasName) -> Path:
        return self._root / name.model / f"{name.alias}.json"

    def all(self) -> Iterator[Alias]:
        """Yield all aliases.

        Raises:
            DamagedRecord: the file of one is damaged.
        """
        yield from filter(None, map(self.find, self._names()))

    def _each(self, model: str = "") -> Iterator[Alias]:
        for name in self._names(model):
            if (found := unless_damaged(partial(self.find, name))) is not None:
                yield found

    def _names(self, model: str = "") -> Iterator[AliasName]:
        folder = check_name(model, "model name") if model else "*"
        for path in sorted(self._root.glob(f"{folder}/[!.]*.json")):
            with suppress(UsageError):  # no file of ours
                yield AliasName(path.parent.name, path.stem)


def _checked(record: AliasRecord, name: AliasName, path: Path) -> Alias:
    """The alias of a record."""
    if (record.digest or record.format >= _FIRST_WITH_DIGEST) and (
        record.digest != record.computed_digest()
    ):
        raise DamagedRecord(path, "its content does not have its digest", _REMEDY)
    if (record.model, record.alias) != (name.model, name.alias):
        raise DamagedRecord(path, f"it is that of @{record.model}/{record.alias}", _REMEDY)
    alias = Alias(name, tuple(record.history))
    try:
        is_consistent = bool(alias.history) and _standing(alias.history)[-1] == alias.checkpoint
    except IndexError:
        is_consistent = False
    if not is_consistent:
        raise DamagedRecord(path, "its last event does not follow from those before", _REMEDY)
    return alias


def is_alias(text: str) -> bool:
    """Say whether a word of the command line names a checkpoint by an alias."""
    return text.startswith(_MARK) and text.partition("/")[0] != _LAST_RUN


def artifact_id_of(workspace: Workspace, text: str) -> str:
    """Return the id that an alias names; what is no alias is returned as it stands.

    Raises:
        UsageError: there is no such alias, or there are several.
    """
    return AliasStore(workspace).get(text).checkpoint if is_alias(text) else text

"""Resolve references between stages: the source of each input, and the order of stages.

An input that takes a checkpoint may instead name one that was promoted, `@production`, the id of
one, at least its first 12 digits, or that of a run, `RUN` or `RUN/STAGE`.

`STAGE`, `STAGE/SELECTOR`, or `SELECTOR` alone where one stage only produces that kind; where
nothing is written, that one stage. The same graph in the same order always gives the same answer.
"""

from __future__ import annotations

import difflib
import heapq
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from redco_flow.spec.model import NAME_PATTERN, known_keys
from redco_flow.spec.names import listed, nearest, shown
from redco_flow.spec.stage_kind import InputSlot, StageConfig
from redco_flow.spec.stages import StageBody, Stages

LAST = "@last"
"""Of an optional input: the checkpoint that this stage itself published last."""

_ALIASED_KIND = "checkpoint"
_ARTIFACT = re.compile(r"[0-9a-f]{12,64}")
_ID_DIGITS = 64
# A run's id is its pipeline's name and six letters or digits.
_RUN = re.compile(rf"{NAME_PATTERN[1:-1]}-[a-hjkmnp-z2-9]{{6}}(?:/.+)?")
_ALIAS = re.compile(
    rf"(?P<alias>@(?:{NAME_PATTERN[1:-1]}/)?{NAME_PATTERN[1:-1]})(?:@(?P<artifact>[0-9a-f]{{64}}))?"
)


@dataclass(frozen=True)
class InputRef:
    """One output of a stage, `checkpoint/best/rouge2` of `train`, or what an alias names.

    Args:
        stage: empty of an alias, an artifact's id and another run's output.
        alias: `@production` or `@quickstart/production`, an id or its first digits, or `RUN/STAGE`;
            empty of a stage's output.
        artifact: the id of the artifact that `alias` names; empty until the run is planned.
    """

    stage: str
    output: str
    alias: str = ""
    artifact: str = ""

    def text(self) -> str:
        """Return the reference as it is written in YAML: `train/best/rouge2`.

        The artifact of an alias follows it: `@quickstart/production@DIGEST`.
        """
        if self.alias:
            is_pinned = self.artifact and self.artifact != self.alias
            return f"{self.alias}@{self.artifact}" if is_pinned else self.alias
        _, slash, selector = self.output.partition("/")
        return f"{self.stage}{slash}{selector}"


@dataclass(frozen=True)
class References:
    """Resolves references among the stages of one pipeline.

    Args:
        configs: of the stages that are valid; without its Config a stage's outputs are not
            known, and any selector is let pass.
    """

    stages: Stages
    configs: Mapping[str, StageConfig]

    @property
    def bodies(self) -> Mapping[str, StageBody]:
        """Return the stages whose kinds exist."""
        return self.stages.bodies

    def resolve(self, stage: str, slot_name: str) -> tuple[InputRef, ...]:
        """Return what a stage's input slot takes; nothing where a broken stage may be meant.

        Raises:
            ValueError: nothing, several, or something impossible is meant.
        """
        body = self.bodies[stage]
        slot = body.kind.inputs[slot_name]
        given = body.references.get(slot_name)
        if given is None:
            return () if body.may_lack(slot) else self._unwritten(body, slot_name, slot)
        if not slot.kind and isinstance(given, str) and not self._is_broken(given):
            slot, given = self._of_any_kind(body, slot_name, given)
        texts = given if slot.many and isinstance(given, list) else [given]
        if not texts or not all(isinstance(text, str) and text for text in texts):
            wanted = "a list of references" if slot.many else "one reference (STAGE/SELECTOR)"
            if slot.options:
                options = ", ".join(f"{option}: …" for option in slot.options)
                wanted += f" or {{{slot.kind}: REFERENCE, {options}}}"
            raise ValueError(f"'{slot_name}' of stage '{stage}' must be {wanted}")
        texts = [text for text in texts if not self._is_broken(text)]
        found = tuple(self._written(body, slot_name, slot, text) for text in texts)
        if len(set(found)) < len(found):
            raise ValueError(f"'{slot_name}' of stage '{stage}' names the same output twice")
        return found

    def _unwritten(self, body: StageBody, slot_name: str, slot: InputSlot) -> tuple[InputRef, ...]:
        if self.stages.broken:
            return ()
        producers = self._producers(slot.kind, body.name)
        if slot.many:
            producers = [p for p in producers if self.bodies[p].kind.name != body.kind.name]
        if not producers:
            raise ValueError(
                f"stage '{body.name}' needs '{slot_name}' ({slot.kind}), and no other stage "
                f"produces that; add a stage that does"
            )
        if len(producers) > 1 and not slot.many:
            raise ValueError(self._ambiguous(body, slot_name, slot, producers))
        return tuple(self._ref(body, slot_name, slot, producer, None) for producer in producers)

    def _written(self, body: StageBody, slot_name: str, slot: InputSlot, text: str) -> InputRef:
        if text.startswith("@"):
            return _aliased(f"'{slot_name}' of stage '{body.name}'", slot, text)
        named = [name for name in self.bodies if _is_of(text, name)]
        if named:
            producer = max(named, key=len)
            selector = text[len(producer) + 1 :] or None
            return self._ref(body, slot_name, slot, producer, selector)
        if slot.kind == _ALIASED_KIND and _is_published(text):
            is_full_id = len(text) == _ID_DIGITS and _ARTIFACT.fullmatch(text)
            return InputRef("", _ALIASED_KIND, text, text if is_full_id else "")
        producers = self._producers(slot.kind, body.name)
        misspelt = difflib.get_close_matches(text.split("/")[0], self.bodies, n=1, cutoff=0.75)
        if len(producers) == 1 and not misspelt:
            return self._ref(body, slot_name, slot, producers[0], text)
        hint = nearest(text.split("/")[0], self.bodies)
        message = f"'{slot_name}' of stage '{body.name}': there is no stage {shown(text)}{hint} "
        if len(producers) > 1:
            message += (
                f"Stages that produce {slot.kind}: {listed(producers)}; write STAGE/SELECTOR."
            )
        else:
            message += f"Stages: {listed(self.bodies)}."
        raise ValueError(message)

    def _of_any_kind(self, body: StageBody, slot_name: str, text: str) -> tuple[InputSlot, str]:
        """Return the slot for the kind of artifact that `STAGE/KIND/SELECTOR` means."""
        where = f"'{slot_name}' of stage '{body.name}'"
        producer = max((name for name in self.bodies if _is_of(text, name)), key=len, default=None)
        if text.startswith("@") or (producer is None and _is_published(text)):
            return InputSlot(_ALIASED_KIND), text
        if producer is None:
            raise ValueError(
                f"{where}: there is no stage {shown(text)}, and no such file"
                f"{nearest(text.partition('/')[0], self.bodies)} Stages: {listed(self.bodies)}."
            )
        kind = self.bodies[producer].kind
        kinds = sorted(set(kind.outputs.values()))
        first, _, selector = text[len(producer) + 1 :].partition("/")
        if first in kinds:
            chosen, text = first, f"{producer}/{selector}".rstrip("/")
        elif len(kinds) == 1:
            chosen = kinds[0]
        else:
            which = f"{listed(kinds)}; say which, as {producer}/NAME" if kinds else "nothing"
            raise ValueError(f"{where}: stage '{producer}' makes {which}")
        default_selector = "" if kind.output_names is None else "last"
        return InputSlot(chosen, default_selector=default_selector), text

    def _ref(
        self,
        body: StageBody,
        slot_name: str,
        slot: InputSlot,
        producer: str,
        selector: str | None,
    ) -> InputRef:
        """Return the reference if the producer has that output."""
        where = f"'{slot_name}' of stage '{body.name}'"
        if producer == body.name:
            raise ValueError(f"{where} takes the stage's own output; name another stage")
        declared = self.bodies[producer].kind.outputs
        if slot.kind not in declared.values():
            raise ValueError(
                f"{where} takes {slot.kind}, but stage '{producer}' produces "
                f"{listed(sorted(set(declared.values())))}; stages that produce {slot.kind}: "
                f"{listed(self._producers(slot.kind, body.name))}"
            )
        chosen = slot.default_selector if selector is None else selector
        output = f"{slot.kind}/{chosen}" if chosen else slot.kind
        known = self._known_outputs(producer, slot)
        if known is None or output in known:
            return InputRef(producer, output)
        if selector is None and slot.kind in known:
            return InputRef(producer, slot.kind)
        selectors = [name.partition("/")[2] for name in known if name.startswith(f"{slot.kind}/")]
        hint = nearest(chosen, selectors)
        cure = self._how_to_keep(producer, chosen) if hint == "." else ""
        raise ValueError(
            f"{where}: stage '{producer}' has no output {shown(output)}{hint} Its outputs: "
            f"{listed(known)}.{cure}"
        )

    def _how_to_keep(self, producer: str, selector: str) -> str:
        """Say which setting of a training makes `best/SCORE`; empty of any other output."""
        best, _, score = selector.partition("/")
        body = self.bodies[producer]
        if (
            best != "best"
            or not score
            or "best" not in (known_keys(body.kind.config_type, ("keep",)) or ())
        ):
            return ""
        written = body.config.get(("keep", "best"), [])
        kept = [*([written] if isinstance(written, str) else written), score]
        return f" To keep it, add `keep: {{best: [{', '.join(kept)}]}}` to stage '{producer}'."

    def _known_outputs(self, producer: str, slot: InputSlot) -> Sequence[str] | None:
        """Return a stage's outputs; None where only the running stage will know them."""
        kind = self.bodies[producer].kind
        if kind.output_names is None:
            return None if slot.default_selector else list(kind.outputs)
        config = self.configs.get(producer)
        return None if config is None else kind.output_names(config)

    def _is_broken(self, text: str) -> bool:
        return any(_is_of(text, name) for name in self.stages.broken)

    def _producers(self, kind: str, consumer: str) -> list[str]:
        return [
            name
            for name, body in self.bodies.items()
            if name != consumer and kind in body.kind.outputs.values()
        ]

    def _ambiguous(
        self, body: StageBody, slot_name: str, slot: InputSlot, producers: Sequence[str]
    ) -> str:
        return (
            f"stage '{body.name}' needs one {slot.kind}, and several stages produce one: "
            f"{listed(producers)}; choose with `{slot_name}: {producers[0]}` or "
            f"`{slot_name}: {producers[0]}/SELECTOR`"
        )


def _aliased(where: str, slot: InputSlot, text: str) -> InputRef:
    """Return the reference to a checkpoint that was promoted."""
    if slot.kind != _ALIASED_KIND:
        raise ValueError(
            f"{where} takes {slot.kind}, and {shown(text)} is an alias, which names a "
            f"{_ALIASED_KIND}; write STAGE or STAGE/SELECTOR."
        )
    found = _ALIAS.fullmatch(text)
    if found is None:
        raise ValueError(
            f"{where}: {shown(text)} is no alias; write @ALIAS or @PIPELINE/ALIAS, such as "
            "@production."
        )
    if found["alias"] == LAST and not slot.is_optional:
        raise ValueError(f"{where}: {LAST} is for `start_from`; name a stage or an alias.")
    return InputRef("", _ALIASED_KIND, found["alias"], found["artifact"] or "")


def _is_published(text: str) -> bool:
    """Whether a reference is an artifact's id, or an output of another run."""
    return bool(_ARTIFACT.fullmatch(text) or _RUN.fullmatch(text))


def _is_of(text: str, stage: str) -> bool:
    """Whether a reference is to this stage, or to an output of it."""
    return text == stage or text.startswith(f"{stage}/")


def order_of(names: Sequence[str], upstream: Mapping[str, set[str]]) -> list[str]:
    """Return the names so that each comes after those it needs; else in the given order.

    Names in a circle, or that need one in a circle, are left out.
    """
    order = {name: index for index, name in enumerate(names)}
    missing = {name: len(upstream[name]) for name in names}
    downstream: dict[str, list[str]] = {name: [] for name in names}
    for name in names:
        for needed in upstream[name]:
            downstream[needed].append(name)
    ready = [order[name] for name in names if not missing[name]]
    ordered = []
    while ready:
        name = names[heapq.heappop(ready)]
        ordered.append(name)
        for waiting in downstream[name]:
            missing[waiting] -= 1
            if not missing[waiting]:
                heapq.heappush(ready, order[waiting])
    return ordered


def cycles_of(names: Sequence[str], upstream: Mapping[str, set[str]]) -> list[list[str]]:
    """Return circles of names, each begun by its first; none shares a name with another."""
    ordered = set(order_of(names, upstream))
    left = [name for name in names if name not in ordered]
    cycles = []
    while left:
        path = [left[0]]
        while True:
            needed = next((name for name in left if name in upstream[path[-1]]), None)
            if needed is None:
                left = [name for name in left if name != path[-1]]
                break
            if needed in path:
                cycle = path[path.index(needed) :]
                start = cycle.index(min(cycle, key=names.index))
                cycles.append([*cycle[start:], *cycle[:start]])
                left = [name for name in left if name not in cycle]
                break
            path.append(needed)
    return cycles

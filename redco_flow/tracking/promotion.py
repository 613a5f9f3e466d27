"""Judge one condition of a promotion: is the checkpoint really better?

Better than another checkpoint means: measured on the same rows by the same code, by at least the
gain that is asked for, and with the paired bootstrap's interval of that gain above 0.
"""

from __future__ import annotations

import logging
import os
import re
from dataclasses import dataclass
from typing import Any, Literal

from redco_flow.errors import ArtifactError, RedcoFlowError, UsageError
from redco_flow.tracking.aliases import (
    Alias,
    AliasEvent,
    AliasMoved,
    AliasName,
    AliasStore,
    EventKind,
)
from redco_flow.tracking.artifacts import Artifact, ArtifactStore
from redco_flow.tracking.deletions import find_deletion, refuse_deleted
from redco_flow.tracking.evaluations import (
    evaluations_of,
    scores_of,
    why_not_comparable,
    why_partial,
)
from redco_flow.tracking.locks import exclusive
from redco_flow.tracking.metrics_artifact import MetricsSummary, read_metrics
from redco_flow.tracking.mlflow_server import mirror_alias
from redco_flow.tracking.paired_bootstrap import Evaluation, compared, draw_scores, why_not_compared
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.results import read_result
from redco_flow.tracking.run_metrics import training_metric
from redco_flow.tracking.workspace import Workspace, user_name

_CONDITION = re.compile(r"\s*(?P<key>[^\s<>=]+)\s*(?P<sign>[<>])\s*(?P<than>[^\s<>=]+)\s*")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")

_NUM_RESAMPLES = 10_000
_SEED = 0

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Condition:
    """`rougeL > production`, `perplexity < @other/production`, `exact_match > 80`.

    Args:
        key: the score.
        sign: `>` where the metric's larger scores are better, else `<`.
        than: an alias, or a number.
    """

    key: str
    sign: Literal[">", "<"]
    than: str | float

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read a condition.

        Raises:
            UsageError: it is none; says what one looks like.
        """
        found = _CONDITION.fullmatch(text)
        if found is None:
            raise UsageError(
                f"{text!r} is no condition: write METRIC > ALIAS or METRIC < ALIAS, with a number "
                "in the alias's place if you like, such as 'rougeL > production'."
            )
        than = found["than"]
        value = float(than) if _NUMBER.fullmatch(than) else than
        return cls(found["key"], ">" if found["sign"] == ">" else "<", value)

    def __str__(self) -> str:
        than = f"{self.than:g}" if isinstance(self.than, float) else self.than
        return f"{self.key} {self.sign} {than}"


@dataclass(frozen=True)
class PromotionRule:
    """The conditions of a promotion.

    Args:
        conditions: all of them have to hold.
        min_gain: how much better each score has to be, in the metric's own unit.
        confidence: of the bootstrap's interval of a gain over another checkpoint, which must lie
            above 0.
    """

    conditions: tuple[Condition, ...] = ()
    min_gain: float = 0.0
    confidence: float = 0.95

    def __post_init__(self) -> None:
        if not self.min_gain >= 0:  # not a number either
            raise UsageError(f"min-gain is {self.min_gain:g}; a gain is 0 or more.")
        if not 0 < self.confidence < 1:
            raise UsageError(f"confidence is {self.confidence:g}; it is between 0 and 1.")


class NotPromoted(RedcoFlowError):
    """A condition does not hold, or cannot be judged; the alias is as it was."""


def refuse_damage(workspace: Workspace, artifact: Artifact) -> None:
    """Read an artifact whole and compare its digests.

    Raises:
        ArtifactError: a byte is not what was published.
    """
    refuse_deleted(workspace, artifact)
    if problems := ArtifactStore(workspace).verify(artifact.id):
        raise ArtifactError(
            f"{artifact.kind} {artifact.short_id} is damaged, and no alias was moved: "
            f"{'; '.join(problems)}. A new run of its pipeline makes it again."
        )


@dataclass(frozen=True)
class PromotionCandidate:
    """One checkpoint that is to take an alias over.

    Args:
        name: the alias.
    """

    workspace: Workspace
    checkpoint: Artifact
    name: AliasName
    rule: PromotionRule

    def records(self) -> list[dict[str, Any]]:
        """Return by what the checkpoint is promoted: a record for each condition; all hold.

        Raises:
            NotPromoted: a condition does not hold or cannot be judged; says which and why.
            ArtifactError: an evaluation is damaged.
            UsageError: a condition names an alias that there is not, or the wrong direction.
        """
        return [self._record(condition) for condition in self.rule.conditions]

    def _record(self, condition: Condition) -> dict[str, Any]:
        if isinstance(condition.than, float):
            return self._against_number(condition, condition.than)
        name = AliasName.parse(condition.than, self.name.model)
        rival = AliasStore(self.workspace).find(name)
        if rival is not None:
            return self._against_alias(condition, rival)
        if name == self.name:  # the first of its name has none to be better than
            if evaluations_of(self.workspace, self.checkpoint.id):  # a misspelt score is refused
                self._evaluations(condition.key, self.checkpoint.id, "the checkpoint")
            return {"condition": str(condition), "than": str(name), "is_first": True}
        raise UsageError(
            f"'{condition}': nothing was promoted as {name}; `redco-flow aliases` lists what "
            "there is."
        )

    def _against_number(self, condition: Condition, number: float) -> dict[str, Any]:
        found = self._evaluations(condition.key, self.checkpoint.id, "the checkpoint")
        whole = [one for one in found if not why_partial(self.workspace, one)]
        if not whole:
            raise NotPromoted(why_partial(self.workspace, found[0]))
        refuse_damage(self.workspace, whole[0])
        summary, _ = read_metrics(whole[0].path)
        score = summary.metrics[condition.key]
        gain = _gain(condition, summary, score - number)
        self._refuse_small(condition, score, f"{number:g}", gain)
        return {
            "condition": str(condition),
            "metrics_artifact": whole[0].id,
            "score": score,
            "gain": gain,
        }

    def _against_alias(self, condition: Condition, rival: Alias) -> dict[str, Any]:
        ours, theirs = self._comparable_pair(condition.key, rival)
        for one in (ours, theirs):
            refuse_damage(self.workspace, one)
        first = Evaluation("the checkpoint", ours.id, *read_metrics(ours.path))
        second = Evaluation(str(rival.name), theirs.id, *read_metrics(theirs.path))
        found = self._compared(condition, first, second)
        other = f"{rival.name}'s {found['than_score']:.4g}"
        self._refuse_small(condition, found["score"], other, found["gain"])
        if found["low"] <= 0:
            raise NotPromoted(
                f"{condition.key} {found['score']:.4g} is better than {other} by "
                f"{found['gain']:.4g}, but the {self.rule.confidence:.0%} interval of that gain, "
                f"{found['low']:.4g} to {found['high']:.4g}, holds 0: on other rows there may be "
                "no gain. Evaluate on more rows, or ask for less confidence."
            )
        return {
            "condition": str(condition),
            "than": str(rival.name),
            "than_checkpoint": rival.checkpoint,
            "metrics_artifact": ours.id,
            "than_metrics_artifact": theirs.id,
            **found,
        }

    def _compared(
        self, condition: Condition, first: Evaluation, second: Evaluation
    ) -> dict[str, Any]:
        """Both scores, the gain, and its interval."""
        key, confidence = condition.key, self.rule.confidence
        if why := why_not_compared((first, second), key):
            raise NotPromoted(f"{why}: significance cannot be tested.")
        draws = draw_scores((first, second), [key], num_resamples=_NUM_RESAMPLES, seed=_SEED)
        found = compared(first, second, key, draws, confidence)
        ends = [_gain(condition, first.summary, found[end]) for end in ("low", "high")]
        return {
            "score": found["first_score"],
            "than_score": found["second_score"],
            "gain": _gain(condition, first.summary, found["difference"]),
            "low": min(ends),
            "high": max(ends),
            "confidence": confidence,
            "num_examples": sum(key in line["scores"] for line in first.lines),
        }

    def _refuse_small(self, condition: Condition, score: float, other: str, gain: float) -> None:
        least, key = self.rule.min_gain, condition.key
        if gain <= 0:
            raise NotPromoted(f"{key} {score:.4g} is no better than {other} (gain {gain:.4g}).")
        if gain < least:
            raise NotPromoted(
                f"{key} {score:.4g} is better than {other} by {gain:.4g}, and the gain has to be "
                f"at least {least:g}."
            )

    def _evaluations(self, key: str, checkpoint_id: str, whose: str) -> list[Artifact]:
        """The evaluations of a checkpoint that have the score, the latest first."""
        found = evaluations_of(self.workspace, checkpoint_id)
        fitting = [one for one in found if key in scores_of(one)]
        fitting.sort(key=lambda one: find_deletion(one) is not None)  # deleted ones last
        if fitting:
            return fitting
        others = dict.fromkeys(name for one in found for name in scores_of(one))
        known = f"its scores: {', '.join(others)}" if others else "it was never evaluated"
        checkpoint = ArtifactStore(self.workspace).find(checkpoint_id)
        measured = checkpoint.metadata.get("metrics") or {} if checkpoint is not None else {}
        if key.removeprefix("val/") in measured:
            name = training_metric(key.removeprefix("val/"))
            known += f"; {name} was measured by its training, and a promotion needs an evaluation"
        raise NotPromoted(
            f"{whose} ({checkpoint_id[:12]}) has no score '{key}' ({known}). {_how_to(self.name)}"
        )

    def _comparable_pair(self, key: str, rival: Alias) -> tuple[Artifact, Artifact]:
        """Evaluations of both that can be compared, the latest there are."""
        ours = self._evaluations(key, self.checkpoint.id, "the checkpoint")
        theirs = self._evaluations(key, rival.checkpoint, str(rival.name))
        pairs = [(one, other) for one in ours for other in theirs]
        for one, other in pairs:
            if not why_not_comparable(self.workspace, one, other, key):
                return one, other
        why = why_not_comparable(self.workspace, *pairs[0], key)
        raise NotPromoted(f"{why} {_how_to(rival.name)}")


def _gain(condition: Condition, summary: MetricsSummary, difference: float) -> float:
    """A difference to something else as a gain: positive is better, whatever the metric."""
    is_larger_better = summary.directions.get(condition.key, "max") == "max"
    sign, better = (">", "larger") if is_larger_better else ("<", "smaller")
    if condition.sign != sign:
        raise UsageError(
            f"'{condition}': {condition.key} is better where it is {better}; write "
            f"'{condition.key} {sign} …'."
        )
    return difference if is_larger_better else -difference


def _how_to(name: AliasName) -> str:
    return (
        "Evaluate both in one pipeline, on all rows: for the other one a predict stage with "
        f'`checkpoint: "{name}"` and an evaluate stage.'
    )


@dataclass(frozen=True)
class PromotionRequest:
    """A promotion that is asked for.

    Args:
        name: the alias.
        reason: why, in the person's words.
        decision: the fingerprint of the stage that asks; empty for a person.
    """

    checkpoint: Artifact
    name: AliasName
    rule: PromotionRule
    reason: str = ""
    decision: str = ""


def promote(workspace: Workspace, request: PromotionRequest) -> Alias:
    """Have an alias name a checkpoint.

    Returns:
        The alias; as it was where it names this checkpoint, or was moved by this decision before.

    Raises:
        NotPromoted: a condition does not hold or cannot be judged; says which and why.
        ArtifactError: the checkpoint, or an evaluation of it, is damaged.
        UsageError: a condition names an alias that there is not, or the wrong direction.
        OSError: the disk is full or read-only; names the path, and the alias is as it was.
    """
    store, checkpoint = AliasStore(workspace), request.checkpoint
    refuse_damage(workspace, checkpoint)
    while True:
        present = store.find(request.name)
        if present is not None and _is_done(request, present):
            return present
        judged = PromotionCandidate(workspace, checkpoint, request.name, request.rule).records()
        event = _event(
            workspace,
            "promoted",
            checkpoint,
            request.reason,
            comparisons=judged,
            decision=request.decision,
        )
        try:
            moved = _move(workspace, request.name, event, present)
        except AliasMoved:
            continue  # the checkpoint has to be better than what was promoted meanwhile
        return _mirrored(workspace, moved)


def _is_done(request: PromotionRequest, present: Alias) -> bool:
    """Whether the alias names the checkpoint, or did by this decision: then it moved since."""
    decided = {event.decision for event in present.history} - {""}
    return present.checkpoint == request.checkpoint.id or request.decision in decided


def roll_back(workspace: Workspace, alias: Alias, reason: str = "") -> Alias:
    """Have an alias name again what it named before.

    Raises:
        UsageError: it named nothing before, or was moved meanwhile.
        ArtifactError: what it named is gone or damaged.
        OSError: the disk is full or read-only; names the path, and the alias is as it was.
    """
    if not alias.previous:
        raise UsageError(
            f"{alias.name} names {alias.checkpoint[:12]}, the first that was promoted: there is "
            "nothing before it to go back to."
        )
    target = ArtifactStore(workspace).get(alias.previous)
    refuse_damage(workspace, target)
    event = _event(workspace, "rolled_back", target, reason)
    return _mirrored(workspace, _move(workspace, alias.name, event, alias))


def _move(workspace: Workspace, name: AliasName, event: AliasEvent, after: Alias | None) -> Alias:
    """Move the alias while nothing is deleted (`tracking.garbage_collection`).

    Raises:
        ArtifactError: the checkpoint was deleted meanwhile.
    """
    with exclusive(workspace.artifacts_lock):
        refuse_deleted(workspace, ArtifactStore(workspace).get(event.checkpoint))
        return AliasStore(workspace).move(name, event, after=after)


def _mirrored(workspace: Workspace, moved: Alias) -> Alias:
    """Tell an MLflow server of an alias that was moved; whatever it says, the alias was."""
    if failure := mirror_alias(workspace, moved):
        _log.warning("%s", failure)
    return moved


def model_of(workspace: Workspace, checkpoint: Artifact) -> str:
    """Return the name of the pipeline that made a checkpoint; empty where no record says it."""
    made_by = checkpoint.produced_by
    result = read_result(workspace, str(made_by.get("fingerprint", "")))
    return result.pipeline if result is not None else str(made_by.get("run", "")).rpartition("-")[0]


def _event(
    workspace: Workspace, kind: EventKind, checkpoint: Artifact, reason: str, **more: Any
) -> AliasEvent:
    evaluations = evaluations_of(workspace, checkpoint.id)
    return AliasEvent(
        event=kind,
        checkpoint=checkpoint.id,
        time=utc_now(),
        by=user_name(),
        host=os.uname().nodename,
        reason=reason,
        metrics=dict(scores_of(evaluations[0])) if evaluations else {},
        **more,
    )

"""Promote a checkpoint: have an alias name it, if its bytes are whole and the rule holds."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from typing import Any

from redco_flow.errors import UsageError
from redco_flow.tracking.aliases import (
    Alias,
    AliasEvent,
    AliasMoved,
    AliasName,
    AliasStore,
    EventKind,
)
from redco_flow.tracking.artifacts import Artifact, ArtifactStore
from redco_flow.tracking.deletions import refuse_deleted
from redco_flow.tracking.evaluations import evaluations_of, scores_of
from redco_flow.tracking.locks import exclusive
from redco_flow.tracking.mlflow_server import mirror_alias
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.promotion.judgement import PromotionCandidate, Rule, refuse_damage
from redco_flow.tracking.results import read_result
from redco_flow.tracking.workspace import Workspace, user_name

_log = logging.getLogger(__name__)


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
    rule: Rule
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

"""The settings of promote, and the promotion, which the launcher makes: the aliases are there."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator

from redco_flow.errors import UsageError
from redco_flow.runtime.context import FinishedStage
from redco_flow.spec.model import Text, Texts
from redco_flow.spec.stage_kind import InputSlot, StageConfig
from redco_flow.tracking.aliases import AliasName
from redco_flow.tracking.promotion import Condition, PromotionRule

INPUTS = {
    "checkpoint": InputSlot(kind="checkpoint", default_selector="last"),
    "metrics": InputSlot(kind="metrics", many=True),
}
OUTPUTS = {"promotion": "promotion"}


class Config(StageConfig):
    """Promotion.

    Args:
        alias: what the checkpoint is to be named: `production` is this pipeline's,
            `@other/production` another one's.
        conditions: all have to hold: METRIC > ALIAS, METRIC < ALIAS, or with a number; none: it is
            promoted as it is.
        min_gain: how much better each score has to be, in the metric's own unit.
        confidence: of the paired bootstrap's interval of a gain, which has to lie above 0.
        reason: why, for the alias's history.
    """

    alias: Text = "production"
    conditions: Texts = Field(default_factory=list)
    min_gain: Annotated[float, Field(ge=0)] = 0.0
    confidence: Annotated[float, Field(gt=0, lt=1)] = 0.95
    reason: str = ""

    @field_validator("alias")
    @classmethod
    def _a_name(cls, alias: str) -> str:
        try:
            AliasName.parse(alias, "pipeline")
        except UsageError as error:
            raise ValueError(str(error)) from error
        return alias

    @field_validator("conditions")
    @classmethod
    def _conditions(cls, conditions: list[str]) -> list[str]:
        try:
            _ = [Condition.parse(text) for text in conditions]
        except UsageError as error:
            raise ValueError(str(error)) from error
        return conditions


def conclude(config: Config, finished: FinishedStage) -> str:
    """Promote the stage's checkpoint, once for all runs that have this result.

    Returns:
        What the alias names now, or why the checkpoint was not promoted.

    Raises:
        ArtifactError: the checkpoint, or an evaluation of it, is damaged.
        UsageError: a condition names an alias that there is not, or the wrong direction.
        OSError: the disk is full or read-only; the alias is as it was.
    """
    # Imported here: what only plans never pays for it.
    from redco_flow.tracking.artifacts import ArtifactStore
    from redco_flow.tracking.promotion import NotPromoted, PromotionRequest, promote

    [checkpoint_id] = finished.result.ingredients["inputs"]["checkpoint"]
    request = PromotionRequest(
        checkpoint=ArtifactStore(finished.workspace).get(checkpoint_id),
        name=AliasName.parse(config.alias, finished.pipeline),
        rule=PromotionRule(
            tuple(map(Condition.parse, config.conditions)), config.min_gain, config.confidence
        ),
        reason=config.reason or f"by stage {finished.result.stage} of run {finished.run}",
        decision=finished.result.fingerprint,
    )
    try:
        alias = promote(finished.workspace, request)
    except NotPromoted as refusal:
        return f"not promoted: {refusal}"
    if alias.checkpoint == checkpoint_id:
        return f"{alias.name} names checkpoint {checkpoint_id[:12]}"
    return f"was promoted before; {alias.name} names {alias.checkpoint[:12]} since"

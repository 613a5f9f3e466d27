"""Verbs that name checkpoints: promote, rollback, aliases."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from redco_flow.cli.arguments import Verbs, add_checkpoint, add_json, add_workspace, workspace_of
from redco_flow.cli.text import columns, number, short_id
from redco_flow.errors import UsageError
from redco_flow.records import moment
from redco_flow.tracking.aliases import Alias, AliasEvent, AliasName, AliasStore

_DEFAULT_ALIAS = "production"
_MOST_METRICS = 3


def register(verbs: Verbs) -> None:
    """Declare the verbs."""
    promote = verbs.add("promote", _promote)
    add_checkpoint(promote)
    promote.add_argument("--as", dest="alias", required=True, metavar="ALIAS", help="the alias")
    promote.add_argument(
        "--if",
        dest="conditions",
        action="append",
        default=[],
        metavar="CONDITION",
        help="only if this holds, such as 'rougeL > production' or 'rougeL > 40'; repeatable",
    )
    promote.add_argument(
        "--min-gain", type=float, default=0.0, metavar="GAIN", help="smallest gain (0)"
    )
    promote.add_argument(
        "--confidence",
        type=float,
        default=0.95,
        metavar="SHARE",
        help="confidence of the gain's bootstrap interval, which must be above 0 (0.95)",
    )
    rollback = verbs.add("rollback", _roll_back)
    rollback.add_argument("alias", nargs="?", default=_DEFAULT_ALIAS, metavar="ALIAS")
    for parser in (promote, rollback):
        parser.add_argument("--reason", default="", metavar="TEXT", help="reason, for the history")
    aliases = verbs.add("aliases", _aliases)
    aliases.add_argument(
        "alias", nargs="?", metavar="ALIAS", help="print the history of this alias"
    )
    for parser, what in (
        (promote, "whose alias it is (the pipeline that made the checkpoint)"),
        (rollback, "whose alias is meant (the only one that has it)"),
        (aliases, "of this model alone"),
    ):
        parser.add_argument("--model", default="", metavar="NAME", help=what)
        add_json(parser)
        add_workspace(parser)


def _promote(options: argparse.Namespace) -> int:
    from redco_flow.orchestrate.checkpoints.export import find_checkpoint
    from redco_flow.tracking.promotion import (
        Condition,
        PromotionRequest,
        PromotionRule,
        model_of,
        promote,
    )

    conditions = tuple(map(Condition.parse, options.conditions))
    rule = PromotionRule(conditions, options.min_gain, options.confidence)
    if options.min_gain and not conditions:
        raise UsageError("--min-gain is for --if CONDITION, which says by which score.")
    workspace = workspace_of(options)
    checkpoint = find_checkpoint(workspace, options.checkpoint)
    name = AliasName.parse(options.alias, options.model or model_of(workspace, checkpoint))
    before = AliasStore(workspace).find(name)
    request = PromotionRequest(checkpoint, name, rule, _without_secrets(options.reason))
    alias = promote(workspace, request)
    is_new = alias != before
    if options.json:
        print(json.dumps({"promoted": is_new, **_record(alias)}))
    elif is_new:
        print("\n".join(_moved_lines(alias)))
    else:
        print(f"{alias.name} names checkpoint {checkpoint.short_id} already: nothing was changed.")
    return 0


def _roll_back(options: argparse.Namespace) -> int:
    from redco_flow.tracking.promotion import roll_back

    workspace = workspace_of(options)
    alias = AliasStore(workspace).get(options.alias, options.model)
    moved = roll_back(workspace, alias, _without_secrets(options.reason))
    if options.json:
        print(json.dumps(_record(moved)))
    else:
        print(
            f"{moved.name} names checkpoint {short_id(moved.checkpoint)} again, "
            f"{short_id(alias.checkpoint)} no more."
        )
    return 0


def _aliases(options: argparse.Namespace) -> int:
    store = AliasStore(workspace_of(options))
    if options.alias:
        alias = store.get(options.alias, options.model)
        print(json.dumps(_record(alias)) if options.json else _history_table(alias))
        return 0
    found = store.list(options.model)
    if options.json:
        print(json.dumps([_record(alias) for alias in found]))
    elif found:
        rows = [_alias_row(alias) for alias in found]
        print(columns(rows, ["ALIAS", "CHECKPOINT", "METRICS", "SINCE", "BY", "BEFORE"]))
    else:
        sys.stderr.write("nothing was promoted yet: redco-flow promote CHECKPOINT --as NAME\n")
    return 0


def _record(alias: Alias) -> dict[str, Any]:
    return {
        "alias": str(alias.name),
        "checkpoint": alias.checkpoint,
        "previous": alias.previous,
        "history": [asdict(event) for event in alias.history],
    }


def _moved_lines(alias: Alias) -> Iterator[str]:
    before = f", {short_id(alias.history[-2].checkpoint)} no more" if alias.history[1:] else ""
    yield f"{alias.name} names checkpoint {short_id(alias.checkpoint)}{before}."
    for one in alias.current.comparisons:
        yield f"  {_comparison_text(one)}"


def _comparison_text(one: dict[str, Any]) -> str:
    if one.get("is_first"):
        return f"{one['condition']}: it is the first of this name"
    score, gain = number(float(one["score"])), number(float(one["gain"]))
    if "than" not in one:
        return f"{one['condition']}: {score}, a gain of {gain}"
    interval = f"{one['confidence']:.0%} interval {number(one['low'])} to {number(one['high'])}"
    return (
        f"{one['condition']}: {score} against {number(float(one['than_score']))}, a gain of {gain} "
        f"({interval}, {one['num_examples']} examples)"
    )


def _alias_row(alias: Alias) -> list[str]:
    now = alias.current
    return [
        str(alias.name),
        short_id(now.checkpoint),
        _metrics_text(now),
        moment(now.time),
        now.by,
        short_id(alias.previous),
    ]


def _history_table(alias: Alias) -> str:
    rows = [
        [
            moment(one.time),
            one.event.replace("_", " "),
            short_id(one.checkpoint),
            _metrics_text(one),
            one.by,
            "; ".join([*map(_comparison_text, one.comparisons), *filter(None, [one.reason])]),
        ]
        for one in alias.history
    ]
    return columns(rows, ["TIME", "EVENT", "CHECKPOINT", "METRICS", "BY", "WHY"])


def _metrics_text(event: AliasEvent) -> str:
    shown = list(event.metrics.items())[:_MOST_METRICS]
    return "  ".join(f"{key} {number(value)}" for key, value in shown)


def _without_secrets(text: str) -> str:
    """A person's words without what looks like a secret, on one line."""
    from redco_flow.launch.redaction import redact_text
    from redco_flow.spec.secrets import secret_values

    return " ".join(redact_text(text, secret_values(os.environ)).split())

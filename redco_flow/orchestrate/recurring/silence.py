"""Have the Prefect server tell when a schedule stands still: a proactive automation of its own.

The server that watches is the one that the schedule's deployment is on; it must itself be up. It is
given the addresses as Webhook blocks, in which Prefect keeps secrets. Prefect is imported in
functions, after `prepare_environment`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from uuid import UUID

from redco_flow.errors import UsageError
from redco_flow.orchestrate.notices import Notice, body_for
from redco_flow.spec.schedule import interval_of
from redco_flow.tracking.schedules import Schedule

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

_GOOD = "prefect.flow-run.Completed"


def watch_silence(schedule: Schedule, deployment: UUID, client: SyncPrefectClient) -> None:
    """Have the server tell when no flow run of a deployment has ended well for so long.

    It tells again each time that twice as long has passed: having told, Prefect forgets the period
    and looks again after one more, in which the next period begins.

    Raises:
        UsageError: the environment lacks an address.
    """
    from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture

    trigger = EventTrigger(
        match={"prefect.resource.id": "prefect.flow-run.*"},
        match_related={
            "prefect.resource.id": f"prefect.deployment.{deployment}",
            "prefect.resource.role": "deployment",
        },
        after={_GOOD},  # each restarts the wait; the first one begins with the automation
        expect={_GOOD},
        posture=Posture.Proactive,
        threshold=1,
        within=interval_of(schedule.no_run_for),
    )
    automation = AutomationCore(
        name=_name(schedule.name),
        description=f"No firing of schedule '{schedule.name}' ended well.",
        trigger=trigger,
        actions=list(_actions(schedule)),
    )
    _delete_automations(schedule.name, client)  # `serve` may have made one meanwhile
    client.create_automation(automation)


def is_watched(name: str, client: SyncPrefectClient) -> bool:
    """Whether the server watches a schedule, or will when it is no longer paused."""
    return bool(client.read_automations_by_name(_name(name)))


def watch_only_while(name: str, client: SyncPrefectClient, *, fires: bool) -> None:
    """Have the server watch a schedule again, or, while it is paused, no more."""
    from prefect.events.schemas.automations import AutomationCore

    for automation in client.read_automations_by_name(_name(name)):
        if automation.enabled and not fires:
            client.pause_automation(automation.id)
        elif fires and not automation.enabled:
            # Replaced, because the old one counts the time in which the schedule was paused.
            same = automation.model_dump(include=set(AutomationCore.model_fields))
            client.create_automation(AutomationCore(**same | {"enabled": True}))
            client.delete_automation(automation.id)


def forget_silence(name: str, client: SyncPrefectClient) -> None:
    """Delete a schedule's automation, and the addresses that it was given."""
    from prefect.exceptions import ObjectNotFound

    _delete_automations(name, client)
    for channel in ("webhook", "slack"):
        with contextlib.suppress(ObjectNotFound):
            block = client.read_block_document_by_name(_block_name(name, channel), "webhook")
            client.delete_block_document(block.id)


def _delete_automations(name: str, client: SyncPrefectClient) -> None:
    for automation in client.read_automations_by_name(_name(name)):
        client.delete_automation(automation.id)


def _actions(schedule: Schedule) -> Iterator[Any]:
    from prefect.blocks.webhook import Webhook
    from prefect.events.actions import CallWebhook

    notice = _notice(schedule)
    for variable in schedule.told_by.values():  # before any block is saved
        if not os.environ.get(variable):
            raise UsageError(
                f"nothing watches no_run_for, as environment variable {variable}, which holds the "
                "address of its notices, is not set."
            )
    for channel, variable in schedule.told_by.items():
        headers = {"Content-Type": "application/json"}
        block = Webhook(url=os.environ[variable], headers=headers)
        saved = block.save(_block_name(schedule.name, channel), overwrite=True)
        yield CallWebhook(block_document_id=saved, payload=json.dumps(body_for(channel, notice)))


def _notice(schedule: Schedule) -> Notice:
    return Notice(
        event="no_run",
        key="no_run",
        title=f"schedule {schedule.name}: no good run for {schedule.no_run_for}",
        text=f"`redco-flow schedule history {schedule.name}` and `redco-flow doctor` say more.",
        facts={"schedule": schedule.name, "pipeline": schedule.pipeline},
    )


def _name(schedule: str) -> str:
    return f"redco-flow: no run of {schedule}"


def _block_name(schedule: str, channel: str) -> str:
    """The name of a block, which takes small letters, digits and dashes."""
    return f"redco-flow-{channel}-{hashlib.sha256(schedule.encode()).hexdigest()[:12]}"

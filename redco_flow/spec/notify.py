"""The `notify:` section of a pipeline: recipients and events.

Addresses that let who knows them send messages, and passwords, are named by environment variables.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from email.utils import getaddresses
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from redco_flow.errors import Problem
from redco_flow.spec.document import Document
from redco_flow.spec.model import PositiveInt, StrictModel, Text, VariableName
from redco_flow.spec.schedule import checked_interval, interval_of

_SHORTEST_SILENCE = "10s"
_PORTS = {"starttls": 587, "tls": 465, "none": 25}

_EMAIL = ("notify", "email")
_ADDRESS = re.compile(r"[^\s@,;<>]+@[^\s@,;<>]+")

Event = Literal["failure", "promotion"]
_EVENTS: tuple[Event, ...] = ("failure", "promotion")


def mail_server_problems(pipeline: Document) -> Iterator[Problem]:
    """Yield one problem for each setting of a mail server that a pipeline's own file has.

    A pipeline is data, and may come from other people: it must not send a password of this user
    to a server that it names.
    """
    email = pipeline.get(_EMAIL)
    for key in email if isinstance(email, dict) else ():
        if key in EmailSection.model_fields and key != "to":
            message = (
                f"'notify.email.{key}' belongs into the defaults of a profile, or on the command "
                "line: a pipeline file says only 'to'"
            )
            yield pipeline.origin((*_EMAIL, key)).problem(message)


def _one_address(text: str) -> str:
    found = [address for _, address in getaddresses([text])]
    if len(found) != 1 or _ADDRESS.fullmatch(found[0]) is None or not text.isprintable():
        raise ValueError(f"{text!r} is not one e-mail address; write each as an item of its own")
    return text


Address = Annotated[Text, AfterValidator(_one_address)]


class EmailSection(StrictModel):
    """An e-mail to some people. In a pipeline file only `to`; the rest in a profile's `defaults`.

    Args:
        to: their addresses.
        sender: from whom it comes; None: the first of `to`.
        server: the mail server (SMTP).
        port: None: 587 with starttls, 465 with tls, 25 without either.
        security: how the connection is encrypted; a password is never sent without.
        user: whom the server knows, where it asks.
        password_env: the environment variable that holds the user's password.
    """

    to: Annotated[list[Address], Field(min_length=1)]
    sender: Address | None = None
    server: Text = "localhost"
    port: PositiveInt | None = None
    security: Literal["starttls", "tls", "none"] = "starttls"
    user: Text | None = None
    password_env: VariableName | None = None

    @model_validator(mode="after")
    def _password_of_a_user(self) -> EmailSection:
        if (self.user is None) != (self.password_env is None):
            raise ValueError("give 'user' and 'password_env', or neither")
        if self.user is not None and self.security == "none":
            raise ValueError("'security: none' would send the password to everybody on the way")
        return self

    @property
    def port_number(self) -> int:
        """The port, or the usual one."""
        return self.port or _PORTS[self.security]


class NotifySection(StrictModel):
    """Recipients of notifications on failures, promotions and missed runs.

    Args:
        events: `failure`: a run failed; `promotion`: a `promote` stage gave a checkpoint an
            alias.
        no_run_for: of a schedule: told when no firing has ended well for so long (30m, 26h, 2d).
            The Prefect server tells it, by webhook and Slack alone.
        webhook_env: the environment variable that holds an http address to which JSON is posted;
            the value of a variable that holds anything else is sent nowhere.
        slack_env: the one that holds the address of a Slack incoming webhook, or of what takes
            the same (Mattermost, Rocket.Chat, Zulip).
        email: an e-mail.
    """

    events: list[Event] = Field(default_factory=lambda: list(_EVENTS))
    no_run_for: Annotated[Text, AfterValidator(checked_interval)] | None = None
    webhook_env: VariableName | None = None
    slack_env: VariableName | None = None
    email: EmailSection | None = None

    @model_validator(mode="after")
    def _by_some_way(self) -> NotifySection:
        if not self.address_variables and self.email is None:
            raise ValueError("give one of webhook_env, slack_env and email: how to tell it")
        if self.no_run_for is None:
            return self
        if not self.address_variables:
            raise ValueError(
                "'no_run_for' is sent by the Prefect server, which sends no e-mail from here; give "
                "webhook_env or slack_env too"
            )
        if interval_of(self.no_run_for) < interval_of(_SHORTEST_SILENCE):
            raise ValueError(f"'no_run_for' is at least {_SHORTEST_SILENCE}")
        return self

    @property
    def address_variables(self) -> dict[str, str]:
        """The environment variable that holds the address, by channel: webhook, slack."""
        named = {"webhook": self.webhook_env, "slack": self.slack_env}
        return {channel: name for channel, name in named.items() if name is not None}

    @property
    def variables(self) -> list[str]:
        """All environment variables that sending needs."""
        password = self.email.password_env if self.email else None
        return [*self.address_variables.values(), *([password] if password else [])]

"""Send a notice: as JSON to a webhook, as a line to Slack, as an e-mail; say why where it fails.

Addresses and passwords come from the environment and are in no message, log or record. An exchange
has one limit of time, and no redirect is followed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from redco_flow.bounded import within
from redco_flow.spec.notify import EmailSection, NotifySection
from redco_flow.spec.secrets import hide_secrets

if TYPE_CHECKING:
    from smtplib import SMTP
    from urllib.request import OpenerDirector

# What sends notices is imported when one is sent: most runs send none.
_SECONDS = 10.0  # for one read
_SECONDS_FOR_ALL = 20.0
_MENTION_OF_ALL = re.compile(r"@(?=(?:all|channel|everyone|here)\b)", re.IGNORECASE)
_SLACK_ESCAPES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})


@dataclass(frozen=True)
class Notice:
    """A notification: subject, event and facts.

    Args:
        event: failure, promotion or no_run.
        key: names it among all of its run.
        title: one line.
        text: what else there is to say.
        facts: for programs.
    """

    event: str
    key: str
    title: str
    text: str
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def for_programs(self) -> dict[str, Any]:
        """The JSON payload of a webhook."""
        return {"event": self.event, "title": self.title, "text": self.text, **self.facts}

    @property
    def for_slack(self) -> dict[str, Any]:
        """The payload of a Slack incoming webhook."""
        return {"text": _without_calls(f"*{' '.join(self.title.split())}*\n{self.text}")}


Send = Callable[[Notice], str]
"""Sends a notice; returns why it could not, or nothing."""


def channels_of(
    section: NotifySection, environ: Mapping[str, str], seconds: float = _SECONDS_FOR_ALL
) -> dict[str, Send]:
    """Return how the section wants things told, by the way's name.

    Args:
        seconds: for one whole exchange, whatever the server sends meanwhile.
    """
    found: dict[str, Send] = {
        channel: partial(_post, channel, environ.get(name, ""), name, seconds)
        for channel, name in section.address_variables.items()
    }
    if section.email is not None:
        found["email"] = partial(_mail, section.email, environ, seconds)
    return found


def body_for(channel: str, notice: Notice) -> dict[str, Any]:
    """Return what is posted to a webhook or to Slack."""
    return notice.for_slack if channel == "slack" else notice.for_programs


def _opener() -> OpenerDirector:
    from urllib.request import HTTPRedirectHandler, build_opener

    class NoRedirects(HTTPRedirectHandler):
        """A redirect is an error: it may lead into the network of this machine."""

        def redirect_request(self, *_: Any) -> None:
            """Follow none."""

    return build_opener(NoRedirects)


def _without_calls(text: str) -> str:
    """Return a text for Slack in which `<!channel>` and `@everyone` notify no one."""
    return _MENTION_OF_ALL.sub("@\u200b", text.translate(_SLACK_ESCAPES))


def _post(channel: str, address: str, variable: str, seconds: float, notice: Notice) -> str:
    from urllib.request import Request

    if not address:
        return f"environment variable {variable} is not set"
    if not address.startswith(("https://", "http://")):
        return f"environment variable {variable} holds no http address"
    try:
        request = Request(  # noqa: S310 (http alone, see above)
            address,
            json.dumps(body_for(channel, notice)).encode(),
            {"Content-Type": "application/json", "User-Agent": "redco-flow"},
        )
        within(seconds, lambda: _opener().open(request, timeout=_SECONDS).close())
        return ""
    except Exception as error:  # noqa: BLE001 (any error is reported, and nothing ends because of it)
        return _said(error, address)


def _mail(email: EmailSection, environ: Mapping[str, str], seconds: float, notice: Notice) -> str:
    from email.message import EmailMessage

    password = environ.get(email.password_env or "", "")
    if email.password_env and not password:
        return f"environment variable {email.password_env} is not set"
    message = EmailMessage()
    message["Subject"] = f"[redco-flow] {' '.join(notice.title.split())}"
    message["From"] = email.sender or email.to[0]
    message["To"] = ", ".join(email.to)
    message.set_content(f"{notice.text}\n")

    def send() -> None:
        with _connected(email) as server:
            if email.user:
                server.login(email.user, password)
            server.send_message(message)

    try:
        within(seconds, send)
        return ""
    except Exception as error:  # noqa: BLE001 (as above)
        return _said(error, password)


def _connected(email: EmailSection) -> SMTP:
    import smtplib
    import ssl

    if email.security == "tls":
        context = ssl.create_default_context()
        return smtplib.SMTP_SSL(email.server, email.port_number, timeout=_SECONDS, context=context)
    server = smtplib.SMTP(email.server, email.port_number, timeout=_SECONDS)
    if email.security == "starttls":
        try:
            server.starttls(context=ssl.create_default_context())
        except BaseException:
            server.close()
            raise
    return server


def _said(error: Exception, secret: str) -> str:
    """Describe an error in one line, without the address or password."""
    text = f"{type(error).__name__}: {error}"
    text = text.replace(secret, "<hidden>") if secret else text
    return " ".join(hide_secrets(text).split())

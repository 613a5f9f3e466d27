"""Send the notifications that a pipeline's `notify:` section requests, once, after a run's end.

They are made from the run's files, so they are sent whatever ended the run. `notified.json`
records each notice, its channel and any error; no run waits for it, and none fails by it.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from redco_flow.bounded import within
from redco_flow.launch.redaction import redact_text
from redco_flow.orchestrate.run.state import LaunchRecord
from redco_flow.records import write_json
from redco_flow.spec.notify import EmailSection, NotifySection
from redco_flow.spec.secrets import hide_secrets, secret_values
from redco_flow.spec.yaml import parse_file
from redco_flow.tracking.aliases import Alias, AliasEvent, AliasStore
from redco_flow.tracking.attempt import State
from redco_flow.tracking.locks import exclusive
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.typed_records import find_record
from redco_flow.tracking.workspace import Workspace

if TYPE_CHECKING:
    from smtplib import SMTP
    from urllib.request import OpenerDirector


SECONDS_BEFORE_AGAIN = (5.0,)
"""How long to wait before each further try of what could not be sent."""

_MOST_CHARACTERS = 2000
Log = Callable[[str], None]


@dataclass(frozen=True)
class Told:
    """One line of notified.json.

    Args:
        notice: what it was about; of one run no two notices have the same.
        channel: webhook, slack or email.
        time: when it was sent, or given up.
        error: why it could not be sent; empty where it was.
    """

    notice: str
    channel: str
    time: str
    error: str = ""


@dataclass(frozen=True)
class ToldRecord:
    """notified.json."""

    told: list[Told] = field(default_factory=list)


def tell_end(
    run: RunDirectory,
    log: Log,
    *,
    state: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] = os.environ,
    pauses: Sequence[float] = SECONDS_BEFORE_AGAIN,
) -> None:
    """Tell of an ended run what its pipeline asks for and was not told before; never raises.

    Args:
        log: takes a line on what could not be sent.
        state: the run's state when it ended; None: as its files say now.
        environ: holds the addresses and passwords that the section names.
        pauses: seconds before each further try.
    """
    try:
        section = read_section(run)
        if section is not None:
            _tell(run, state or run.read_state(), section, environ, pauses, log)
    except Exception as error:  # noqa: BLE001 (a run does not fail because of its notices)
        log(f"warning: the notices of the run's end failed: {type(error).__name__}: {error}")


def tell_at_once(notice: Notice, section: NotifySection, log: Log) -> None:
    """Tell what is no run's, whose record its caller keeps; arguments as of `tell_end`."""
    for channel, send in channels_of(section, os.environ).items():
        _tried(channel, send, notice, SECONDS_BEFORE_AGAIN, log)


def read_section(run: RunDirectory) -> NotifySection | None:
    """Return what a run's pipeline says under `notify`.

    Raises:
        pydantic.ValidationError: the record is another version's.
    """
    if b"\nnotify: null\n" in run.resolved_path.read_bytes():
        return None  # as in most runs, without parsing the file once more
    values = parse_file(run.resolved_path)[0].get(("notify",))
    return NotifySection.from_json(values) if values is not None else None


def notices_of(
    run: RunDirectory, state: Mapping[str, Any], events: Sequence[str]
) -> Iterator[Notice]:
    """Yield what there is to tell of a run, promotions first.

    Args:
        state: the run's state when it ended.
        events: which kinds are asked for.
    """
    if "promotion" in events:
        yield from _promotions(run, state)
    if "failure" in events and state["state"] == State.FAILED:
        yield _failure(run, state)


def _tell(
    run: RunDirectory,
    state: Mapping[str, Any],
    section: NotifySection,
    environ: Mapping[str, str],
    pauses: Sequence[float],
    log: Log,
) -> None:
    path = run.path / "notified.json"
    with exclusive(run.path / ".notified.lock"):
        told = (find_record(path, ToldRecord) or ToldRecord()).told
        known = {(one.notice, one.channel) for one in told}
        for notice in notices_of(run, state, section.events):
            for channel, send in channels_of(section, environ).items():
                if (notice.key, channel) in known:
                    continue
                error = _tried(channel, send, notice, pauses, log)
                told = [*told, Told(notice.key, channel, utc_now(), error)]
                write_json(path, asdict(ToldRecord(told)))


def _tried(
    channel: str,
    send: Callable[[Notice], str],
    notice: Notice,
    pauses: Sequence[float],
    log: Log,
) -> str:
    """Send, again after each pause where it fails; return why it failed in the end, or nothing."""
    for pause in (*pauses, None):
        error = send(notice)
        if not error or pause is None:
            break
        time.sleep(pause)
    if error:
        log(f"warning: notice of {notice.event} could not be sent by {channel}: {error}")
    return error


def _failure(run: RunDirectory, state: Mapping[str, Any]) -> Notice:
    message = without_secrets(str(state.get("message") or "it does not say why"))
    lines = [
        f"files: {run.path}",
        f"logs: {shlex.join(['redco-flow', 'logs', run.id])}",
        *([f"page: {state['prefect_url']}"] if state.get("prefect_url") else []),
    ]
    return Notice(
        event="failure",
        key=f"failure {state.get('ended_at')}",
        title=f"{run.id} failed",
        text="\n".join([message, *lines]),
        facts=_facts(run) | {"message": message, "page": state.get("prefect_url") or ""},
    )


def _promotions(run: RunDirectory, state: Mapping[str, Any]) -> Iterator[Notice]:
    stages = state["stages"].values()
    decisions = {stage.get("fingerprint") for stage in stages} - {None, ""}
    workspace = Workspace(Path(LaunchRecord.read(run).workspace))
    for alias in AliasStore(workspace).list():
        for event in alias.history:
            # The run that decided it has sent that notice.
            is_new = event.time >= str(run.record["created_at"])
            if event.event == "promoted" and event.decision in decisions and is_new:
                yield _promotion(run, alias, event)


def _promotion(run: RunDirectory, alias: Alias, event: AliasEvent) -> Notice:
    scores = {key: round(value, 4) for key, value in event.metrics.items()}
    text = [
        f"checkpoint: {event.checkpoint}",
        *([f"scores: {', '.join(f'{k} {v}' for k, v in scores.items())}"] if scores else []),
        f"why: {without_secrets(event.reason)}",
        f"undo: {shlex.join(['redco-flow', 'rollback', str(alias.name)])}",
    ]
    return Notice(
        event="promotion",
        key=f"promotion {alias.name} {event.time}",
        title=f"{alias.name} names a checkpoint of {run.id}",
        text="\n".join(text),
        facts=_facts(run)
        | {"alias": str(alias.name), "checkpoint": event.checkpoint, "metrics": event.metrics},
    )


def _facts(run: RunDirectory) -> dict[str, Any]:
    return {"pipeline": run.record["name"], "run": run.id, "path": str(run.path)}


def without_secrets(text: str) -> str:
    """Return a text as it may be sent: no secret of this process in it, and no novel."""
    return redact_text(text, secret_values(os.environ))[:_MOST_CHARACTERS]


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

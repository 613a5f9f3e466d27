"""What people are told of runs: by a real HTTP server, a real mail server, and Prefect's own."""

import json
import shutil
import socket
import ssl
import threading
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email import message_from_bytes
from pathlib import Path
from uuid import uuid4

import pytest
from orchestrate_runs import InProcess, Runs, until, wait_for_end

from redco_flow.errors import ConfigError
from redco_flow.orchestrate.notices import Notice, channels_of, tell_end
from redco_flow.orchestrate.prefect.api import ask
from redco_flow.orchestrate.prefect.server import own_api
from redco_flow.orchestrate.recurring.firing import Firer, Terms
from redco_flow.records import write_json
from redco_flow.spec.load import load_pipeline
from redco_flow.spec.notify import NotifySection
from redco_flow.spec.profile import profile_model
from redco_flow.spec.yaml import parse_file, read_yaml, write_yaml
from redco_flow.tracking.run_directory import RunDirectory
from redco_flow.tracking.schedules import Schedule, ScheduleDirectory
from redco_flow.tracking.workspace import Workspace
from tests.cli.conftest import Command

SECRET = f"T0P-{uuid4().hex}"
PIPELINE = """
name: told
notify: {{webhook_env: HOOK, {more}}}
stages:
  preprocess: {{kind: orchestrate_kinds.numbers}}
  train: {{kind: orchestrate_kinds.total, fails_until: {gate}}}
  promote: {{checkpoint: train, alias: production}}
"""


def ended(runs, gate, more):
    """Bring a run to its end; it fails unless its gate is there."""
    run = runs.write(PIPELINE.format(more=more, gate=gate))
    InProcess(run).end()
    return run


@pytest.fixture(scope="module")
def failed_run(tmp_path_factory):
    """A run that has failed."""
    folder = tmp_path_factory.mktemp("failed")
    return ended(Runs(folder), folder / "missing", "events: [failure]")


@pytest.fixture
def failed(failed_run, tmp_path):
    """Give a copy of the failed run, whose pipeline asks for something else."""

    def failed(more="events: [failure]"):
        run = RunDirectory(Path(shutil.copytree(failed_run.path, tmp_path / failed_run.id)))
        document = parse_file(run.resolved_path)[0]
        section = read_yaml(f"{{webhook_env: HOOK, {more}}}", "notify").values
        run.resolved_path.write_text(write_yaml({**document.values, "notify": section}))
        return run

    return failed


def told(run):
    """What notified.json says: what was told, by which way, why not."""
    record = json.loads((run.path / "notified.json").read_text())
    return [
        (one["notice"].partition(" ")[0], one["channel"], one["error"]) for one in record["told"]
    ]


def test_a_failure_is_posted_once_to_the_address_that_the_environment_holds(failed, receiver):
    run, said = failed(), []
    environ = {"HOOK": receiver.url(SECRET)}

    tell_end(run, said.append, environ=environ)
    tell_end(run, said.append, environ=environ)

    [(path, body)] = receiver.bodies
    assert path == f"/{SECRET}"
    assert (body["event"], body["pipeline"], body["run"]) == ("failure", "told", run.id)
    assert body["title"] == f"{run.id} failed"
    assert str(run.path) in body["text"]
    assert body["message"] == run.read_state()["message"]
    assert told(run) == [("failure", "webhook", "")]
    written = b"".join(path.read_bytes() for path in run.path.rglob("*") if path.is_file())
    assert SECRET.encode() not in written


def test_an_end_is_told_though_the_run_was_given_new_attempts_meanwhile(failed, receiver):
    run = failed()
    ended = run.read_state()
    write_json(run.state_path, ended | {"state": "running", "message": ""})

    tell_end(run, print, state=ended, environ={"HOOK": receiver.url("")})

    [(_, body)] = receiver.bodies
    assert body["message"] == ended["message"]


@pytest.mark.slow
def test_a_promotion_is_told_by_the_run_that_decided_it_and_by_no_later_one(
    runs, receiver, tmp_path
):
    environ = {"HOOK": receiver.url("hook"), "SLACK": receiver.url("slack")}
    gate = tmp_path / "gate"
    gate.touch()
    first, again = (ended(runs, gate, "slack_env: SLACK") for _ in range(2))
    for run in (first, again):
        tell_end(run, print, environ=environ)

    (_, body), (path, slack) = receiver.bodies
    assert (body["event"], body["alias"], body["run"]) == (
        "promotion",
        "@told/production",
        first.id,
    )
    assert body["checkpoint"] == first.read_state()["stages"]["train"]["artifacts"]["checkpoint"]
    assert path == "/slack"
    assert list(slack) == ["text"]
    assert slack["text"].startswith(f"*@told/production names a checkpoint of {first.id}*")
    assert told(first) == [("promotion", "webhook", ""), ("promotion", "slack", "")]


def test_only_the_events_that_are_asked_for_are_told(failed, receiver):
    tell_end(failed("events: [promotion]"), print, environ={"HOOK": receiver.url("")})

    assert receiver.bodies == []


def test_what_cannot_be_sent_is_tried_again_written_down_and_harms_nothing(failed, receiver):
    run, said = failed("slack_env: NOT_SET"), []
    receiver.status = 503

    tell_end(run, said.append, environ={"HOOK": receiver.url(SECRET)}, pauses=[0.0])

    assert len(receiver.bodies) == 2
    assert told(run) == [
        ("failure", "webhook", "HTTPError: HTTP Error 503: Service Unavailable"),
        ("failure", "slack", "environment variable NOT_SET is not set"),
    ]
    assert [line.partition(":")[0] for line in said] == ["warning", "warning"]
    assert SECRET not in "".join(said)


def test_a_dead_address_is_not_written_down_with_its_error(failed):
    run, said = failed(), []

    tell_end(run, said.append, environ={"HOOK": f"http://{SECRET}.invalid:x/"}, pauses=[])

    [(_, _, error)] = told(run)
    assert error
    assert SECRET not in error + "".join(said)


class Inbox:
    """An aiosmtpd handler that keeps what arrives, and who came with which password."""

    def __init__(self) -> None:
        self.mails, self.logins = [], []

    async def handle_DATA(self, server, session, envelope):
        self.mails.append((envelope.rcpt_tos, message_from_bytes(envelope.content)))
        return "250 OK"

    def authenticate(self, server, session, envelope, mechanism, data):
        from aiosmtpd.smtp import AuthResult

        self.logins.append((data.login, data.password))
        return AuthResult(success=data.password == SECRET.encode(), handled=False)


@pytest.fixture
def certificate(tmp_path, monkeypatch):
    """A certificate of localhost that this process trusts."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    names = x509.SubjectAlternativeName([x509.DNSName("localhost")])
    builder = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    builder = builder.not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(1))
    signed = builder.add_extension(names, critical=False).sign(key, hashes.SHA256())
    path = tmp_path / "certificate.pem"
    encoded = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    path.write_bytes(encoded + signed.public_bytes(serialization.Encoding.PEM))
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    return path


@pytest.fixture
def mail_server(certificate):
    """A mail server that takes mail over TLS from a user with a password alone."""
    from aiosmtpd.controller import Controller

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    inbox = Inbox()
    options = {"auth_required": True, "require_starttls": True, "tls_context": context}
    with socket.create_server(("localhost", 0)) as free:
        inbox.port = free.getsockname()[1]
    options["authenticator"] = inbox.authenticate
    controller = Controller(inbox, "localhost", inbox.port, **options)
    controller.start()
    yield inbox
    controller.stop()


def test_a_failure_is_told_by_an_encrypted_e_mail_with_the_users_password(failed, mail_server):
    email = f"server: localhost, port: {mail_server.port}, user: me, password_env: MAIL_PASSWORD"
    to = "to: [a@example.org, b@example.org], sender: flow@example.org"
    run = failed(f"email: {{{email}, {to}}}, events: [failure]")

    tell_end(run, print, environ={"MAIL_PASSWORD": SECRET}, pauses=[])

    [(recipients, mail)] = mail_server.mails
    assert mail_server.logins == [(b"me", SECRET.encode())]
    assert recipients == ["a@example.org", "b@example.org"]
    assert mail["Subject"] == f"[redco-flow] {run.id} failed"
    assert mail["From"] == "flow@example.org"
    assert f"redco-flow logs {run.id}" in mail.get_payload(decode=True).decode()
    assert told(run)[1] == ("failure", "email", "")


def test_a_wrong_password_is_told_and_not_shown(failed, mail_server):
    email = f"server: localhost, port: {mail_server.port}, user: me, password_env: MAIL_PASSWORD"
    run = failed(f"email: {{{email}, to: [a@example.org]}}")

    tell_end(run, print, environ={"MAIL_PASSWORD": "wr0ng-s3cret"}, pauses=[])

    [_, (_, channel, error)] = told(run)
    assert channel == "email"
    assert error.startswith("SMTPAuthenticationError: (535,")
    assert mail_server.mails == []


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({}, "give one of webhook_env, slack_env and email"),
        ({"no_run_for": "1d", "email": {"to": ["a@b"]}}, "which sends no e-mail from here"),
        ({"no_run_for": "5s", "slack_env": "S"}, "'no_run_for' is at least 10s"),
        ({"no_run_for": "often", "slack_env": "S"}, "'often' is not an interval"),
        ({"email": {"to": ["a@b, c@d"]}}, "is not one e-mail address"),
        ({"email": {"to": ["a@b\nBcc: c@d"]}}, "is not one e-mail address"),
        ({"email": {"to": ["a@b"], "user": "me"}}, "give 'user' and 'password_env', or neither"),
        (
            {"email": {"to": ["a@b"], "user": "u", "password_env": "P", "security": "none"}},
            "would send the password to everybody",
        ),
    ],
)
def test_a_section_that_cannot_be_meant_is_a_mistake(section, reason):
    with pytest.raises(ValueError, match=reason):
        NotifySection.from_json(section)


@pytest.fixture
def dripping():
    """The port of a server that sends a part of a header every 50 ms, and never ends it."""
    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            with suppress(OSError):
                connection, _ = server.accept()
                part = b"HTTP/1.1 200 OK\r\n"
                while not is_over.wait(0.05):
                    connection.sendall(b"220-" + part if by_mail else part)
                    part = b"X: y\r\n"

        by_mail = []
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[1], by_mail
        is_over.set()


@pytest.mark.parametrize("channel", ["webhook", "email"])
def test_an_exchange_has_one_limit_of_time(dripping, channel):
    """The limit of a socket begins again with each byte."""
    port, by_mail = dripping
    by_mail += ["mail"] if channel == "email" else []
    email = {"to": ["a@b.org"], "server": "127.0.0.1", "port": port, "security": "none"}
    section = NotifySection.from_json({"webhook_env": "HOOK", "email": email})
    environ = {"HOOK": f"http://127.0.0.1:{port}/"}

    error = channels_of(section, environ, seconds=0.3)[channel](Notice("failure", "k", "t", "x"))

    assert error == "TimeoutError: no complete answer within 0.3 s"


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_a_redirect_is_not_followed(receiver, status):
    receiver.status, receiver.location = status, receiver.url("inside")
    section = NotifySection.from_json({"webhook_env": "HOOK"})

    error = channels_of(section, {"HOOK": receiver.url("hook")})["webhook"](
        Notice("failure", "k", "t", "x")
    )

    assert error.startswith(f"HTTPError: HTTP Error {status}")
    assert [path for path, _ in receiver.bodies] == ["/hook"]


def test_a_variable_that_holds_no_address_is_sent_nowhere():
    section = NotifySection.from_json({"webhook_env": "HF_TOKEN"})

    error = channels_of(section, {"HF_TOKEN": SECRET})["webhook"](Notice("failure", "k", "t", "x"))

    assert error == "environment variable HF_TOKEN holds no http address"


def test_a_title_has_one_line_and_calls_nobody(mail_server, receiver):
    email = {"server": "localhost", "port": mail_server.port, "user": "me", "to": ["a@b.org"]}
    email["password_env"] = "PASSWORD"
    section = NotifySection.from_json({"slack_env": "HOOK", "email": email})
    environ = {"HOOK": receiver.url("hook"), "PASSWORD": SECRET}
    notice = Notice("failure", "k", "run <!channel>\n@everyone failed", "see @here & <@U1>")

    assert [send(notice) for send in channels_of(section, environ).values()] == ["", ""]

    [(_, mail)] = mail_server.mails
    assert mail["Subject"] == "[redco-flow] run <!channel> @everyone failed"
    [(_, body)] = receiver.bodies
    assert body["text"] == (
        "*run &lt;!channel&gt; @\u200beveryone failed*\nsee @\u200bhere &amp; &lt;@U1&gt;"
    )


@pytest.mark.parametrize("key", ["server", "port", "security", "user", "password_env", "sender"])
def test_a_mail_server_is_named_in_a_profile_and_not_in_a_pipeline(key, tmp_path):
    """A pipeline may come from anybody, and would choose who gets this user's password."""
    email = {"server": "mail.b.org", "port": 587, "security": "tls", "sender": "c@b.org"}
    email |= {"user": "u", "password_env": "HF_TOKEN"}
    stages = {"preprocess": {"kind": "orchestrate_kinds.numbers"}}
    values = {"name": "told", "stages": stages, "notify": {"email": {"to": ["a@b.org"]}}}
    path = tmp_path / "told.yaml"
    path.write_text(write_yaml(values))
    profile = profile_model().from_json({"defaults": {"notify": {"email": email}}})

    allowed = load_pipeline(path, profile=profile).notify.email
    values["notify"]["email"][key] = email[key]
    path.write_text(write_yaml(values))
    with pytest.raises(ConfigError, match=f"'notify.email.{key}' belongs into the defaults"):
        load_pipeline(path, profile=profile)

    assert (allowed.to, allowed.server) == (["a@b.org"], "mail.b.org")


@pytest.mark.slow
def test_a_run_that_fails_tells_it_by_its_own_process(runs, receiver, monkeypatch, tmp_path):
    monkeypatch.setenv("HOOK", receiver.url("hook"))
    run = runs.start(PIPELINE.format(more="events: [failure]", gate=tmp_path / "missing"))

    state = wait_for_end(run)
    until(lambda: receiver.bodies)

    assert receiver.bodies[0][1]["message"] == state["message"]


@pytest.mark.slow
def test_a_schedule_without_a_good_run_is_told_by_the_prefect_server(
    prefect_server, receiver, tmp_path
):
    notify = "notify: {webhook_env: HOOK, no_run_for: 10s}\nschedule: {cron: 0 0 1 1 *}"
    stages = "stages: {preprocess: {kind: orchestrate_kinds.numbers}}"
    (tmp_path / "still.yaml").write_text(f"name: still\n{notify}\n{stages}\n")
    command, api = Command(tmp_path), own_api()
    words, of_schedule = (
        ("schedule", "add", "still.yaml"),
        {"name": {"any_": ["redco-flow: no run of still"]}},
    )
    assert "'notify.no_run_for': environment variable HOOK is not set" in command(*words, code=2)
    begun = time.monotonic()
    for _ in range(2):  # a schedule that is changed is told of once
        command(*words, environment={"HOOK": receiver.url("hook")})
    assert len(ask(api, "/automations/filter", {"automations": of_schedule})) == 1

    until(lambda: receiver.bodies, seconds=300)

    assert time.monotonic() - begun > 10
    (path, body), *_ = receiver.bodies
    assert (path, body["event"], body["schedule"]) == ("/hook", "no_run", "still")
    assert body["title"] == "schedule still: no good run for 10s"
    [watching] = ask(api, "/automations/filter", {"automations": of_schedule})
    command("schedule", "pause", "still")
    [paused] = ask(api, "/automations/filter", {"automations": of_schedule})
    command("schedule", "resume", "still")
    [resumed] = ask(api, "/automations/filter", {"automations": of_schedule})
    assert (watching["enabled"], paused["enabled"], resumed["enabled"]) == (True, False, True)
    assert resumed["id"] != paused["id"]  # which would count the time of the pause
    assert resumed["trigger"]["within"] == paused["trigger"]["within"]
    assert resumed["actions"] == paused["actions"]
    command("schedule", "rm", "still")
    assert ask(api, "/automations/filter", {"automations": of_schedule}) == []


@pytest.mark.parametrize(("events", "num_told"), [(["failure"], 1), (["promotion"], 0)])
def test_a_firing_that_starts_no_run_is_told_by_itself(
    receiver, monkeypatch, tmp_path, events, num_told
):
    """Its pipeline cannot be read any more: the schedule's record knows whom to tell."""
    monkeypatch.setenv("HOOK", receiver.url("hook"))
    workspace = Workspace.open(tmp_path / "workspace")
    notify = {"webhook_env": "HOOK", "events": events}
    path = str(tmp_path / "weekly.yaml")
    directory = ScheduleDirectory.of(workspace, "weekly")
    directory.write(Schedule("weekly", path, str(tmp_path), notify=notify))
    (tmp_path / "weekly.yaml").write_text("stages: [broken")
    terms = Terms("weekly", workspace.root, path, "local", (), "skip", "latest", retries=0)

    firer = Firer(terms, lambda: False, print, threading.Event())
    firing = firer.fire("a-firing", datetime.now(UTC))

    assert firing.state == "failed"
    assert len(receiver.bodies) == num_told
    for where, body in receiver.bodies:
        assert (where, body["event"], body["schedule"]) == ("/hook", "failure", "weekly")
        assert body["title"] == f"schedule weekly: the firing of {firing.due} started no run"
        assert "weekly.yaml:1" in body["text"]

"""Verbs of recurring runs: schedule, with verbs of its own, and serve."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from zoneinfo import ZoneInfo

from redco_flow.bounded import within
from redco_flow.cli.arguments import Verbs, add_json, add_pipeline, add_workspace, workspace_of
from redco_flow.cli.fit import choose_settings
from redco_flow.cli.loading import Loader
from redco_flow.cli.text import columns
from redco_flow.errors import ConfigError, Problem, UsageError
from redco_flow.launch.processes import exit_within
from redco_flow.local_paths import is_file
from redco_flow.orchestrate.prefect.api import is_healthy, note_deleted
from redco_flow.orchestrate.prefect.server import (
    external_url,
    prefect_directory,
    server_status,
)
from redco_flow.orchestrate.recurring.serving_record import (
    Serving,
    note_workspace,
    refuse_if_served_elsewhere,
)
from redco_flow.records import moment
from redco_flow.tracking.process_identity import utc_now
from redco_flow.tracking.schedules import (
    Firing,
    Schedule,
    ScheduleDirectory,
    get_schedule,
    list_schedules,
)
from redco_flow.tracking.workspace import Workspace, home_directory

if TYPE_CHECKING:
    from redco_flow.orchestrate.recurring.deployments import Deployed
    from redco_flow.spec.document import Document
    from redco_flow.spec.load import ResolvedPipeline
    from redco_flow.spec.schedule import ScheduleSection

_UNIT = """\
[Unit]
Description=redco-flow: fires the schedules of {user}
After=network-online.target

[Service]
{environment}ExecStart={python} -P -m redco_flow.cli.main serve --limit {limit}
Restart=always
RestartSec=10
KillMode=process

[Install]
WantedBy=default.target
"""

_SECRET_VARIABLES = ("PREFECT_API_KEY", "PREFECT_API_AUTH_STRING")
_SECONDS_TO_ANSWER = 10.0
_SECONDS_FOR_PYTHON_TO_CLOSE = 5.0
_SECONDS_TO_DELETE = 120.0
_SUMMARIES = {
    "add": "create a schedule, or replace the one of this name",
    "ls": "list the schedules, their next and their last firing",
    "show": "print one schedule",
    "pause": "pause a schedule",
    "resume": "resume a paused schedule",
    "run": "fire a schedule now",
    "rm": "delete a schedule and its history; its runs stay",
    "history": "list the result of each firing",
}


def register(verbs: Verbs) -> None:
    """Declare the verbs."""
    schedule = verbs.add("schedule", _help)
    own = Verbs(schedule.add_subparsers(title="verbs", metavar="VERB"), _SUMMARIES)
    schedule.set_defaults(schedule_parser=schedule)
    add = own.add("add", _add)
    add_pipeline(add)
    _add_when(add)
    listed = own.add("ls", _list)
    show = own.add("show", _show)
    pause = own.add("pause", partial(_set_paused, is_paused=True))
    resume = own.add("resume", partial(_set_paused, is_paused=False))
    run = own.add("run", _run)
    remove = own.add("rm", _remove)
    history = own.add("history", _history)
    for parser in (show, pause, resume, run, remove, history):
        parser.add_argument("name", metavar="NAME", help="the schedule's name")
    for parser in (listed, show, pause, resume, run, remove, history):
        add_workspace(parser)
    for parser in (add, listed, show, history):
        add_json(parser)
    serve = verbs.add("serve", _serve)
    serve.add_argument("--detach", action="store_true", help="run in the background")
    serve.add_argument("--stop", action="store_true", help="stop serving; running runs continue")
    serve.add_argument(
        "--limit", type=int, metavar="N", help="firings at once; later ones wait (default: 10)"
    )
    serve.add_argument("--install", action="store_true", help="start serving at boot")


def _add_when(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--name", metavar="NAME", help="name of the schedule (default: the pipeline's)"
    )
    when = parser.add_mutually_exclusive_group()
    when.add_argument("--cron", metavar="CRON", help="such as '0 3 * * 1': Mondays at 03:00")
    when.add_argument("--every", metavar="INTERVAL", help="90s, 30m, 6h, 1d, 2w")
    when.add_argument("--rrule", metavar="RULE", help="a recurrence rule of RFC 5545")
    parser.add_argument("--timezone", metavar="ZONE", help="such as Europe/Berlin (this machine's)")
    parser.add_argument(
        "--overlap",
        choices=("skip", "queue", "cancel_running"),
        help="if the previous run is still running (default: skip)",
    )
    parser.add_argument(
        "--missed",
        choices=("latest", "skip", "all"),
        help="missed firings to run later, after a time without serving (default: latest)",
    )
    parser.add_argument(
        "--retries", type=int, metavar="N", help="new attempts for failed stages of a firing (0)"
    )


def _help(options: argparse.Namespace) -> int:
    options.schedule_parser.print_help()
    return 0


def _add(options: argparse.Namespace) -> int:
    from redco_flow.orchestrate.recurring import deployments as prefect
    from redco_flow.orchestrate.recurring.silence import watch_silence

    refuse_if_served_elsewhere()
    if options.from_stage or options.until_stage or options.force:
        raise UsageError("a schedule runs whole pipelines: leave --from, --until and --force out.")
    schedule, workspace = _wanted(options)
    directory = ScheduleDirectory.of(workspace, schedule.name)
    api = prefect.connect()
    with prefect.client_of(api) as client:
        deployment = prefect.deploy(schedule, workspace, client)
        if schedule.no_run_for:
            watch_silence(schedule, deployment, client)
        directory.write(schedule)
        note_workspace(workspace)
        found = prefect.find_deployment(schedule.name, client)
        assert found is not None
        deployed = prefect.describe(found, api)
    if options.json:
        print(json.dumps(_record(schedule, deployed)))
        return 0
    print("\n".join(_lines(schedule, deployed, directory)))
    _say_if_nothing_serves()
    return 0


def _wanted(options: argparse.Namespace) -> tuple[Schedule, Workspace]:
    """The schedule that the command line and the pipeline's block ask for.

    Raises:
        ConfigError: there is no time, two of them, or one that cannot be read.
    """
    from redco_flow.spec.find import find_file
    from redco_flow.spec.profile import LOCAL_LAUNCHER
    from redco_flow.spec.schedule import checked_rule
    from redco_flow.spec.yaml import parse_file

    path = find_file("pipelines", options.file).absolute()
    section = _section(options, parse_file(path)[0])
    if options.profile == "local" and section.profile:
        options.profile = section.profile
    loaded = Loader(options).load()
    choose_settings(loaded, compiles=False)  # refuses what every firing would refuse
    if loaded.profile.launcher != LOCAL_LAUNCHER:
        sys.stderr.write(
            f"note: runs of a schedule are driven by a process of the machine that serves it, not "
            f"by a job (launcher: {loaded.profile.launcher})\n"
        )
    timezone = section.timezone or _local_timezone()
    schedule = Schedule(
        name=section.name or loaded.pipeline.name,
        pipeline=str(path),
        directory=str(Path.cwd()),
        profile=_profile_word(options.profile),
        overrides=list(options.overrides),
        cron=section.cron or "",
        every=section.every or "",
        rrule=checked_rule(section.rrule, timezone) if section.rrule else "",
        timezone=timezone,
        overlap=section.overlap,
        missed=section.missed,
        retries=section.retries,
        **_notify(loaded.pipeline),
    )
    return schedule, loaded.workspace


def _notify(pipeline: ResolvedPipeline) -> dict[str, Any]:
    """Summarize the pipeline's `notify` section for a schedule."""
    notify = pipeline.notify
    if notify is None:
        return {}
    section = {"notify": notify.model_dump(mode="json", exclude_defaults=True)}
    if notify.no_run_for is None:
        return section
    unset = [name for name in notify.address_variables.values() if not os.environ.get(name)]
    if unset:
        message = f"'notify.no_run_for': environment variable {', '.join(unset)} is not set"
        raise ConfigError([Problem(str(pipeline.path), 0, 0, message)])
    return section | {"no_run_for": notify.no_run_for, "told_by": notify.address_variables}


def _section(options: argparse.Namespace, document: Document) -> ScheduleSection:
    """Return the file's block with the command line's options over it, checked."""
    from redco_flow.spec.document import COMMAND_LINE, Document, written_at
    from redco_flow.spec.problems import raise_if_any, validated
    from redco_flow.spec.schedule import ScheduleSection

    block = document.section(("schedule",))
    times = ("cron", "every", "rrule")
    keys = (*times, "name", "timezone", "overlap", "missed", "retries")
    options_given = {key: value for key in keys if (value := getattr(options, key)) is not None}
    if not isinstance(block.values, dict):
        block = Document({}, {(): block.origin(())})
    if options_given.keys() & set(times):
        for key in times:
            block = block.without((key,))
    for key, value in options_given.items():
        block = block.with_part((key,), written_at(value, COMMAND_LINE))
    section, problems = validated(
        ScheduleSection, block, full_path=lambda path: ("schedule", *path)
    )
    raise_if_any(problems)
    assert section is not None
    return section


def _profile_word(profile: str) -> str:
    """A file of a profile stays that file wherever a firing runs."""
    path = Path(profile)
    return str(path.absolute()) if is_file(path) else profile


def _local_timezone() -> str:
    """Return the name of this machine's time zone.

    Raises:
        UsageError: it has none, as TZ=CET-1CEST.
    """
    import tzlocal

    name = str(tzlocal.get_localzone_name() or "UTC")
    for days in (0, 182):  # summer and winter
        date = datetime.now(UTC) + timedelta(days=days)
        if date.astimezone(ZoneInfo(name)).utcoffset() != date.astimezone().utcoffset():
            given = f" (TZ={os.environ['TZ']})" if "TZ" in os.environ else ""
            raise UsageError(
                f"this machine's time zone{given} is not that of a place: give --timezone, such as "
                "Europe/Berlin."
            )
    return name


def _list(options: argparse.Namespace) -> int:
    workspace = workspace_of(options)
    found = [(one, one.read()) for one in list_schedules(workspace)]
    if not found:
        sys.stderr.write("no schedules yet: redco-flow schedule add FILE --cron '0 3 * * 1'\n")
    if not found and not options.json:
        return 0
    deployed = _deployed([schedule.name for _, schedule in found]) if found else {}
    if options.json:
        records = [_record(one, deployed.get(one.name)) for _, one in found]
        print(json.dumps(records))
        return 0
    rows = [_row(schedule, deployed.get(schedule.name), folder) for folder, schedule in found]
    print(columns(rows, ["SCHEDULE", "PIPELINE", "WHEN", "NEXT", "LAST", "RESULT"]))
    _say_if_nothing_serves()
    return 0


def _row(schedule: Schedule, deployed: Deployed | None, folder: ScheduleDirectory) -> list[str]:
    when = deployed.when if deployed else schedule.when
    last = [[moment(one.due), _came_to(one)] for one in folder.firings()[-1:]] or [["", ""]]
    return [schedule.name, Path(schedule.pipeline).name, when, _next(deployed), *last[0]]


def _next(deployed: Deployed | None) -> str:
    if deployed is None:
        return "not on the server"
    if deployed.is_paused:
        return "paused"
    return moment(deployed.next_firings[0].isoformat()) if deployed.next_firings else "never"


def _came_to(firing: Firing) -> str:
    """Describe the result of a firing: its state and the reason."""
    return " ".join(part for part in (firing.state, firing.run, _why(firing)) if part)


def _why(firing: Firing) -> str:
    first = firing.reason.partition("\n")[0]
    return f"({first})" if first else ""


def _show(options: argparse.Namespace) -> int:
    directory = get_schedule(workspace_of(options), options.name)
    schedule = directory.read()
    deployed = _deployed([schedule.name]).get(schedule.name)
    if options.json:
        print(json.dumps(_record(schedule, deployed)))
    else:
        print("\n".join(_lines(schedule, deployed, directory)))
    return 0


def _lines(
    schedule: Schedule, deployed: Deployed | None, directory: ScheduleDirectory
) -> list[str]:
    """A schedule as text; the values on the server count."""
    given = deployed.parameters if deployed else asdict(schedule)
    lines = [f"{schedule.name}: {deployed.when if deployed else schedule.when}"]
    overrides = " ".join(given["overrides"])
    lines.append(f"  runs: {given['pipeline']} -p {given['profile']} {overrides}".rstrip())
    lines.append(
        f"  overlap {given['overlap']}, missed {given['missed']}, retries {given['retries']}"
    )
    if deployed is None or deployed.is_paused:
        lines.append(f"  next: {_next(deployed)}")
    else:
        dates = [moment(one.isoformat()) for one in deployed.next_firings]
        lines.append(f"  next: {', '.join(dates) or 'never'}")
    lines.append(f"  records: {directory.path}")
    return [*lines, *([f"  page: {deployed.page}"] if deployed else [])]


def _record(schedule: Schedule, deployed: Deployed | None) -> dict[str, Any]:
    if deployed is None:
        return {**asdict(schedule), "next": [], "page": None, "is_deployed": False}
    given = {key: value for key, value in deployed.parameters.items() if key != "schedule"}
    more = {
        "is_paused": deployed.is_paused,
        "next": [one.isoformat() for one in deployed.next_firings],
        "page": deployed.page,
        "is_deployed": True,
    }
    return {**asdict(schedule), **given, **more}


def _set_paused(options: argparse.Namespace, *, is_paused: bool) -> int:
    from redco_flow.orchestrate.recurring.deployments import forget_missed
    from redco_flow.orchestrate.recurring.silence import watch_only_while

    directory = get_schedule(workspace_of(options), options.name)

    def change(client: Any, found: Any) -> None:
        if found.paused and not is_paused:
            for one in found.schedules:  # it fires since then: what was due before is not missed
                client.update_deployment_schedule(found.id, one.id, active=one.active)
        client.set_deployment_paused_state(found.id, is_paused)
        if is_paused:
            forget_missed(found.id, client)
        watch_only_while(directory.name, client, fires=not is_paused)
        directory.write(replace(directory.read(), is_paused=is_paused))

    _with_deployment(directory.name, change)
    print(f"{directory.name}: {'paused' if is_paused else 'fires again'}")
    return 0


def _run(options: argparse.Namespace) -> int:
    directory = get_schedule(workspace_of(options), options.name)

    def fire(client: Any, found: Any) -> None:
        flow_run = client.create_flow_run_from_deployment(found.id)
        print(f"{directory.name}: fires now, as {flow_run.id}")

    _with_deployment(directory.name, fire)
    _say_if_nothing_serves()
    return 0


def _remove(options: argparse.Namespace) -> int:
    refuse_if_served_elsewhere()
    directory = get_schedule(workspace_of(options), options.name)
    running = [one.run for one in directory.firings() if one.is_held and not one.has_ended]
    if running:
        raise UsageError(
            f"'{directory.name}' fires now ({', '.join(filter(None, running)) or 'beginning'}): "
            "cancel it first, or wait."
        )
    note_deleted(prefect_directory(), directory.name, str(workspace_of(options).root))
    directory.remove()
    print(f"{directory.name}: deleted; its runs stay")
    _delete_deployment(directory.name)
    return 0


def _history(options: argparse.Namespace) -> int:
    firings = get_schedule(workspace_of(options), options.name).firings()
    if options.json:
        print(json.dumps([asdict(one) for one in firings]))
    else:
        rows = [[moment(one.due), one.state, one.run, one.reason] for one in firings]
        print(columns(rows, ["DUE", "STATE", "RUN", "WHY"]))
    return 0


def _delete_deployment(name: str) -> None:
    """Delete a schedule's deployment, as far as the server answers; else that stays noted."""
    url = server_status().url
    try:
        if url is None or not is_healthy(url, timeout_seconds=_SECONDS_TO_ANSWER):
            raise TimeoutError("it does not run")
        within(_SECONDS_TO_DELETE, _delete_noted)
    except Exception as error:  # noqa: BLE001 (the schedule is deleted, and the rest is noted)
        sys.stderr.write(
            f"note: the Prefect server does not answer ({error}): the deployment of '{name}' is "
            "deleted when `redco-flow serve` reaches it. `redco-flow ui --stop` ends a server that "
            "hangs.\n"
        )


def _delete_noted() -> None:
    from redco_flow.orchestrate.recurring.deployments import client_of, connect, delete_noted

    with client_of(connect()) as client:
        delete_noted(client)


def _with_deployment(name: str, act: Callable[[Any, Any], None]) -> None:
    """Do something with a schedule's deployment, which is made where the server lacks it."""
    from redco_flow.orchestrate.recurring import deployments as prefect

    refuse_if_served_elsewhere()
    with prefect.client_of(prefect.connect()) as client:
        found = prefect.find_deployment(name, client)
        if found is None:
            raise UsageError(
                f"the Prefect server has no deployment of '{name}': `redco-flow schedule add` the "
                "pipeline again, or `redco-flow serve` creates it again."
            )
        act(client, found)


def _deployed(names: list[str]) -> dict[str, Deployed]:
    """Return the deployments of schedules; empty if no server answers."""
    from redco_flow.orchestrate.recurring import deployments as prefect

    if not server_status().healthy:
        sys.stderr.write("note: the Prefect server does not run; the records here are shown\n")
        return {}
    api = prefect.connect()
    with prefect.client_of(api) as client:
        found = {name: prefect.find_deployment(name, client) for name in names}
    return {name: prefect.describe(one, api) for name, one in found.items() if one is not None}


def _say_if_nothing_serves() -> None:
    if Serving.find() is None:
        sys.stderr.write("note: nothing serves: `redco-flow serve --detach` fires schedules\n")


def _serve(options: argparse.Namespace) -> int:
    from redco_flow.orchestrate.recurring.deployments import MAX_FIRINGS
    from redco_flow.orchestrate.recurring.serving import serve, start_detached, stop_serving

    if options.stop:
        print("stopped" if stop_serving() else "nothing served")
        return 0
    limit = MAX_FIRINGS if options.limit is None else options.limit
    if limit < 1:
        raise UsageError(f"--limit is {limit}; at least one firing must be able to run.")
    if options.install:
        return _install(limit)
    if options.detach:
        print(f"schedules are served by {start_detached(limit)}")
        return 0
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    serve(lambda line: print(utc_now(), line, flush=True), stop, limit)
    # Threads of Prefect may wait for a server that is gone.
    exit_within(_SECONDS_FOR_PYTHON_TO_CLOSE, 0)
    return 0


def _install(limit: int) -> int:
    variables = _installed_variables()
    if shutil.which("systemctl") is None:
        python = shlex.join([*variables, sys.executable])
        words = f"{'env ' if variables else ''}{python} -P -m redco_flow.cli.main serve --detach"
        # cron makes a line break of a percent sign.
        print(f"@reboot {words} --limit {limit}".replace("%", r"\%"))
        sys.stderr.write("there is no systemd here: `crontab -e` takes the line above\n")
        return 0
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    path = home / "systemd" / "user" / "redco-flow.service"
    path.parent.mkdir(parents=True, exist_ok=True)
    user = os.environ.get("USER", "this user")
    environment = "".join(f"Environment={_quoted(one)}\n" for one in variables)
    python = _quoted(sys.executable)
    path.write_text(_UNIT.format(environment=environment, python=python, user=user, limit=limit))
    print(path)
    sys.stderr.write(
        "systemctl --user enable --now redco-flow     serves from now on\n"
        "loginctl enable-linger                       also while you are not logged in\n"
    )
    return 0


def _installed_variables() -> list[str]:
    """Return what `serve` after a reboot must find as this process does, as NAME=value."""
    home = [f"REDCO_FLOW_HOME={home_directory()}"] if os.environ.get("REDCO_FLOW_HOME") else []
    url = external_url()
    secrets = [name for name in _SECRET_VARIABLES if os.environ.get(name)]
    has_password = "@" in urlsplit(url or "").netloc
    if has_password:
        secrets.append("PREFECT_API_URL")
    if url and secrets:
        sys.stderr.write(
            f"note: {', '.join(secrets)} must be set in the environment of the service, too; "
            "secrets are not written here\n"
        )
    return [*home, *([f"PREFECT_API_URL={url}"] if url and not has_password else [])]


def _quoted(text: str) -> str:
    """Return a word of a systemd unit, where backslashes, quotes and % mean something."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{escaped}"'

"""The verb ui: the page of all runs, served to this user's browser; and Prefect's UI."""

from __future__ import annotations

import argparse
import errno
import signal
import sys
import threading
import urllib.parse

from redco_flow.cli.arguments import (
    Verbs,
    add_workspace,
    cannot_listen,
    check_port,
    workspace_of,
)
from redco_flow.errors import UsageError
from redco_flow.tracking.locks import find_holder
from redco_flow.tracking.run_directory import find_run
from redco_flow.tracking.sweep_directory import find_sweep
from redco_flow.tracking.workspace import Workspace

PORT = 4280
_SECONDS_FOR_ROWS = 3.0


def register(verbs: Verbs) -> None:
    """Declare the verb."""
    ui = verbs.add("ui", _ui)
    ui.add_argument(
        "run", nargs="?", metavar="RUN", help="link to the page of this run or sweep; or last"
    )
    ui.add_argument(
        "--port", type=int, metavar="N", help=f"port of the page; 0 takes a free one ({PORT})"
    )
    add_workspace(ui)
    ui.add_argument(
        "--prefect",
        action="store_true",
        help="start the Prefect server in the background, if none runs, and print a link to it",
    )
    ui.add_argument("--stop", action="store_true", help="stop that Prefect server")
    ui.add_argument(
        "--force", action="store_true", help="with --stop: even while runs report to it"
    )
    ui.add_argument(
        "--status", action="store_true", help="only report whether a Prefect server runs"
    )


def _ui(options: argparse.Namespace) -> int:
    is_prefect = options.prefect or options.stop or options.status
    if is_prefect and options.port is not None:
        raise UsageError("--port is of the page of all runs; leave it out for the Prefect server.")
    if options.stop:
        return _stop_prefect(options)
    if is_prefect:
        return _prefect(options)
    return _serve(options)


def _serve(options: argparse.Namespace) -> int:
    port = PORT if options.port is None else options.port
    check_port(port)
    workspace = workspace_of(options)
    if not workspace.runs.is_dir():
        raise UsageError(
            f"{workspace.root} is no workspace: it has no directory `runs`. Name another one with "
            "--workspace, or start a run in it with `redco-flow run PIPELINE`."
        )
    page = _page_of(workspace, options.run) if options.run else "/"
    # Imported here: templates and tables, which the lines above need not wait for.
    from redco_flow.cli.runs_server import ADDRESS, RunsServer

    try:
        server = RunsServer(port, workspace)
    except OSError as error:
        if options.port is not None or error.errno != errno.EADDRINUSE:
            raise cannot_listen(ADDRESS, port, error) from error
        server = RunsServer(0, workspace)  # another page of this user, mostly
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with server:
        # The rows are read before the link is opened; those of a huge workspace meanwhile.
        reading = threading.Thread(target=server.prepare, daemon=True)
        reading.start()
        try:
            reading.join(_SECONDS_FOR_ROWS)
            print(server.link(page), flush=True)
            sys.stderr.write(f"the runs of {workspace.root}; Ctrl-C ends the page\n")
            server.serve_forever()
        except KeyboardInterrupt:
            sys.stderr.write("ended\n")
    return 0


def _page_of(workspace: Workspace, name: str) -> str:
    sweep = find_sweep(workspace, name)
    return f"/sweep/{sweep.id}" if sweep else f"/run/{find_run(workspace, name).id}/"


def _prefect(options: argparse.Namespace) -> int:
    from redco_flow.orchestrate.prefect.api import login_url
    from redco_flow.orchestrate.prefect.server import api_at, ensure_server, server_status

    if options.status:
        status = server_status()
        print(f"{status.url} answers" if status.healthy and status.url else "no server answers")
        return 0 if status.healthy else 1
    api = api_at(ensure_server())
    print(login_url(api, _prefect_page(options) if options.run else "/"))
    return 0


def _prefect_page(options: argparse.Namespace) -> str:
    """The path of a run's page; where the server is may have changed since."""
    run = find_run(workspace_of(options), options.run)
    url = run.read_state().get("prefect_url")
    if not url:
        if find_holder(run) is not None:
            raise UsageError(f"run {run.id} has no Prefect page yet: it gets one within a minute.")
        raise UsageError(
            f"run {run.id} has no Prefect page: no Prefect server took it while it ran. "
            f"`redco-flow report {run.id}` writes the run's own page."
        )
    return urllib.parse.urlsplit(str(url)).path


def _stop_prefect(options: argparse.Namespace) -> int:
    """End our own server unless it is needed."""
    from redco_flow.orchestrate.prefect.report import users_of
    from redco_flow.orchestrate.prefect.server import own_api, stop_server

    api = own_api()
    users = users_of(api) if api is not None and not options.force else []
    if users:
        named = "".join(f"\n  {user}" for user in users)
        sys.stderr.write(f"the Prefect server is in use by{named}\n")
        if not _is_confirmed():
            raise UsageError(
                "the server was left running; `redco-flow ui --stop --force` ends it all the same. "
                "Runs go on without it, and their pages get the end with the next run."
            )
    print("stopped" if stop_server() else "no server of ours was running")
    return 0


def _is_confirmed() -> bool:
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return False
    sys.stderr.write("End it? [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")

"""Verbs around runs: doctor, clean, schema, profile, ui, completion."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Any

from redco_flow.cli.arguments import Verbs, add_json
from redco_flow.cli.loading import note_replaced

_LIST_RUNS = "ls redco-workspace/runs 2>/dev/null"  # the same words in every shell


def register(verbs: Verbs) -> None:
    """Declare the verbs."""
    doctor = verbs.add("doctor", _doctor, "check that a profile can run, and say how to mend it")
    doctor.add_argument("-p", "--profile", default="local", metavar="PROFILE")
    add_json(doctor)
    clean = verbs.add("clean", _clean, "remove what a profile's hosts keep without using it")
    clean.add_argument("-p", "--profile", default="hosts", metavar="PROFILE")
    clean.add_argument(
        "--older-than",
        type=_days,
        metavar="DAYS",
        help="what was last used so long ago (hosts.keep_days); 0: all that is not in use",
    )
    clean.add_argument("--dry-run", action="store_true", help="only list it, with sizes and ages")
    add_json(clean)
    verbs.add("schema", _schema, "print the JSON Schema of a pipeline file, for editors")
    profile = verbs.add("profile", _profile, "print a cluster profile, defaults included")
    profile.add_argument("profile", nargs="?", default="local", metavar="PROFILE")
    add_json(profile)
    ui = verbs.add("ui", _ui, "start the Prefect server, if none runs, and print its address")
    ui.add_argument("--stop", action="store_true", help="stop the server that was started here")
    ui.add_argument("--status", action="store_true", help="only say whether one runs")
    completion = verbs.add("completion", _completion, "print a shell's completion script")
    completion.add_argument("shell", choices=("bash", "zsh", "fish"))


def _doctor(options: argparse.Namespace) -> int:
    from redco_flow.orchestrate.doctor import examine
    from redco_flow.spec.profile import load_profile

    note_replaced(cluster_profiles=options.profile)
    findings = []
    for finding in examine(load_profile(options.profile)):
        findings.append(finding)
        if not options.json:
            print(f"{'ok  ' if finding.is_good else 'FAIL'}  {finding.check}: {finding.detail}")
            if not finding.is_good:
                print(f"      mend: {finding.remedy}")
            sys.stdout.flush()
    if options.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings]))
    return 0 if all(finding.is_good for finding in findings) else 1


def _clean(options: argparse.Namespace) -> int:
    from redco_flow.cli.leftover_view import describe
    from redco_flow.orchestrate.hosts_cleaning import clean_profile_hosts
    from redco_flow.spec.profile import load_profile

    note_replaced(cluster_profiles=options.profile)
    hosts = clean_profile_hosts(
        load_profile(options.profile), options.older_than, dry_run=options.dry_run
    )
    if options.json:
        print(json.dumps([host.to_json() for host in hosts]))
    else:
        for host in hosts:
            print(describe(host, dry_run=options.dry_run))
    return 4 if any(host.problem for host in hosts) else 0


def _days(text: str) -> float:
    days = float(text)
    if not 0 <= days < float("inf"):
        raise argparse.ArgumentTypeError("must be a number of days, 0 or more")
    return days


def _schema(options: argparse.Namespace) -> int:
    from redco_flow.spec.schema import json_schema

    print(json.dumps(json_schema(), indent=2))
    return 0


def _profile(options: argparse.Namespace) -> int:
    from redco_flow.spec.profile import load_profile

    note_replaced(cluster_profiles=options.profile)
    settings = load_profile(options.profile).model_dump(mode="json")
    if options.json:
        print(json.dumps(settings))
        return 0
    for key, value in settings.items():
        print(f"{key}: {json.dumps(value)}")
    return 0


def _ui(options: argparse.Namespace) -> int:
    from redco_flow.orchestrate.prefect_api import ui_url
    from redco_flow.orchestrate.prefect_server import ensure_server, server_status, stop_server

    if options.stop:
        print("stopped" if stop_server() else "no server of ours was running")
        return 0
    if options.status:
        status = server_status()
        print(f"{status.url} answers" if status.healthy and status.url else "no server answers")
        return 0 if status.healthy else 1
    print(ui_url(ensure_server()))
    return 0


def _completion(options: argparse.Namespace) -> int:
    import shtab

    from redco_flow.cli.main import build_parser

    parser = build_parser()
    # Files and runs are looked for by the shell: no Python starts at the press of a key.
    completers: dict[str, Any] = {
        "file": shtab.FILE,
        "run": shtab.cmd(_LIST_RUNS),
        "workspace": shtab.DIRECTORY,
    }
    for action in _actions(parser):
        if action.dest in completers and not action.choices:
            action.complete = completers[action.dest]  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell=options.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of the parser and of its verbs."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from verb._actions

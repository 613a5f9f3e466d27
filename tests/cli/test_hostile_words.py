"""Thousands of odd words over all verbs: a message and an exit code, and nothing is made."""

from __future__ import annotations

import argparse
import os
import random
import traceback

import pytest

from redco_flow.cli.main import VERBS, build_parser, run_command
from redco_flow.tracking.artifacts import ArtifactStore
from redco_flow.tracking.workspace import Workspace

WORDS = (
    *("/etc", "/", "..", "../outside", "../../etc/passwd", ".", "*", "[a", "a[0-9]", "~", "%s"),
    *("~nobody-of-this-name/x", "\0", "a\0b", "\udced\udca0\udc80", "\n", "\x1b[31m", "", " "),
    *("x" * 5000, "y/" * 2000, "é✓", "@last", "@", "@a/b", "@a@b", "-1", "0", "1e400", "9" * 40),
    *("python:nope", "os.path", "${env:HOME}", "${x}", "key=value", "data.train=/etc/passwd", "="),
    *("~x", "--", "-", "--help2", "https://x.y/z", "a=b=c", "a=", "=a", "{", "[1,2", "'", '"'),
    *("train/best/x", "x/y/z", "0" * 64, "ab" * 8, "{0}", "$(touch evil)", "; touch evil", "nul"),
    *("\u202e", "\ufeff", "1,2", "lr=1,2", "2024-01-01", "* * * * *", "0 0 31 2 *"),
)
# init writes where it is told to, and has tests below.
TRIED = [verb for verb in VERBS if verb != "init"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current directory beside one that no verb may touch."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").write_text("kept")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("REDCO_FLOW_WORKSPACE", str(tmp_path / "here" / "workspace"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path


def run_verb(line):
    """The exit code of a command line, in this process."""
    try:
        return run_command(line)
    except SystemExit as ended:
        return ended.code


def options_of(parser):
    """Each option of a verb with whether it takes a value, and those of its own verbs."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield [name], False
                yield from (([name, *words], takes) for words, takes in options_of(inner))
        elif action.option_strings and action.dest != "help":
            yield action.option_strings[-1:], action.nargs != 0


def command_line(rng, options):
    verb = rng.choice(TRIED)
    line = [verb]
    for _ in range(rng.randint(0, 2)):
        if options[verb]:
            words, takes_value = rng.choice(options[verb])
            line += [*words, *([rng.choice(WORDS)] if takes_value else [])]
    # Two words at least, of which one names nothing: no server starts, and no check of a cluster.
    return [*line, *rng.choices(WORDS, k=rng.randint(1, 2)), rng.choice(["/etc", "..", "\n"])]


@pytest.mark.parametrize("count", [200, pytest.param(600, marks=pytest.mark.slow)])
def test_odd_words_end_with_a_message_and_make_nothing(folder, capsys, count):
    parser = build_parser()
    verbs = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
    options = {verb: list(options_of(verbs[verb])) for verb in TRIED}
    before = sorted(folder.rglob("*"))
    escaped = []

    for seed in range(count):
        line = command_line(random.Random(seed), options)
        try:
            code = run_verb(line)
        except Exception:
            escaped.append(f"{str(line)[:200]}: {traceback.format_exc(limit=-3)}")
            continue
        said = capsys.readouterr()
        if code and not said.err.strip():
            escaped.append(f"{str(line)[:200]}: code {code} without a word")

    assert not escaped, "\n".join(escaped[:5])
    assert sorted(folder.rglob("*")) == before


def test_an_unknown_verb_is_answered_in_whole_sentences(folder, capsys):
    assert run_verb(["delete"]) == 2
    assert "there is no verb 'delete'. Verbs: init, run, " in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["status", "cancel", "resume", "attach"])
def test_a_path_without_a_run_names_none(folder, capsys, verb):
    """It was a traceback: the search for sweeps took the path for a pattern."""
    assert run_verb([verb, "/etc"]) == 2
    assert "no runs in" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["", "\n", "\x1b[31m", "a\0b", "\udced\udca0\udc80", "x" * 300, "y/" * 2000]
)
def test_init_makes_no_folder_whose_name_is_none(folder, capsys, name):
    assert run_verb(["init", name]) == 2
    assert capsys.readouterr().err.startswith("redco-flow: ")
    assert os.listdir() == []


@pytest.mark.parametrize("as_json", [[], ["--json"]])
@pytest.mark.parametrize("kind", ["ABSOLUTE", "RELATIVE", "/etc", "", ".", "..", "a\0b"])
def test_a_kind_of_artifacts_is_a_name_and_never_a_path(folder, capsys, kind, as_json):
    """Another workspace's folder of artifacts is not a kind of this one's."""
    published = {}
    for place in ("here", "outside"):
        store = ArtifactStore(Workspace.open(folder / place / "workspace"))
        (folder / place / "files").mkdir()
        (folder / place / "files" / "a.json").write_text(place)
        published[place] = store.publish("metrics", folder / place / "files")
    other = published["outside"].path.parent
    inside = published["here"].path.parent.parent
    kind = {"ABSOLUTE": str(other), "RELATIVE": os.path.relpath(other, inside)}.get(kind, kind)

    run_verb(["artifacts", "--kind", kind, *as_json])

    assert published["outside"].id[:8] not in capsys.readouterr().out

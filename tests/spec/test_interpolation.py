"""What `${…}` stands for, and what it may not do."""

from __future__ import annotations

import time
from datetime import datetime

import pytest

from redco_flow.spec.interpolation import escape, interpolate
from redco_flow.spec.yaml import read_yaml


def filled(text: str, **environ: str):
    """Return a document's values and "line:column: message" of each mistake."""
    document, problems = interpolate(read_yaml(text, "f.yaml"), environ)
    return document.values, [f"{p.line}:{p.column}: {p.message}" for p in problems]


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("${env:X}", "words"),
        ("a ${env:X} b", "a words b"),
        ("${env:N}", 3),
        ("${env:F}", 1e-4),
        ("${env:B}", True),
        ("${env:NO}", "no"),
        ("n${env:N}", "n3"),
        ("${env:EMPTY}", ""),
        ("${env:ABSENT,7}", 7),
        ("${env:ABSENT,}", ""),
        ("${env:ABSENT,a, b}", "a, b"),
        ("$${env:X}", "${env:X}"),
        ("$ {x} $x $(x)", "$ {x} $x $(x)"),
        ("${env:TRICK}", "${env:X}"),
    ],
)
def test_an_environment_variable_is_read_like_a_scalar(written, value):
    environ = {"X": "words", "N": "3", "F": "1e-4", "B": "true", "NO": "no", "EMPTY": ""}

    values, problems = filled(f"a: '{written}'", **environ, TRICK="${env:X}")

    assert (values, problems) == ({"a": value}, [])
    assert type(values["a"]) is type(value)


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("${date:%Y-%m-%d}", "2026-03-01"),
        ("logs/${date:%Y/%m}/${date:%d}.jsonl", "logs/2026/03/01.jsonl"),
        ("${date:%Y-%m-%d,-1d}", "2026-02-28"),
        ("${date:%H:%M %z, -2h}", "01:30 +0100"),
        ("${date:%Y}", "2026"),
        ("$${date:%Y}", "${date:%Y}"),
    ],
)
def test_a_date_is_that_of_the_moment_that_the_environment_gives(written, value):
    values, problems = filled(f"a: '{written}'", REDCO_FLOW_DATE="2026-03-01T03:30:00+01:00")

    assert (values, problems) == ({"a": value}, [])


@pytest.mark.parametrize(
    ("before", "value"),
    [
        # At 02:00 clocks go to 03:00, so that an hour before 03:00 is 01:00, as `date` says:
        # TZ=Europe/Berlin date -d "@$(($(date -d 2026-03-29T03:00+02:00 +%s) - 3600))"
        ("1h", "2026-03-29 01:00 +0100"),
        ("24h", "2026-03-28 02:00 +0100"),
        ("1d", "2026-03-28 03:00 +0100"),
    ],
)
def test_hours_before_a_date_have_elapsed_and_days_are_those_of_the_calendar(before, value):
    due = {"REDCO_FLOW_DATE": "2026-03-29T03:00:00+02:00", "REDCO_FLOW_TIMEZONE": "Europe/Berlin"}

    values, problems = filled(f"a: '${{date:%Y-%m-%d %H:%M %z,-{before}}}'", **due)

    assert (values, problems) == ({"a": value}, [])


def test_a_date_is_this_machines_where_the_environment_gives_none():
    before, (values, problems), after = datetime.now(), filled("a: '${date:%s}'"), datetime.now()

    assert problems == []
    assert int(before.timestamp()) <= int(values["a"]) <= int(after.timestamp())


@pytest.mark.parametrize(
    ("text", "environ", "message"),
    [
        ("${date:}", {}, "write ${date:%Y-%m-%d}, or ${date:%Y-%m-%d,-1d} for the day before"),
        ("${date:today}", {}, "write ${date:%Y-%m-%d}, or"),
        ("${date:%d,-1 day}", {}, "'1 day' is not an interval; write 90s, 30m, 6h, 1d or 2w"),
        ("${date:%d,-9999999d}", {}, "date value out of range"),
        ("${date:%d}", {"REDCO_FLOW_DATE": "Monday"}, "REDCO_FLOW_DATE is no date: write 2026-"),
        ("${date:%d}", {"REDCO_FLOW_TIMEZONE": "Europe"}, "REDCO_FLOW_TIMEZONE is no time zone"),
        ("${date:%d}", {"REDCO_FLOW_TIMEZONE": "x" * 999}, "REDCO_FLOW_TIMEZONE is no time zone"),
    ],
)
def test_a_date_that_cannot_be_told_is_a_mistake_with_its_place(text, environ, message):
    _, [problem] = filled(f"a: 1\nb: '{text}'", **environ)

    assert problem.startswith("2:1: 'b': ")
    assert message in problem


def test_a_dotted_path_takes_value_and_type_of_the_same_document():
    text = (
        "a: {b.c: 3, d: [1]}\ne: ${a.b.c}\nf: ' x${ e2 }'\ne2: 0.5\ng: ${n}\nn: null\nh: ${e2}${n}"
    )

    values, problems = filled(text)

    assert problems == []
    assert values["e"] == 3
    assert values["f"] == " x0.5"
    assert values["g"] is None
    assert values["h"] == "0.5null"


def test_a_key_may_be_one_that_the_environment_gives_or_that_has_an_escape():
    values, problems = filled("a: ${env:N}\nb: ${a}\nc: x${a}\nd: $${a}\ne: ${d}", N="3")

    assert problems == []
    assert (values["b"], values["c"], values["e"]) == (3, "x3", "${a}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a: ${b}\nb: ${c}\nc: 1",
            "1:1: 'a': 'b' is itself written as ${c}, and references do not",
        ),
        ("a: x${a}", "1:1: 'a': 'a' is itself written as ${a}, and references do not follow each"),
        (
            "a:\n  b: ${a}",
            "2:3: 'a.b': 'a' is a mapping, and ${key} stands for one value; write it",
        ),
        ("alpha: 1\nb: ${alpa}", "2:1: 'b': nothing is written at 'alpa'; did you mean 'alpha'?"),
        ("a: ${env:ABSENT}", "1:1: 'a': environment variable ABSENT is not set; set it, or write"),
        ("a: ${env:}", "1:1: 'a': write ${env:NAME} or ${env:NAME,default}"),
        ("a: [1, 'x${']", "1:8: 'a[1]': '${' without its '}'"),
        (
            "a: [b]\nc: 'x${a}'",
            "2:1: 'c': 'a' is a list, and ${key} stands for one value; write it",
        ),
        (
            "a: 1\nb: ${profile.workspace}",
            "2:1: 'b': ${profile.workspace} is no longer understood; write the value here, or let",
        ),
        (
            "a:\n  b: ${stages.train.outputs.checkpoint/best/rouge2}",
            "2:3: 'a.b': ${stages.train.outputs.checkpoint/best/rouge2} is no longer understood; "
            "write train/best/rouge2",
        ),
        ("a: ${env:BELL}", "1:1: 'a': environment variable BELL: control character U+0007"),
        ("a: ${env:HF_TOKEN}", "1:1: 'a': ${env:HF_TOKEN} would store a secret in the records"),
        ("a: ${env:MY_PASSWORD,x}", "1:1: 'a': ${env:MY_PASSWORD} would store a secret"),
    ],
)
def test_a_bad_reference_is_told_with_its_place(text, message):
    values, problems = filled(text, BELL="\x07", HF_TOKEN="open sesame")

    assert problems[0].startswith(message)
    assert "open sesame" not in str(values) + str(problems)


def test_every_bad_reference_is_told_at_once():
    _, problems = filled("a: ${b}\nb: ${c}\nc: ${env:ABSENT}\nd: ${profile.x}\ne: ${stages}")

    assert [problem.partition(" ")[0] for problem in problems] == [f"{n}:1:" for n in range(1, 6)]


@pytest.mark.parametrize(
    ("long", "referring"),
    [
        ("x" * 1000, "${a}" * 50),
        ("x" * 200_000, "${a}"),
        ("$${" * 60_000, "${a}"),
        ("${env:NONE,}" * 20_000 + "${", "${a}"),
        ("x" * 10, "${env:LONG}" * 20),
    ],
)
def test_references_cannot_be_a_bomb(long, referring):
    """Fault 28: tags, recursion, depth and size are refused."""
    text = f"a: '{long}'\n" + "\n".join(f"b{i}: {referring}" for i in range(1000))

    start = time.process_time()
    values, problems = filled(text, LONG="x" * 100_000)

    assert "references make texts of more than 1,048,576 characters" in problems[-1]
    assert sum(len(str(value)) for value in values.values()) < 3 << 20
    assert time.process_time() - start < 20  # of CPU time, so on a busy machine too


def test_escaped_values_are_left_as_they_are():
    values = {"a": "${x} $${y}", "b": ["${z}", 1]}
    document = read_yaml("{}", "f.yaml")
    document = document.with_part((), type(document)(escape(values)))

    again, problems = interpolate(document, {})

    assert (again.values, problems) == ({"a": "${x} $${y}", "b": ["${z}", 1]}, [])

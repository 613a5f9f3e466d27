"""What `${…}` stands for, and what it may not do."""

from __future__ import annotations

import time

import pytest

from redco_flow.spec.interpolation import Surroundings, escape, interpolate
from redco_flow.spec.strict_yaml import read_yaml


def filled(text: str, **environ: str):
    """Return a document's values and "line:column: message" of each mistake."""
    document, problems = interpolate(read_yaml(text, "f.yaml"), Surroundings(environ))
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


def test_a_dotted_path_takes_value_and_type_of_the_same_document():
    text = "a: {b.c: 3, d: [1, '${e}']}\ne: ${a.b.c}\nf: ${a.d}\ng: x${e}\nh: ${a}"

    values, problems = filled(text)

    assert problems == []
    assert values["e"] == 3
    assert values["f"] == [1, 3]
    assert values["g"] == "x3"
    assert values["h"] == {"b.c": 3, "d": [1, 3]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: ${b}\nb: ${c}\nc: ${a}", "1:1: 'a': references go in a circle: a → b → c → a"),
        ("a: x${a}", "1:1: 'a': references go in a circle: a → a"),
        ("a:\n  b: ${a}", "2:3: 'a.b': references go in a circle: a.b → a.b"),
        ("alpha: 1\nb: ${alpa}", "2:1: 'b': nothing is written at 'alpa'; did you mean 'alpha'?"),
        ("a: ${env:ABSENT}", "1:1: 'a': environment variable ABSENT is not set; set it, or write"),
        ("a: ${env:}", "1:1: 'a': write ${env:NAME} or ${env:NAME,default}"),
        ("a: [1, 'x${']", "1:8: 'a[1]': '${' without its '}'"),
        ("a: {b: 1}\nc: 'x${a}'", "2:1: 'c': '${a}' is no single value"),
        ("a: ${profile.x}", "1:1: 'a': ${profile.x} needs a profile"),
        ("a: ${env:BELL}", "1:1: 'a': environment variable BELL: control character U+0007"),
        ("a: ${env:HF_TOKEN}", "1:1: 'a': ${env:HF_TOKEN} would store a secret in the records"),
        ("a: ${env:MY_PASSWORD,x}", "1:1: 'a': ${env:MY_PASSWORD} would store a secret"),
    ],
)
def test_a_bad_reference_is_told_with_its_place(text, message):
    values, problems = filled(text, BELL="\x07", HF_TOKEN="open sesame")

    assert problems[0].startswith(message)
    assert "open sesame" not in str(values) + str(problems)


def test_a_chain_of_thousands_of_references_is_refused_not_overflowed():
    text = "\n".join(f"a{i}: ${{a{i + 1}}}" for i in range(1000)) + "\na1000: 1"

    _, problems = filled(text)

    assert "references follow each other more than 32 times" in problems[0]


@pytest.mark.parametrize("pattern", ["x${{a{0}}}${{a{0}}}${{a{0}}}${{a{0}}}", "[{0}]"])
def test_references_cannot_be_a_bomb(pattern):
    """Fault 28."""
    if pattern == "[{0}]":
        pattern = "[" + ", ".join(["'${{a{0}}}'"] * 8) + "]"
    text = "a0: [x, x, x, x]\n" if "[" in pattern else "a0: xxxxxxxx\n"
    text += "\n".join(f"a{i}: " + pattern.format(i - 1) for i in range(1, 20))

    start = time.monotonic()
    _, problems = filled(text)

    assert "references make" in problems[0] or "references copy" in problems[0]
    assert time.monotonic() - start < 20


def test_a_profile_s_value_is_taken(load, chain):
    from redco_flow.spec.profile import Profile

    text = chain.replace("128", "${profile.num_cpu_devices}")

    pipeline = load(text, profile=Profile(num_cpu_devices=4))

    assert pipeline.stages["preprocess"].config.max_source_length == 4


@pytest.mark.parametrize(
    ("written", "output"),
    [
        ("${stages.train.outputs.checkpoint}", "checkpoint/last"),
        ("${stages.train.outputs.checkpoint/best/rouge2}", "checkpoint/best/rouge2"),
    ],
)
def test_a_stage_s_output_is_a_reference_to_it(load, chain, written, output):
    pipeline = load(chain.replace("best/rouge2", written))

    assert pipeline.stages["predict"].inputs["checkpoint"][0].output == output


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("${stages.trane.outputs.checkpoint}", "there is no stage 'trane'; did you mean 'train'?"),
        ("${stages.train.outputs.chekpoint}", "stage 'train' has no output 'chekpoint'; did you"),
    ],
)
def test_an_output_that_does_not_exist_is_told_with_its_line(problems, chain, written, message):
    found = problems(chain.replace("best/rouge2", written))

    assert (found[0].line, found[0].column) == (19, 5)
    assert message in found[0].message
    assert len(found) == 1


def test_escaped_values_are_left_as_they_are():
    values = {"a": "${x} $${y}", "b": ["${z}", 1]}
    document = read_yaml("{}", "f.yaml")
    document = document.with_part((), type(document)(escape(values)))

    again, problems = interpolate(document, Surroundings({}))

    assert (again.values, problems) == ({"a": "${x} $${y}", "b": ["${z}", 1]}, [])

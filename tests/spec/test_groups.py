"""`group`: which stages may share one job of a cluster."""

import pytest

from redco_flow.errors import ConfigError
from redco_flow.spec.load import load_pipeline

CHAIN = """\
name: sums
stages:
  one: {kind: script, path: job.py, outputs: [a], group: small}
  two: {kind: script, path: job.py, inputs: {x: one/a}, group: small}
"""
WRONG = """\
name: sums
stages:
  one: {kind: script, path: job.py, outputs: [a], group: small}
  aside: {kind: script, path: job.py, inputs: {x: one/a}, outputs: [a]}
  two: {kind: script, path: job.py, inputs: {x: one/a}, group: small, runs_on: local}
  three: {kind: script, path: job.py, inputs: {x: one/a}, outputs: [a], group: small}
  four: {kind: script, path: job.py, inputs: {x: three/a, y: aside/a}, group: small}
  five: {kind: script, path: job.py, outputs: [a], group: gap}
  six: {kind: script, path: job.py, inputs: {x: five/a}, outputs: [a]}
  seven: {kind: script, path: job.py, inputs: {x: six/a}, group: gap, resources: GPUS}
"""


@pytest.fixture(autouse=True)
def _here(write, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    write("", "job.py")


def test_a_group_is_no_part_of_a_result(load):
    alone = load(CHAIN.replace(", group: small", ""))

    grouped = load(CHAIN)

    assert grouped.stages["two"].config.group == "small"
    assert grouped.stages["two"].settings == alone.stages["two"].settings


def test_what_cannot_share_a_job_is_refused_at_its_group(write):
    with pytest.raises(ConfigError) as raised:
        load_pipeline(write(WRONG.replace("GPUS", "{gpus_per_host: 1}")))

    found = {one.line: one.message for one in raised.value.problems}
    expected = {
        5: "'stages.two.group': 'two' and 'one' of group 'small' differ in runs_on; one job",
        6: "'stages.three.group': 'three' takes nothing from 'two', the stage before it in group",
        7: "'stages.four.group': 'four' also takes from 'aside', which need not have ended when",
        8: "'stages.five.group': 'five' asks for no GPUs and 'seven' of the same group 'gap' does",
        10: "'stages.seven.group': 'six' runs between 'five' and 'seven' of group 'gap' and is",
    }
    assert {line: found[line][: len(text)] for line, text in expected.items()} == expected
    assert found.keys() == expected.keys()

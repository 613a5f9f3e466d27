"""`group`: which stages may share one job of a cluster."""

import pytest

from redco_flow.errors import ConfigError
from redco_flow.spec.load import load_pipeline

CHAIN = """\
name: sums
stages:
  one: {kind: orchestrate_kinds.numbers, group: small}
  two: {kind: orchestrate_kinds.total, group: small}
"""
WRONG = """\
name: sums
stages:
  one: {kind: orchestrate_kinds.numbers, group: small}
  aside: {kind: orchestrate_kinds.total, dataset: one}
  two: {kind: orchestrate_kinds.total, dataset: one, group: small, runs_on: local}
  three: {kind: orchestrate_kinds.total, dataset: one, group: small}
  four: {kind: orchestrate_kinds.score, metrics: [three, aside], group: small}
  five: {kind: orchestrate_kinds.numbers, group: gap}
  six: {kind: orchestrate_kinds.total, dataset: five}
  seven: {kind: orchestrate_kinds.score, metrics: [six], group: gap}
"""


def test_a_group_is_no_part_of_a_result(load):
    alone = load(CHAIN.replace(", group: small", ""))

    grouped = load(CHAIN)

    assert grouped.stages["two"].config.group == "small"
    assert grouped.stages["two"].settings == alone.stages["two"].settings


def test_what_cannot_share_a_job_is_refused_at_its_group(write):
    with pytest.raises(ConfigError) as raised:
        load_pipeline(write(WRONG))

    elsewhere, parallel, waits, gap = sorted(raised.value.problems, key=lambda one: one.line)
    assert (elsewhere.line, parallel.line, waits.line, gap.line) == (5, 6, 7, 10)
    assert "'six' runs between 'five' and 'seven' of group 'gap' and is not in it" in gap.message
    assert "'stages.two.group': 'two' and 'one' of group 'small' differ in runs_on" in (
        elsewhere.message
    )
    assert "'three' takes nothing from 'two', the stage before it" in parallel.message
    assert "'four' also takes from 'aside', which need not have ended" in waits.message

"""What the processes of a stage compare before any of them runs it."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from redco_flow.launch.call import Call
from redco_flow.launch.processes import RankInfo
from redco_flow.launch.rendezvous import CannotMeet, Rendezvous
from redco_flow.runtime.process_group import facts_of

CALL = Call(
    run="run-1",
    pipeline="pipeline",
    stage="train",
    kind="train",
    attempt=1,
    config={"learning_rate": 0.1, "schedule": {"type": "linear"}, "best": ["rouge2"]},
    inputs={},
    fingerprint="f" * 64,
    ingredients={"code": {"redco_flow.stages.train.config": "a" * 64}},
    workspace="/nowhere",
)


@pytest.fixture
def meet(tmp_path):
    """Let two ranks meet, each with its call and environment; what each is told."""

    def one(rank, call, environ):
        rank_info = RankInfo(rank=rank, num_processes=2)
        try:
            return Rendezvous(tmp_path, rank_info, dict(facts_of(call, environ)), 20).meet()
        except CannotMeet as refusal:
            return str(refusal)

    def meet(calls, environs=({}, {})):
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(one, (0, 1), calls, environs))

    return meet


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"config": {**CALL.config, "learning_rate": 0.2}}, "config.learning_rate is '0.1' on ran"),
        ({"config": {**CALL.config, "schedule": {"type": "wsd"}}}, "config.schedule.type is "),
        ({"config": {**CALL.config, "best": ["bleu"]}}, "config.best is "),
        ({"config": {**CALL.config, "seed": 1}}, "config.seed is 'not set' on rank 0, '1' on rank"),
        ({"fingerprint": "e" * 64}, "fingerprint is "),
        (
            {"ingredients": {"code": {"redco_flow.stages.train.config": "b"}}},
            "code.redco_flow.stages.tr",
        ),
    ],
    ids=["number", "nested", "list", "one has more", "fingerprint", "code"],
)
def test_ranks_whose_calls_differ_all_stop_and_the_key_is_named(meet, changes, told):
    """Engine case 18: all ranks stop before step 0, and the key is named."""
    first, second = meet((CALL, replace(CALL, **changes)))

    assert first == second
    assert f"so none started: {told}" in first


def test_ranks_may_differ_in_variables_that_change_no_result(meet):
    """Engine case 18: of the environment, JAX's settings alone must agree."""
    environs = ({"HOME": "/a", "JAX_COMPILATION_CACHE_DIR": "/a"}, {"HOME": "/b"})

    first, second = meet((CALL, CALL), environs)

    assert first.coordinator
    assert second.coordinator


@pytest.mark.parametrize("variable", ["XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_ENABLE_X64"])
def test_ranks_whose_compilers_would_be_told_otherwise_all_stop(meet, variable):
    """Engine case 18: each rank would compile another program."""
    first, second = meet((CALL, CALL), ({variable: "--a"}, {}))

    assert first == second
    assert f"environment.{variable} is '--a' on rank 0, 'not set' on rank 1" in first

"""Limits of what other people's files may make a process compute."""

import os
import re
import time

import pytest

from redco_flow import bounded
from redco_flow.bounded import BoundedError, BoundedProcess, LimitExceeded, while_growing, within


def test_a_call_that_never_ends_is_ended_and_the_next_one_is_answered():
    process = BoundedProcess("re:findall", seconds=0.3)
    slow = {"pattern": "(a+)+$", "string": "a" * 40 + "b"}
    fast = {"pattern": "a+", "string": "aab"}

    answers = process.ask_many([fast, slow, fast, slow, fast])

    assert answers[::2] == [["aa"]] * 3
    assert [str(one) for one in answers[1::2]] == ["it needs more than 0.3 s of CPU time"] * 2
    assert all(isinstance(one, LimitExceeded) for one in answers[1::2])
    process.close()


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        ("builtins:bytearray", {"source": 1 << 32}, "more than 64 MiB of memory"),
        ("textwrap:indent", {"text": "a\n" * 99999, "prefix": "b" * 99}, "characters of at most"),
        ("textwrap:indent", {"text": 5, "prefix": ""}, "'int' object has no attribute"),
        ("no.such.module:name", {}, "No module named 'no'"),
    ],
)
def test_memory_and_answers_have_limits_and_errors_are_passed_on(function, arguments, message):
    process = BoundedProcess(function, seconds=5.0, memory_mib=64, most_characters=1 << 20)

    with pytest.raises(BoundedError, match=message):
        process.ask(**arguments)

    process.close()


def test_the_child_has_no_secret_and_no_module_of_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "bait.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")

    assert bounded.call("os:getenv", seconds=5.0, key="HF_TOKEN") is None
    assert bounded.call("os:getcwd", seconds=5.0) == "/"
    with pytest.raises(BoundedError, match="No module named 'bait'"):
        bounded.call("bait:anything", seconds=5.0)


def test_an_exchange_that_takes_too_long_is_left_behind():
    begun = time.monotonic()

    with pytest.raises(TimeoutError, match=re.escape("within 0.1 s")):
        within(0.1, lambda: time.sleep(1.0))

    assert time.monotonic() - begun < 0.9
    assert within(5.0, os.getpid) == os.getpid()
    with pytest.raises(ZeroDivisionError):
        within(5.0, lambda: 1 // 0)


def test_a_download_that_grows_too_slowly_is_left_behind():
    sizes = iter([0, 100, 150, 151])
    with pytest.raises(TimeoutError, match=re.escape("50 bytes in 0.05 s")):
        while_growing(
            lambda: time.sleep(1), lambda: next(sizes), bytes_per_second=1e3 + 1, seconds=0.05
        )

    assert while_growing(os.getpid, lambda: 0, bytes_per_second=1, seconds=5.0) == os.getpid()


def test_a_pattern_that_takes_exponential_time_is_a_problem_and_not_a_hang():
    assert bounded.search_problem([r"(q|k|v)_proj"], ["q_proj", "o_proj"]) is None

    problem = bounded.search_problem([r"(a+)+$"], ["a" * 60 + "!"])

    assert problem is not None
    assert "more than 2 s of CPU time" in problem

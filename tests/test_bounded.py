"""Limits of what other people's files may make a process compute."""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
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
    answered = threading.Event()

    with pytest.raises(TimeoutError, match=re.escape("within 0.1 s")):
        within(0.1, answered.wait)

    answered.set()
    assert within(200.0, os.getpid) == os.getpid()
    with pytest.raises(ZeroDivisionError):
        within(200.0, lambda: 1 // 0)


def test_a_download_that_grows_too_slowly_is_left_behind():
    sizes, ended = iter([0, 100, 150, 151]), threading.Event()
    with pytest.raises(TimeoutError, match=re.escape("50 bytes in 0.05 s")):
        while_growing(ended.wait, lambda: next(sizes), bytes_per_second=1e3 + 1, seconds=0.05)

    ended.set()
    assert while_growing(os.getpid, lambda: 0, bytes_per_second=1, seconds=400.0) == os.getpid()


def test_a_pattern_that_takes_exponential_time_is_a_problem_and_not_a_hang():
    assert bounded.search_problem([r"(q|k|v)_proj"], ["q_proj", "o_proj"]) is None

    problem = bounded.search_problem([r"(a+)+$"], ["a" * 60 + "!"])

    assert problem is not None
    assert "more than 2 s of CPU time" in problem


def test_after_an_interruption_no_question_gets_the_answer_to_another():
    process = BoundedProcess("re:findall", seconds=20.0)
    fast = {"pattern": "a+", "string": "aab"}
    assert process.ask(**fast) == ["aa"]

    def interrupt(*_):
        raise InterruptedError

    before = signal.signal(signal.SIGUSR1, interrupt)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGUSR1))

    def ask_and_be_interrupted():
        timer.start()
        process.ask(pattern="(b+)+$", string="b" * 40 + "c")

    with pytest.raises(InterruptedError):
        ask_and_be_interrupted()
    timer.join()
    signal.signal(signal.SIGUSR1, before)

    assert process.ask(**fast) == ["aa"]
    process.close()


FORK = """
import os, threading, time
from redco_flow.bounded import BoundedProcess

process = BoundedProcess("re:findall", seconds=1.0)
fast, slow = {"pattern": "a+", "string": "aab"}, {"pattern": "(a+)+$", "string": "a" * 40 + "b"}
assert process.ask(**fast) == ["aa"]
thread = threading.Thread(target=process.ask_many, args=([slow],))
thread.start()
time.sleep(0.2)
child = os.fork()
if child == 0:
    os._exit(0 if process.ask(**fast) == ["aa"] else 1)
thread.join()
assert os.waitpid(child, 0)[1] == 0
assert process.ask(**fast) == ["aa"]
print(process._child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def is_running(pid):
    """Whether it has not ended; where nothing reaps orphans it stays a zombie."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_process_that_is_forked_in_the_middle_of_a_question_asks_its_own_child():
    """And no child outlives its parent, which is killed here."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )

    assert done.returncode == -signal.SIGKILL, done.stderr
    deadline = time.monotonic() + 400
    while is_running(int(done.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_the_child_imports_the_package_that_its_parent_has_imported(tmp_path):
    """A job runs from a copy of the code, next to an installed package of another version."""
    copy = shutil.copytree(Path(bounded.__file__).parent, tmp_path / "redco_flow")
    (copy / "only_here.py").write_text("def answer():\n    return __file__\n")
    program = (
        "from redco_flow import bounded; "
        "print(bounded.call('redco_flow.only_here:answer', seconds=5.0))"
    )

    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.stdout.strip() == str(copy / "only_here.py"), done.stderr

"""Answers found right or wrong by a rule or a program of the user's, which may do anything."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from stage_kinds import compare, evaluate

from redco_flow.records import read_json_lines
from redco_flow.runtime.context import Output, StageOutputs, Stopped
from redco_flow.stages.artifacts.predictions import PredictionsSummary, write_predictions
from redco_flow.stages.evaluate.config import Config, code_files, data_files, data_problems
from redco_flow.stages.evaluate.judge import CannotJudge, normal_number
from redco_flow.stages.evaluate.judge_program import JudgeProgram
from redco_flow.tracking.code_digest import source_digests
from redco_flow.tracking.metrics_artifact import Prediction, read_metrics

SUMMARY = {
    "split": "test",
    "generation": {"num_return_sequences": 4},
    "checkpoint": "c" * 64,
    "step": 7,
    "data": "d" * 64,
    "config": "e" * 64,
    "most_frequent_target": {},
}
OF_THE_GUIDE = Path(__file__).parents[2] / "docs/examples/judge_python.py"
TEST = "assert double(4) == 8, 'double(4) is not 8'"
PROMPT = "def double(x):\n"


def predictions(bench, rows, name="predictions", prompt="?"):
    """Publish answers: of each row its reference and its texts."""
    lines = [
        Prediction(f"test.jsonl:{i}", prompt, texts[0], [reference], predictions=list(texts))
        for i, (reference, texts) in enumerate(rows)
    ]
    folder = bench.root / name
    write_predictions(folder, lines, PredictionsSummary(num_examples=len(lines), **SUMMARY))
    return bench.publish(StageOutputs({"predictions": Output("predictions", folder)}))[
        "predictions"
    ]


def judged(bench, rows, judge, name="predictions", prompt="?"):
    settings = {"metrics": ["pass_at_k", "majority_at_k"], "judge": judge}
    inputs = {"predictions": [predictions(bench, rows, name, prompt)]}
    return bench.run(evaluate, settings, inputs)["metrics"]


def answers_of(artifact):
    return [line["answers"] for line in read_json_lines(artifact.path / "judged.jsonl")]


SUMS = [
    ("#### 1,200", ["so it is #### 1200", "#### 1200.0", "no idea", "#### 12"]),
    ("#### 7", ["#### 8", "first #### 7 then #### 8", "#### 8", "#### 7"]),
    ("3", ["#### 6/2", "#### 4", "#### $3", "#### 3"]),
]
RULE = {"k": [1, 4], "extract": r"#### *(\S+)", "compare": "number"}


def test_answers_are_taken_out_of_texts_and_compared_as_numbers(bench):
    summary, lines = read_metrics(judged(bench, SUMS, RULE).path)

    assert summary.metrics == pytest.approx(
        {
            "pass@1": 100 * (2 / 4 + 1 / 4 + 3 / 4) / 3,
            "pass@4": 100.0,
            "majority@1": 100 * 2 / 3,
            "majority@4": 100 * 2 / 3,
        }
    )
    assert summary.directions == dict.fromkeys(summary.metrics, "max")
    assert summary.judged == {"no_answer": 1, "right": 6, "wrong": 5}
    assert [line["scores"]["pass@1"] for line in lines] == [50.0, 25.0, 75.0]


def test_judged_scores_have_bootstrap_intervals_as_others_have(bench):
    better = judged(bench, SUMS * 8, RULE, "better")
    worse = judged(bench, [(wanted, ["#### 0"] * 4) for wanted, _ in SUMS * 8], RULE, "worse")

    found = bench.run(compare, {"num_resamples": 500}, {"metrics": [better, worse]})["metrics"]

    pairs = json.loads((found.path / "comparison.json").read_text())["pairs"]
    (pair,) = [one for one in pairs if one["key"] == "pass@1"]
    assert pair["difference"] == pytest.approx(50.0)
    assert 40 < pair["low"] < 50 < pair["high"] < 60


@pytest.mark.parametrize(
    ("text", "same_as"),
    [("1,234.50", "1234.5"), ("$ 3", "3"), ("5 %", "5"), ("2/4", "0.5"), ("-7.", "-7"),
     ("1e3", "1000"), (".5", "0.50"), ("+4", "4"), ("007", "7"), ("\u22124", "-4"),
     ("1 234 567", "1234567"), ("12,34,567", "1234567"), ("- 5", "-5"), ("1 / 4", ".25"),
     ("$18,", "18"), ("**12,345,678.90**", "12345678.9")],
)  # fmt: skip
def test_equal_numbers_are_one_however_they_are_written(text, same_as):
    assert normal_number(text) == normal_number(same_as) is not None


@pytest.mark.parametrize(
    "text",
    ["", "seven", "1/0", "1.2.3", "1e9999", "nan", "3 apples", "--1", "3,5", "0,125", "3 5",
     "1,2345", "1,234 567", ",5", "1\n200", "1" + 50_000 * " " + "2", "1 " + 20_000 * "11 " + "x"],
    ids=lambda text: text[:9],
)  # fmt: skip
def test_what_is_no_number_is_none(text):
    assert normal_number(text) is None


def test_fewer_answers_than_k_are_told_before_anything_is_judged(bench):
    with pytest.raises(CannotJudge, match=r"test.jsonl:0 has 4 answers, and judge.k asks for 5"):
        judged(bench, SUMS, RULE | {"k": [5]})


ENDLESS = {
    "never ends": "    while True: pass",
    "waits": "    import time; time.sleep(1000)",
    # Not for ever: root has no limit of processes.
    "forks": "    import os, time\n    for _ in range(6): os.fork()\n    time.sleep(4321.5)",
}
WILD = {
    "right": "    return 2 * x",
    "wrong": "    return 3 * x",
    "eats memory": "    return bytes(1 << 40)",
    "ends itself": "    import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    "crashes": "    import ctypes; ctypes.string_at(0)",
    "leaves processes": (
        "    import os\n"
        "    for _ in range(3):\n"
        "        if os.fork() == 0:\n"
        "            os.setsid()\n"
        "            if os.fork() == 0: os.execvp('sleep', ['sleep', '4321.5'])\n"
        "            os._exit(0)\n"
        "    return 2 * x"
    ),
    "ends the program": "    raise SystemExit(0)",
}


@pytest.mark.slow
def test_programs_that_hang_fork_eat_memory_or_die_are_not_right_and_are_counted(bench):
    judge = {"program": str(OF_THE_GUIDE), "memory_mib": 256}

    # Those that end have time enough on a busy machine too.
    artifact = judged(
        bench, [(TEST, list(WILD.values()))], judge | {"timeout_seconds": 120.0}, prompt=PROMPT
    )
    seconds = {"timeout_seconds": 1.0}
    endless = judged(
        bench, [(TEST, list(ENDLESS.values()))], judge | seconds, "endless", prompt=PROMPT
    )

    (answers,) = answers_of(artifact)
    ended = {name: one["ended"] for name, one in zip(WILD, answers, strict=True)}
    assert ended == {
        "right": "right",
        "wrong": "wrong",
        "eats memory": "out_of_memory",
        "ends itself": "killed",
        "crashes": "killed",
        "leaves processes": "right",
        "ends the program": "wrong",
    }
    assert answers[1]["said"] == "AssertionError: double(4) is not 8"
    assert [one["ended"] for one in answers_of(endless)[0]] == ["timed_out"] * 3
    assert read_metrics(endless.path)[0].judged["timed_out"] == 3
    assert processes_with("4321.5") == []


def processes_with(word):
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if word.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


def test_a_program_has_an_empty_directory_and_none_of_our_environment(bench, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "a secret")
    program = bench.root / "judge.sh"
    program.write_text(
        "#!/bin/sh\nread -r question\n"
        'echo "${question%, *} ${WANDB_API_KEY-none} $(ls -A | wc -l)" >&2\n'
        "exit 3\n"
    )
    program.chmod(0o755)

    end = JudgeProgram(program, 120.0, 256).ask({"answer": "four"})

    assert end.ended == "wrong"
    assert end.said == '{"answer": "four" none 0'


def test_a_program_has_no_network(bench):
    program = bench.root / "judge.py"
    program.write_text(
        "import json, socket, sys\n"
        "socket.create_connection(('127.0.0.1', json.load(sys.stdin)['port']), 5)\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        end = JudgeProgram(program, 120.0, 256).ask({"port": server.getsockname()[1]})

    assert end.said == "PermissionError: [Errno 1] Operation not permitted"


def test_exit_code_0_without_the_proof_is_not_right(bench):
    program = bench.root / "judge.sh"
    program.write_text("#!/bin/sh\nexit 0\n")
    program.chmod(0o755)

    end = JudgeProgram(program, 120.0, 256).ask({"answer": "four"})

    assert end.ended == "wrong"
    assert "did not print the question's proof" in end.said


def test_a_judge_is_part_of_the_fingerprint_with_the_modules_beside_it(tmp_path):
    program, helper = tmp_path / "judge.py", tmp_path / "helper.py"
    program.write_text("import helper\n")
    helper.write_text("LIMIT = 1\n")
    config = Config(metrics=["pass_at_k"], judge={"program": str(program)})
    before = source_digests(code_files(config))

    helper.write_text("LIMIT = 2\n")

    after = source_digests(code_files(config))
    assert {name for name in after if after[name] != before[name]} == {"helper.py"}
    assert data_files(config) == [program]


def test_a_judge_that_cannot_start_is_told_before_the_run(tmp_path):
    broken, plain, unproven = (tmp_path / name for name in ("judge.py", "judge", "exit.py"))
    broken.write_text("def\n")
    plain.write_text("exit 0\n")
    unproven.write_text("import sys\n")

    (found,) = data_problems(Config(metrics=["pass_at_k"], judge={"program": str(broken)}))
    (other,) = data_problems(Config(metrics=["pass_at_k"], judge={"program": str(plain)}))

    assert found[0] == ("judge", "program")
    assert "is not Python" in found[1]
    assert "neither a .py file nor executable" in other[1]
    (third,) = data_problems(Config(metrics=["pass_at_k"], judge={"program": str(unproven)}))
    assert "never uses the question's 'proof'" in third[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"metrics": ["pass_at_k"]}, "is needed for pass_at_k"),
        ({"metrics": ["bleu"], "judge": {}}, "is for metrics of several answers"),
        ({"metrics": ["pass_at_k"], "judge": {"extract": "("}}, "is not a regex"),
        ({"metrics": ["pass_at_k"], "judge": {"k": [2, 2]}}, "names a number twice"),
        ({"metrics": ["pass_at_k"], "judge": {"memory_mib": 9}}, "there is no 'program'"),
        (
            {"metrics": ["pass_at_k"], "judge": {"program": "/bin/true", "compare": "number"}},
            "a program compares by itself",
        ),
    ],
)
def test_settings_of_a_judge_that_mean_nothing_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        Config.from_json(settings)


@pytest.mark.parametrize(
    ("pattern", "slow", "fast"),
    [
        (r"(a+)+$", "a" * 40 + "!", "aaa"),
        (r"\\boxed\{(.*)\}", "\\boxed{" * 150_000, r"so \boxed{aaa}"),
    ],
)
def test_texts_on_which_a_pattern_takes_too_long_have_no_answer(bench, caplog, pattern, slow, fast):
    settings = {"k": [1], "extract": pattern, "timeout_seconds": 0.5, "num_workers": 1}

    artifact = judged(bench, [("aaa", [slow, fast])], settings)

    (answers,) = answers_of(artifact)
    assert [one["ended"] for one in answers] == ["no_answer", "right"]
    assert answers[0]["said"] == "judge.extract took longer than judge.timeout_seconds"
    assert "judge.extract took more than 0.5 s on 1 texts" in caplog.text


LONELY = """
import os, threading, time
from redco_flow.stages.evaluate.extraction import Extraction

extract = Extraction("(a+)+$", 60.0)
threading.Thread(target=extract, args=("a" * 60 + "!",), daemon=True).start()
children = ""
while not children:
    time.sleep(0.1)
    for task in os.listdir("/proc/self/task"):
        children += open(f"/proc/self/task/{task}/children").read()
time.sleep(0.5)
print(children, flush=True)
os.kill(os.getpid(), 9)
"""


def is_running(pid):
    """Whether it has not ended; where nothing reaps orphans it stays a zombie."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_match_that_never_ends_ends_with_the_process_that_waits_for_it():
    done = subprocess.run(
        [sys.executable, "-c", LONELY], capture_output=True, text=True, timeout=400, check=False
    )

    deadline = time.monotonic() + 400
    while is_running(int(done.stdout)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_stop_ends_the_judging(bench):
    config = Config(metrics=["pass_at_k"], judge=RULE)
    context = bench.context(inputs={"predictions": [predictions(bench, SUMS)]})
    context.stop.requested = True

    with pytest.raises(Stopped):
        evaluate.run(context, config)

"""A user's own script, run in the stage's process: its options, its errors, its checkpoints."""

import json
import subprocess
import sys

import pytest
from stage_kinds import script

from redco_flow.runtime.context import Stopped
from redco_flow.stages.script.run import ScriptFailed

OPTIONS = """
import argparse, json
from pathlib import Path
from numbers_beside import twice

parser = argparse.ArgumentParser()
parser.add_argument("--size", type=int)
parser.add_argument("--widths", type=int, nargs="*")
parser.add_argument("--loud", action=argparse.BooleanOptionalAction, default=True)
parser.add_argument("--shift", type=float)
parser.add_argument("--rows", type=Path)
parser.add_argument("--table", type=Path)
a = parser.parse_args()
found = [twice(a.size), a.widths, a.loud, a.shift, json.loads(a.rows.read_text())]
(a.table / "table.json").write_text(json.dumps(found))
"""
# A loop of one's own: the state is a number that depends on every step before.
LOOP = """
import argparse
from pathlib import Path
import numpy as np
from redco_flow import script_context

parser = argparse.ArgumentParser()
parser.add_argument("--num_steps", type=int, default=4)
parser.add_argument("--params", type=Path, default="made")
a = parser.parse_args()
script = script_context()
checkpointer = script.checkpointer()
state, start = {"x": np.zeros(())}, 0
if checkpointer.steps():
    state, commit = checkpointer.restore(like=state)
    start = commit.step
print("begins at", start)
for step in range(start + 1, a.num_steps + 1):
    state = {"x": state["x"] * 0.5 + step}
    checkpointer.save(step, state, cursor={})
    checkpointer.wait()
    script.log(step, total_steps=a.num_steps, loss=1 / step)
    script.stop_if_asked()
script.metrics(score=float(state["x"]))
a.params.mkdir(exist_ok=True)
np.save(a.params / "x.npy", state["x"])
"""


@pytest.fixture
def run(bench, tmp_path):
    """Write a script and run it as a stage."""

    def run_script(text, settings=(), **options):
        path = tmp_path / "work.py"
        path.write_text(text)
        return bench.run(script, {"path": str(path), **dict(settings)}, **options)

    return run_script


def test_a_script_gets_its_options_imports_from_beside_it_and_makes_artifacts(run, tmp_path):
    (tmp_path / "numbers_beside.py").write_text("def twice(x): return 2 * x\n")
    (tmp_path / "rows.json").write_text("[1]")
    before = list(sys.path), list(sys.argv)

    made = run(
        OPTIONS,
        {
            "arguments": {"size": 3, "widths": [4, 5], "loud": False, "shift": -1e-5},
            "inputs": {"rows": str(tmp_path / "rows.json")},
            "outputs": ["table"],
        },
    )

    table = made["table"].path / "table.json"
    assert json.loads(table.read_text()) == [6, [4, 5], False, -1e-5, [1]]
    assert made["table"].kind == "table"
    assert (sys.path, sys.argv) == before


def test_an_error_is_told_with_the_scripts_file_and_line(run, tmp_path):
    with pytest.raises(ScriptFailed) as caught:
        run("import json\n\ndef f():\n    json.loads('{')\n\nf()\n")

    assert f"work.py failed at {tmp_path}/work.py:4: JSONDecodeError: " in str(caught.value)


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("import sys; sys.exit(3)", "work.py:1 with code 3"),
        ("raise SystemExit('no rows')", "work.py:1 saying: no rows"),
        (
            "import argparse; argparse.ArgumentParser().parse_args(['--x'])",
            "work.py:1 with code 2",
        ),
    ],
)
def test_an_exit_that_is_no_success_fails_the_stage(run, ending, said):
    with pytest.raises(ScriptFailed) as caught:
        run(ending)

    assert said in str(caught.value)


def test_an_exit_with_code_0_is_a_success(run):
    assert run("import sys; sys.exit(0)") == {}


def test_each_declared_output_must_hold_a_file(run):
    with pytest.raises(ScriptFailed, match="wrote no file for table, curve"):
        run("pass", {"outputs": ["table", "curve"]})


def test_what_an_earlier_attempt_wrote_is_no_output_of_this_one(run):
    writes = "import sys; open(sys.argv[2] + '/a', 'w').close()"
    run(writes, {"outputs": ["table"]}, work="same")

    with pytest.raises(ScriptFailed, match="wrote no file for table"):
        run("pass", {"outputs": ["table"]}, work="same")


def test_a_loop_of_ones_own_stops_and_goes_on_from_its_checkpoint(run, bench, stop_at_look, capfd):
    whole = run(LOOP, {"outputs": ["params"]})
    bench_context = bench.context
    bench.context = lambda *args, **rest: _stopping(bench_context(*args, **rest), stop_at_look(2))
    with pytest.raises(Stopped):
        run(LOOP, {"outputs": ["params"]}, work="loop")
    assert [record["step"] for record in bench.records()] == [1, 2]
    bench.context = bench_context

    resumed = run(LOOP, {"outputs": ["params"]}, work="loop")

    assert [record["step"] for record in bench.records()] == [3, 4]
    assert resumed["params"].id == whole["params"].id
    assert capfd.readouterr().out.split("\n")[:3] == ["begins at 0", "begins at 0", "begins at 2"]


def _stopping(context, stop):
    context.stop = stop
    return context


def test_metrics_are_what_was_logged_last_and_what_the_script_says(bench, tmp_path):
    (tmp_path / "work.py").write_text(LOOP)
    config = script.Config(path=str(tmp_path / "work.py"), outputs=["params"])

    outputs = script.run(bench.context(), config)

    assert outputs.metrics == {"loss": 0.25, "score": 0.5 * (0.5 * (0.5 + 2) + 3) + 4}


def test_a_second_checkpointer_is_refused(run):
    with pytest.raises(ScriptFailed, match=r"work\.py:4: ValueError: a script has one"):
        run(
            "from redco_flow import script_context\n"
            "script = script_context()\n"
            "script.checkpointer()\n"
            "script.fit_options()\n"
        )


@pytest.mark.slow
def test_the_same_script_runs_by_hand_and_goes_on_where_the_same_command_stopped(tmp_path):
    (tmp_path / "work.py").write_text(LOOP)

    def by_hand(*words):
        done = subprocess.run(
            [sys.executable, "work.py", *words], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert [by_hand(), by_hand(), by_hand("--num_steps", "2")] == [
        "begins at 0",
        "begins at 4",
        "begins at 0",
    ]
    assert len(list((tmp_path / "out").glob("*/metrics.jsonl"))) == 2

"""`redco-flow chat`: a checkpoint answers in the terminal what it answers in a prediction."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from stage_kinds import predict, preprocess, train

from redco_flow.cli.main import run_command
from redco_flow.stages.artifacts.predictions import read_predictions

WORDS = ["one", "two", "three", "four", "five", "six"]
QUESTION = "three five?"
MODEL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 128,
}


def row(question, answer, more):
    turns = [("user", question), ("assistant", answer), ("user", "And?"), ("assistant", more)]
    return {"messages": [{"role": role, "content": text} for role, text in turns]}


@pytest.fixture(scope="module")
def trained(shared_bench):
    """A dataset of conversations, and a LLaMA that has read it once."""
    path = shared_bench.root / "chats.jsonl"
    rows = [row(f"{a} {b}?", b, a) for a in WORDS for b in WORDS]
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    tokenizer = {"train": {"vocab_size": 280, "type": "bpe"}}
    data = {"train": str(path), "tokenizer": tokenizer, "test_fraction": 0.2}
    recipe = {"recipe": "chat"}
    dataset = shared_bench.run(preprocess, recipe | {"data": data})["dataset"]
    settings = {"num_epochs": 1, "global_batch_size": 8, "learning_rate": 1e-2}
    settings |= {"model": {"family": "llama", "config": MODEL}}
    made = shared_bench.run(train, recipe | settings, {"dataset": [dataset]})
    return dataset, made["checkpoint/last"]


@pytest.fixture
def words(shared_bench, trained):
    workspace = str(shared_bench.root / "workspace")
    return ["chat", trained[1].id, "-w", workspace, "--max-new-tokens", "9"]


@pytest.mark.slow
def test_each_line_is_asked_with_all_turns_before_it(words):
    run = subprocess.run(
        [sys.executable, "-m", "redco_flow.cli.main", *words, "--json"],
        input=f"{QUESTION}\n\n/new\n{QUESTION}\nAnd?\n",
        capture_output=True,
        text=True,
        check=True,
    )

    first, again, second = map(json.loads, run.stdout.splitlines())
    assert first["text"] == again["text"]
    assert second["num_prompt_tokens"] > first["num_prompt_tokens"] + 9
    assert first["num_tokens"] <= 9


@pytest.mark.slow
def test_a_prompt_gets_the_answer_that_predict_gives_to_it(shared_bench, trained, words, capsys):
    dataset, checkpoint = trained
    one = {"messages": [{"role": "user", "content": QUESTION}]}
    one["messages"].append({"role": "assistant", "content": "five"})
    path = shared_bench.root / "one.jsonl"
    path.write_text(json.dumps(one) + "\n")
    data = {"train": str(path), "test": str(path), "validation_fraction": 0.0}
    given = {"tokenizer_of": [dataset]}
    asked = shared_bench.run(preprocess, {"recipe": "chat", "data": data}, given)["dataset"]
    settings = {"recipe": "chat", "max_target_length": 9}
    inputs = {"dataset": [asked], "checkpoint": [checkpoint]}
    predicted = shared_bench.run(predict, settings, inputs)["predictions"]
    (line,) = read_predictions(predicted.path)[0]

    assert run_command([*words, "--message", QUESTION]) == 0

    assert capsys.readouterr().out.strip() == line.prediction.strip()


@pytest.mark.slow
def test_in_a_terminal_a_conversation_begins_anew_and_ends_when_asked(words):
    main, other = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "redco_flow.cli.main", *words],
        stdin=other,
        stdout=other,
        stderr=other,
        start_new_session=True,
    )
    os.close(other)
    said = ""

    def read_until(pattern):
        nonlocal said
        deadline = time.monotonic() + 400
        while not re.search(pattern, said, re.DOTALL):
            assert time.monotonic() < deadline, said
            said += os.read(main, 4096).decode()

    read_until(r"up to 128 tokens.*> $")
    said = ""
    os.write(main, f"{QUESTION}\n".encode())
    read_until(rf"{re.escape(QUESTION)}.*\n.*\n.*> $")
    for _ in range(9):  # until the model can read no more
        os.write(main, b"And?\n")
        said = ""
        read_until(r"And\?.*> $")
    assert "begin a new one" in said
    said = ""
    os.write(main, b"/new\n" + f"{QUESTION}\n".encode())
    read_until(rf"{re.escape(QUESTION)}.*\n.*> $")
    assert "begin a new one" not in said
    os.write(main, b"/quit\n")
    assert process.wait(200) == 0
    os.close(main)


@pytest.mark.slow
def test_ctrl_c_ends_both_processes(words):
    # What a shell runs in the background ignores Ctrl-C, and so would all that it starts.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "redco_flow.cli.main", *words, "--message", QUESTION],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    deadline = time.monotonic() + 400
    found = ""
    while not found and time.monotonic() < deadline:
        found = children.read_text()
        time.sleep(0.05)

    os.killpg(process.pid, signal.SIGINT)

    assert process.wait(200) != 0
    assert found
    assert not any(Path("/proc", pid).exists() for pid in found.split())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--top-k", "3"], "without --temperature, --top-k would change nothing"),
        (["--temperature", "0"], "--temperature 0.0 must be above 0"),
        (["--temperature", "1", "--top-p", "2"], "--top-p 2.0 is a share: at most 1"),
        (["--max-new-tokens", "0"], "--max-new-tokens 0 must be above 0"),
        (["--template", "thinking"], "give KEY=VALUE"),
    ],
)
def test_options_that_cannot_be_are_refused_before_anything_is_loaded(
    tmp_path, capsys, more, message
):
    assert run_command(["chat", "train", "-w", str(tmp_path), *more]) == 2

    assert message in capsys.readouterr().err

"""`redco-flow chat`: a checkpoint answers in the terminal what it answers in a prediction."""

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from threading import Event

import pytest
from stage_kinds import predict, preprocess, train
from tokenizers import Tokenizer, decoders, models

from redco_flow.cli.main import run_command
from redco_flow.orchestrate.checkpoints.model_server import ModelServer
from redco_flow.stages.artifacts.predictions import read_predictions
from redco_flow.stages.predict.conversation import GrowingAnswer, Question
from redco_flow.text.tokenizer import TextTokenizer
from tests.text.chat_tokenizers import make_tokenizer

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


@pytest.fixture(scope="module")
def words(shared_bench, trained):
    workspace = str(shared_bench.root / "workspace")
    return ["chat", trained[1].id, "-w", workspace, "--max-new-tokens", "9"]


@pytest.fixture(scope="module")
def answer(words):
    """What `redco-flow chat` says to the question."""
    command = [sys.executable, "-m", "redco_flow.cli.main", *words, "--message", QUESTION]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return run.stdout.strip()


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
def test_a_prompt_gets_the_answer_that_predict_gives_to_it(shared_bench, trained, answer):
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

    assert answer == line.prediction.strip()


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


@pytest.fixture(scope="module")
def served(shared_bench, trained):
    """Asks a checkpoint that `redco-flow serve-model` serves: (path, body) -> status, text."""
    words = ["serve-model", trained[1].id[:12], "-w", str(shared_bench.root / "workspace")]
    process = subprocess.Popen(
        [sys.executable, "-m", "redco_flow.cli.main", *words, "--port", "0"],
        stderr=subprocess.PIPE,
        text=True,
    )
    url = next(line.split()[0] for line in process.stderr if line.startswith("http"))

    def ask(path, body, **headers):
        headers = {"Content-Type": "application/json"} | headers
        request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=400) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    ask.url = url
    yield ask
    process.terminate()
    assert process.wait(200) == 0


@pytest.mark.slow
def test_a_served_model_gives_the_answer_of_chat_by_openais_api(served, answer):
    asked = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 9, "temperature": 0}

    status, text = served("/chat/completions", asked)
    stopping = asked | {"stop": [answer[2:4], "never said"]}
    cut = json.loads(served("/chat/completions", stopping)[1])

    found = json.loads(text)
    assert (status, found["object"]) == (200, "chat.completion")
    assert found["choices"][0]["message"] == {"role": "assistant", "content": answer}
    assert found["usage"]["completion_tokens"] <= 9
    assert cut["choices"][0]["message"]["content"] == answer[: answer.index(answer[2:4])].strip()
    assert cut["choices"][0]["finish_reason"] == "stop"
    for body, whole in ((asked, found), (stopping, cut)):
        more = {"stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = events_of(served("/chat/completions", body | more)[1])
        assert {one["object"] for one in chunks} == {"chat.completion.chunk"}
        deltas = [one["choices"][0]["delta"] for one in chunks]
        assert [one.get("role") for one in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
        expected = whole["choices"][0]
        assert "".join(one.get("content", "") for one in deltas) == expected["message"]["content"]
        reasons = [one["choices"][0]["finish_reason"] for one in chunks]
        assert reasons == [*[None] * (len(chunks) - 1), expected["finish_reason"]]
        assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert len(events_of(served("/chat/completions", asked | {"stream": True})[1])) > 2


def events_of(text):
    """The JSON of server-sent events, of which each is one line of data."""
    assert text.endswith("data: [DONE]\n\n")
    lines = text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_pieces_are_whole_characters_and_hold_back_what_may_begin_a_stop_string(tmp_path):
    make_tokenizer("").save_pretrained(tmp_path)
    tokenizer = TextTokenizer.load(tmp_path)
    (ids,) = tokenizer.encode_batch(["  é 🎉 said STO and STOP, more"])
    said = "é 🎉 said STO and"
    pieces = []
    question = Question([{}], stop=["STOP", "never"], in_pieces=True)
    growing = GrowingAnswer(tokenizer, {tokenizer.eos_id}, question, Event(), pieces.append)

    heard = next(number for number, token in enumerate(ids, 1) if growing.add(token))

    assert growing.finish() == "".join(pieces) == said
    assert len(pieces) > 3
    assert "\ufffd" not in "".join(pieces)
    assert growing.is_whole
    assert heard == growing.num_tokens < len(ids)


def test_a_continued_text_keeps_its_first_space_and_characters_of_several_byte_tokens():
    tokens = ["</s>", "▁Hello", "▁world", "!", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {token: number for number, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence(  # LLaMA 2's
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer = TextTokenizer(backend, pad_id=0, eos_id=0)

    def continued(before, *more):
        growing = GrowingAnswer(tokenizer, {0}, Question(prompt=""), Event(), print, before)
        for token in (*more, 0):
            growing.add(token)
        return growing.finish()

    tamil = [vocab[f"<0x{byte:02X}>"] for byte in "தமிழ்".encode()]  # 15 tokens, 3 a character
    assert backend.decode([1, 2, 3]) == "Hello world!"
    assert continued([1], 2, 3) == " world!"
    assert backend.decode(tamil[-8:]) == 8 * "\ufffd"
    assert continued(tamil, *tamil, 2) == "தமிழ் world"


@pytest.mark.slow
def test_a_client_that_goes_ends_its_answer_and_the_next_one_gets_another(served):
    body = {"messages": [{"role": "user", "content": QUESTION}], "max_tokens": 90, "stream": True}
    ask_and_go(served.url, json.dumps(body | {"seed": 1}))

    again = events_of(served("/chat/completions", body | {"temperature": 0})[1])

    assert again[-1]["choices"][0]["finish_reason"] in ("stop", "length")


def ask_and_go(url, body):
    """Ask for a stream, read how it begins, and close the connection."""
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    with socket.create_connection((host, int(port)), timeout=400) as client:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall((head + body).encode())
        read = b""
        while b"data: " not in read:
            read += client.recv(4096)


@pytest.mark.slow
def test_a_served_model_continues_texts_repeats_seeds_and_refuses_what_it_cannot_do(served):
    asked = {"prompt": ["one two", "one two"], "max_tokens": 8, "seed": 3}

    texts = [one["text"] for one in json.loads(served("/completions", asked)[1])["choices"]]
    other = json.loads(served("/completions", asked | {"seed": 4})[1])["choices"][0]["text"]

    assert texts[0] == texts[1] != other
    refused = {
        "logprobs": asked | {"logprobs": 0},
        "nucleus": asked | {"nucleus": 0.5},
        "unknown model 'gpt-4'": asked | {"model": "gpt-4"},
        "reads 128": asked | {"max_tokens": 500},
    }
    for why, body in refused.items():
        status, text = served("/completions", body)
        assert (status, why in json.loads(text)["error"]["message"]) == (400, True), text
    assert served("/completions", asked, Host="example.com")[0] == 403
    assert served("/completions", asked, **{"Content-Type": "text/plain"})[0] == 400


def test_a_server_with_a_token_answers_nothing_without_it():
    server = ModelServer("127.0.0.1", 0, token="secret")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    request = urllib.request.Request(f"{server.url}/models", headers={"Authorization": "Bearer x"})

    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=400)
    server.shutdown()

    assert refused.value.code == 401


def test_a_port_that_is_taken_and_an_address_without_a_token_are_refused(trained, shared_bench):
    words = ["serve-model", trained[1].id, "-w", str(shared_bench.root / "workspace")]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert run_command([*words, "--port", port]) == 2
    assert run_command([*words, "--host", "0.0.0.0"]) == 2


@pytest.mark.slow
def test_ctrl_c_ends_both_processes(words):
    process = subprocess.Popen(
        [sys.executable, "-m", "redco_flow.cli.main", *words, "--message", QUESTION],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
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

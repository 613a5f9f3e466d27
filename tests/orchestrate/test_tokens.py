"""Tokens in no known setting: printed from a file, raised, or kept in a tracked file."""

import json
import os
import random
import stat
import string
import subprocess
import time
import uuid
from pathlib import Path

import made_up_tokens
import pytest
from made_up_tokens import KEYS, TOKENS, seen_in
from orchestrate_api import Api
from orchestrate_runs import wait_for_end

from redco_flow.launch.redaction import Redactor, redact_text
from redco_flow.orchestrate.run.ingredients import CodeState
from redco_flow.spec.secrets import hide_secrets, looks_secret_value

LEAKY = """
name: leaky
stages:
  leak: {{kind: orchestrate_kinds.leaky, file: {file}}}
"""


def pump(chunks):
    redactor = Redactor([])
    return b"".join([*map(redactor.feed, chunks), redactor.flush()])


def difference(one, other):
    at = next(n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return one[at - 100 : at + 100], other[at - 100 : at + 100]


@pytest.mark.parametrize("kind", TOKENS)
def test_a_token_of_the_usual_kinds_is_masked_without_its_line(kind):
    """Fault 46: the token appears in no log, record, patch, report or page."""
    line, token = TOKENS[kind]

    shown = redact_text(f"before {line} after\n", [])

    assert token not in shown
    assert shown.startswith("before ")
    assert looks_secret_value(line)
    assert token not in hide_secrets(line)


@pytest.mark.parametrize("kind", KEYS)
@pytest.mark.parametrize("prefix", ["", "  ", "+", "2026-11-22 10:00:00 INFO "])
def test_every_line_of_a_private_key_is_masked(kind, prefix):
    """Fault 46: the token appears in no log, record, patch, report or page."""
    key, _ = KEYS[kind]
    text = "".join(f"{prefix}{line}\n" for line in ["before", *key.split("\n"), "after"])

    shown = redact_text(text, [])

    assert seen_in(shown) == []
    assert shown.startswith(f"{prefix}before\n")
    assert shown.endswith(f"{prefix}after\n")


def test_a_key_within_one_line_is_masked():
    """Fault 46: the token appears in no log, record, patch, report or page."""
    for key, _ in KEYS.values():
        assert seen_in(redact_text(f"before {json.dumps({'key': key})}\nafter", [])) == []
        assert seen_in(redact_text(f"before {key!r}\nafter", [])) == []


def test_a_key_without_an_end_hides_nothing_that_follows():
    """Fault 46: the token appears in no log, record, patch, report or page."""
    text = "it begins with -----BEGIN " + "PRIVATE KEY-----\nstep 1: loss 2.5\nstep 2: loss 2.4\n"

    assert redact_text(text, []).endswith("step 1: loss 2.5\nstep 2: loss 2.4\n")


def test_no_cut_of_the_stream_shows_a_token():
    """Fault 46: the token appears in no log, record, patch, report or page."""
    data = made_up_tokens.text().encode()
    whole = pump([data])

    assert seen_in(whole) == []
    for seed in range(30):
        rng = random.Random(seed)
        cuts = sorted(rng.sample(range(len(data)), rng.choice([1, 10, 300])))
        chunks = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        assert (got := pump(chunks)) == whole, difference(got, whole)


def test_tokens_in_a_line_without_an_end_are_masked_in_bounded_memory():
    """Fault 46: the token appears in no log, record, patch, report or page."""
    rng = random.Random(0)
    words = [
        rng.choice(["zebra", "42", *(line for line, _ in TOKENS.values())]) for _ in range(4_000)
    ]
    data = " ".join(words).encode()
    redactor = Redactor([])

    shown = b""
    for start in range(0, len(data), 50_000):
        part = redactor.feed(data[start : start + 50_000])
        assert part  # something is shown each time: nothing piles up
        shown += part
    shown += redactor.flush()

    assert seen_in(shown) == []
    assert shown.count(b"zebra") == words.count("zebra")


def test_what_is_no_secret_stays():
    """Fault 46: digests, ids, numbers, paths and progress are what logs are made of."""
    rng = random.Random(7)
    hexes = {n: "".join(rng.choices("0123456789abcdef", k=n)) for n in (12, 16, 32, 40, 64, 128)}
    text = "\n".join(
        [
            *(f"{word} {one}" for one in hexes.values() for word in ("digest", "commit", "key")),
            f"artifact dataset/{hexes[16]} fingerprint={hexes[64]} etag=\"{hexes[32]}\"",
            f"run quickstart-9z76z5 {uuid.UUID(int=rng.getrandbits(128))} trace_id={hexes[32]}",
            "/work/runs/quickstart-9z76z5/stages/train/attempts/1/logs/rank0.log",
            "https://huggingface.co/google/t5-v1_1-base/resolve/main/model.safetensors",
            "http://127.0.0.1:4200/runs/flow-run/0b9c6e1c-8a52-4c8c-a2ef-8bd2f1b8a3f4",
            "\r 45%|####5     | 450/1000 [00:10<00:12, 44.5it/s, loss=1.234, tokens/s=12345.67]",
            "step 860 loss 0.5231 rate 3.0e-03 tokens_per_second=180344.2 tokens: 12345678901234",
            "tokens: [101, 2023, 2003, 102] pad_token='<pad>' eos_token=</s> unk_token: <unk>",
            "tokenizer.model_max_length=1000000000000000019884624838656 token_type_ids=[0, 0]",
            "decoder/layers/cross_attention/kv    (2, 128, 2, 4, 32)  replicated  whole",
            "forward_pass: 12.345678 backward_pass=0.123456789 num_passes: 3 eval pass 2/3",
            "redco-flow: stage 'train' of run quickstart-9z76z5, attempt 1, process 12719 on vm",
            "password must not be empty; token_env: HF_TOKEN; set HF_TOKEN or run hf auth login",
            "secret = os.environ['HF_TOKEN']; token=get_token(); api_key: ${env:OPENAI_API_KEY}",
            "array([1.23456789e-01, -2.3456789e+00]) dtype=float32 shape=(128, 4096)",
            "2026-11-22T21:50:52.123456+00:00 INFO redco_flow.stages.train.run: 3,881,984 bytes",
            "XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu",
        ]
    )  # fmt: skip

    shown = redact_text(text, [])

    assert shown == text


def test_masking_keeps_up_with_a_log():
    """Fault 46: the pipe of a stage that prints much must not fill."""
    bar = b"\r 45%|####5     | 450/1000 [00:10<00:12, 44.5it/s, loss=1.234, tokens/s=12345]"
    words = " ".join(
        "".join(random.Random(1).choices(string.ascii_lowercase, k=7)) for _ in range(12)
    )
    data = b"".join([bar * 50 + b"\n", f"{words}\n".encode() * 400]) * 20
    redactor = Redactor([])
    redactor.feed(b"the rules are read\n")

    begin = time.process_time()
    for start in range(0, len(data), 1 << 16):
        redactor.feed(data[start : start + (1 << 16)])
    seconds = time.process_time() - begin

    assert len(data) / seconds > 2e6  # bytes a second, on one slow core; 20e6 and more is usual


def test_a_changed_env_file_shows_no_value_in_the_patch(tmp_path):
    """Fault 46: the token appears in no log, record, patch, report or page."""
    _commit(tmp_path, {".env": "DB_PASS=first-one\nPLAIN=hello\n", "code.py": "x = 1\n"})
    values = "".join(f"KEY_{n}='{token}'\n" for n, (_, token) in enumerate(TOKENS.values()))
    (tmp_path / ".env").write_text(f"DB_PASS=tiger\nPLAIN=world\nexport ODD=a b c\n{values}")
    key = next(iter(KEYS.values()))[0]
    (tmp_path / "code.py").write_text(f'x = 2\nKEY = """{key}"""\n' + made_up_tokens.text())

    patch = CodeState.read(tmp_path).patch

    assert seen_in(patch) == []
    assert not [
        value for value in ("first-one", "tiger", "world", "hello", "a b c") if value in patch
    ]
    assert "+x = 2" in patch
    assert "+DB_PASS=[redacted]" in patch


@pytest.mark.slow
def test_no_file_and_no_page_of_a_run_shows_a_token_that_its_stage_prints(
    runs, tmp_path, prefect_server, monkeypatch
):
    """Fault 46: the token appears in no log, record, patch, report or page."""
    code = tmp_path / "code"
    _commit(code, {".env": "A=1\n"})
    (code / ".env").write_text(made_up_tokens.text())
    (tmp_path / "tokens.txt").write_text(made_up_tokens.text())
    monkeypatch.chdir(code)
    old_mask = os.umask(0o002)

    run = runs.start(LEAKY.format(file=tmp_path / "tokens.txt"))
    state = wait_for_end(run)

    os.umask(old_mask)
    assert state["state"] == "failed"
    api = Api(prefect_server)
    flow_run = api.ended_flow_run_of(run)
    told = repr([flow_run, api.tasks_of(flow_run, 1), api.logs_of(flow_run)])
    files = [path for path in Path(run.path).rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"rank0.log", "error.json", "code.patch", "report.html", "journal.jsonl"} <= names
    assert {str(path): seen for path in files if (seen := seen_in(path.read_bytes()))} == {}
    assert seen_in(told) == []
    assert "[redacted]" in told
    assert stat.S_IMODE(run.patch_path.stat().st_mode) == 0o600


def _commit(folder, files):
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    for words in (
        ["init", "-q"],
        ["add", "-f", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "first"],
    ):
        subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True)

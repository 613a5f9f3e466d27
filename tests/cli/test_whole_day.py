"""The day of a user: a file, a pipeline, a run, answers for a new file, and disk space back."""

import csv
import json

import pytest
import torch
import transformers
from PIL import Image

from redco_flow.text.chat import CHATML
from tests.cli.conftest import Command
from tests.text.chat_tokenizers import make_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("compile_cache")]

WORDS = ("red", "green", "blue", "black", "white", "grey")
NUMBER = 24
MODEL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 512,
}


def text(number):
    return f"{WORDS[number % 6]} {WORDS[number // 6 % 6]} {number}"


def save_lines(path, rows):
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def write_table(folder):
    with (folder / "data.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["review", "label"])
        writer.writerows([text(n), "good" if n % 2 else "bad"] for n in range(NUMBER))
    (folder / "new.csv").write_text('id,review\n7,"red, and blue"\n8,\n9,white\n')


def write_conversations(folder):
    rows = ([text(n), WORDS[n % 6]] for n in range(NUMBER))
    roles = ("user", "assistant")
    save_lines(
        folder / "data.jsonl",
        (
            {
                "messages": [
                    {"role": role, "content": one} for role, one in zip(roles, row, strict=True)
                ]
            }
            for row in rows
        ),
    )
    save_lines(folder / "new.jsonl", [{"messages": [{"role": "user", "content": "red 1"}]}])


def write_images(folder):
    for name, shade in (("dark", 10), ("light", 200)):
        (folder / "data" / name).mkdir(parents=True)
        for number in range(10):
            image = Image.new("RGB", (8, 8), (shade + number,) * 3)
            image.save(folder / "data" / name / f"{number}.png")
    Image.new("RGB", (9, 9), (15, 15, 15)).save(folder / "new.png")


def write_preferences(folder):
    save_lines(
        folder / "data.jsonl",
        ({"prompt": text(n), "chosen": WORDS[n % 6], "rejected": "no idea"} for n in range(NUMBER)),
    )
    save_lines(folder / "new.jsonl", [{"prompt": "red 1"}, {"prompt": ""}])
    pair = {"prompt": "red 1", "chosen": "red", "rejected": "no idea"}
    save_lines(folder / "pairs.jsonl", [pair])


DAYS = {
    "table": (write_table, "data.csv", "new.csv", ["--model", "scratch"]),
    "conversations": (write_conversations, "data.jsonl", "new.jsonl", ["--model", "model"]),
    "images": (write_images, "data", "new.png", ["--model", "scratch"]),
    "preferences": (write_preferences, "data.jsonl", "new.jsonl", ["--model", "model"]),
}


def save_model(folder):
    """A published model, of random parameters."""
    tokenizer = make_tokenizer(CHATML)
    names = ("eos_token_id", "bos_token_id", "pad_token_id")
    ids = {name: getattr(tokenizer, name) for name in names}
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=len(tokenizer), **MODEL, **ids)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def log_likelihood(folder, prompt, answer):
    """Of an answer with its end token, by transformers."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False)
    asked = tokenizer(prompt)["input_ids"]
    ids = torch.tensor([*asked, *tokenizer(answer)["input_ids"], tokenizer.eos_token_id])
    with torch.no_grad():
        scores = model(ids[None]).logits[0, len(asked) - 1 : -1].log_softmax(-1)
    return scores.gather(1, ids[len(asked) :, None]).sum().item()


def all_at_once(commands, words_of):
    """Run a command line in every folder, side by side; return the lines that each printed."""
    started = {name: command.start(*words_of(name)) for name, command in commands.items()}
    said = {name: process.communicate(timeout=500) for name, process in started.items()}
    assert not any(process.returncode for process in started.values()), said
    return {name: out.splitlines() for name, (out, _) in said.items()}


def test_from_a_file_to_answers_and_again_after_disk_space_was_freed(tmp_path):
    save_model(tmp_path / "model")
    commands = {}
    for name, (write, *_) in DAYS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "model").symlink_to(tmp_path / "model")
        write(tmp_path / name)
        commands[name] = Command(tmp_path / name)

    all_at_once(commands, lambda name: ["init", "mine", "--data", DAYS[name][1], *DAYS[name][3]])
    pipelines = {name: next((tmp_path / name / "mine" / "pipelines").iterdir()) for name in DAYS}
    epochs = {"table": 1, "conversations": 1, "images": 3, "preferences": 6}
    all_at_once(
        commands, lambda name: ["run", str(pipelines[name]), f"train.num_epochs={epochs[name]}"]
    )
    answers = all_at_once(commands, lambda name: ["predict", "last", DAYS[name][2]])
    freed = commands["preferences"]("gc", "--keep-last", "1", "--unreferenced")
    score = ["predict", "last", "pairs.jsonl"]
    scored = commands["preferences"](*score)
    (tmp_path / "preferences" / "model").rename(tmp_path / "preferences" / "moved")
    refused = commands["preferences"](*score, code=2)
    rescored = commands["preferences"](*score, "reference.model.name_or_path=moved")

    rows = {name: [json.loads(line) for line in lines] for name, lines in answers.items()}
    first, empty, last = rows["table"]
    assert [one["id"] for one in rows["table"]] == ["7", "8", "9"]
    assert {*first["probabilities"]} == {"good", "bad"}
    assert first["prediction"] == max(first["probabilities"], key=first["probabilities"].get)
    assert (empty["prediction"], empty["prediction_problem"]) == (None, "field 'review' is empty")
    assert last["review"] == "white"
    assert [one["prediction"] for one in rows["images"]] == ["dark"]
    assert all(isinstance(one["prediction"], str) for one in rows["conversations"])
    assert [type(one["prediction"]) for one in rows["preferences"]] == [str, type(None)]
    assert "deleted" in freed
    assert "give its new path: `reference.model.name_or_path=DIRECTORY`" in refused
    assert rescored == scored
    found = json.loads(scored)["prediction"]
    for answer, text in (("chosen", "red"), ("rejected", "no idea")):
        # DPO's reward: beta, 0.1, times what training added to an answer's log-likelihood.
        added = found[f"{answer}_log_likelihood"] - log_likelihood(
            tmp_path / "model", "red 1", text
        )
        assert found[f"{answer}_reward"] == pytest.approx(0.1 * added, abs=2e-5) != 0.0

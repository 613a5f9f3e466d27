"""Names that move: what an alias names, its history, and what may happen while it is moved."""

import json
import random
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from redco_flow.errors import DamagedRecord, UsageError
from redco_flow.tracking.aliases import (
    AliasEvent,
    AliasMoved,
    AliasName,
    AliasStore,
    artifact_id_of,
    is_alias,
)
from redco_flow.tracking.workspace import Workspace

PRODUCTION = AliasName("demo", "production")
MOVE_FOREVER = """
import sys
from redco_flow.tracking.aliases import *
from redco_flow.tracking.workspace import Workspace

store, name = AliasStore(Workspace(__import__("pathlib").Path(sys.argv[1]))), AliasName("demo", "p")
wanted = int(sys.argv[3])
print("ready", flush=True)
for number in range(wanted):
    while True:
        present = store.find(name)
        event = AliasEvent("promoted", f"{sys.argv[2]}{number:063x}", "2026", "ann")
        try:
            store.move(name, event, after=present)
            break
        except AliasMoved:
            continue
"""


def promoted(digit):
    return AliasEvent("promoted", digit * 64, "2026-01-05T03:00:00.000+00:00", "ann")


def rolled_back(digit):
    return replace(promoted(digit), event="rolled_back")


def moved(store, *events, name=PRODUCTION):
    for event in events:
        store.move(name, event, after=store.find(name))
    return store.find(name)


def test_an_alias_names_what_was_promoted_last_and_keeps_all_that_it_ever_named(workspace):
    store = AliasStore(workspace)

    alias = moved(store, promoted("a"), promoted("b"))

    assert (alias.checkpoint, alias.previous) == ("b" * 64, "a" * 64)
    assert [event.checkpoint[0] for event in alias.history] == ["a", "b"]
    assert store.by_artifact() == {"b" * 64: (alias,)}


def test_each_rollback_undoes_one_more_promotion(workspace):
    alias = moved(AliasStore(workspace), promoted("a"), promoted("b"), promoted("c"))
    assert alias.previous == "b" * 64

    alias = moved(AliasStore(workspace), rolled_back("b"))
    assert (alias.checkpoint, alias.previous) == ("b" * 64, "a" * 64)

    alias = moved(AliasStore(workspace), rolled_back("a"))
    assert (alias.checkpoint, alias.previous) == ("a" * 64, "")

    alias = moved(AliasStore(workspace), promoted("d"))
    assert (alias.checkpoint, alias.previous) == ("d" * 64, "a" * 64)


def test_who_decided_on_an_earlier_state_is_refused(workspace):
    store = AliasStore(workspace)
    seen = moved(store, promoted("a"))
    moved(store, promoted("b"))

    with pytest.raises(AliasMoved, match="names bbbbbbbbbbbb now; nothing was changed"):
        store.move(PRODUCTION, promoted("c"), after=seen)

    assert store.find(PRODUCTION).checkpoint == "b" * 64


def test_promotions_at_once_all_stand_in_the_history(workspace):
    processes = [
        subprocess.Popen([sys.executable, "-c", MOVE_FOREVER, str(workspace.root), digit, "25"])
        for digit in "abc"
    ]

    assert [process.wait(timeout=400) for process in processes] == [0, 0, 0]

    history = AliasStore(workspace).find(AliasName("demo", "p")).history
    assert len({event.checkpoint for event in history}) == len(history) == 75


def test_an_alias_is_whole_whenever_its_mover_is_killed(workspace):
    """Fault 50: `kill -9` of a promotion at twenty random moments."""
    store, name = AliasStore(workspace), AliasName("demo", "p")
    seed = random.randrange(1 << 30)
    moments = random.Random(seed)

    for number in range(20):
        words = [str(workspace.root), f"{number % 16:x}", "1000000"]
        process = subprocess.Popen(
            [sys.executable, "-c", MOVE_FOREVER, *words], stdout=subprocess.PIPE
        )
        process.stdout.readline()
        time.sleep(moments.uniform(0, 0.02))
        before = store.find(name)
        process.kill()
        process.wait()

        after = store.find(name)
        is_going_on = before is None or after.history[: len(before.history)] == before.history
        assert is_going_on, f"seed {seed}"

    moved(store, promoted("f"), name=name)
    assert store.find(name).checkpoint == "f" * 64
    assert not list(workspace.aliases.rglob("*.tmp"))


def test_a_full_disk_leaves_the_alias_as_it_was_and_is_named(on_small_disk):
    """Fault 20."""
    said = on_small_disk(
        """
        import sys
        from pathlib import Path
        from redco_flow.tracking.aliases import *
        from redco_flow.tracking.workspace import Workspace

        store, name = AliasStore(Workspace(Path(sys.argv[1]))), AliasName("demo", "production")
        store.move(name, AliasEvent("promoted", "a" * 64, "2026", "ann"), after=None)
        before = store.find(name)
        huge = AliasEvent("promoted", "b" * 64, "2026", "ann", reason="x" * (2 << 20))
        try:
            store.move(name, huge, after=before)
        except OSError as error:
            print(error.filename)
        print(store.find(name) == before, len(list(Path(sys.argv[1]).rglob("*.tmp"))))
        """
    )

    assert said.splitlines()[0].endswith("aliases/demo/production.json")
    assert said.splitlines()[1] == "True 0"


def test_a_flipped_bit_never_changes_what_an_alias_names(workspace):
    store = AliasStore(workspace)
    event = replace(promoted("b"), reason="better", metrics={"bleu": 3, "val/loss": 0.1})
    before = moved(store, promoted("a"), event)
    path = workspace.aliases / "demo" / "production.json"
    content = path.read_bytes()
    chance = random.Random(0)

    noticed = 0
    for _ in range(300):
        bit = chance.randrange(8 * len(content))
        damaged = bytearray(content)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            assert store.find(PRODUCTION) == before  # a bit of white space
        except DamagedRecord:
            noticed += 1

    assert noticed > 200


def test_an_alias_without_a_digest_as_of_format_1_is_still_read(workspace):
    store = AliasStore(workspace)
    before = moved(store, promoted("a"))
    path = workspace.aliases / "demo" / "production.json"
    record = json.loads(path.read_text())
    del record["digest"]

    path.write_text(json.dumps(record | {"format": 1}))

    assert store.find(PRODUCTION) == before
    assert len(moved(store, promoted("b")).history) == 2
    assert json.loads(path.read_text())["digest"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: text.replace('"alias": "production"', '"alias": "other"'),
        lambda text: text.replace("promoted", "rolled_back"),
        lambda text: json.dumps(json.loads(text) | {"history": []}),
    ],
)
def test_a_damaged_alias_says_so_and_hides_no_other(workspace, damage, caplog):
    """Fault 42."""
    store = AliasStore(workspace)
    moved(store, promoted("a"))
    other = moved(store, promoted("b"), name=AliasName("demo", "staging"))
    path = workspace.aliases / "demo" / "production.json"
    path.write_text(damage(path.read_text()))

    with pytest.raises(DamagedRecord, match=r"production\.json: damaged record"):
        store.find(PRODUCTION)
    assert store.list() == [other]
    assert "production.json" in caplog.text


@pytest.mark.parametrize(
    "text", ["production", "@production", "@demo/production", "demo/production"]
)
def test_an_alias_is_named_with_or_without_its_model(workspace, text):
    moved(AliasStore(workspace), promoted("a"))

    assert AliasStore(workspace).get(text).name == PRODUCTION
    assert AliasName.parse(text, "demo") == PRODUCTION


def test_an_alias_of_several_models_must_be_named_with_one(workspace):
    store = AliasStore(workspace)
    moved(store, promoted("a"))
    moved(store, promoted("b"), name=AliasName("other", "production"))

    with pytest.raises(UsageError, match="2 models: @demo/production, @other/production"):
        store.get("@production")
    assert store.get("@other/production").checkpoint == "b" * 64


def test_what_was_never_promoted_lists_what_was(workspace):
    moved(AliasStore(workspace), promoted("a"))

    with pytest.raises(UsageError, match=r"nothing was promoted as '@prod' .* @demo/production"):
        artifact_id_of(workspace, "@prod")


@pytest.mark.parametrize("name", ["last", "../x", "", "a b", "$(touch x)"])
def test_a_name_that_means_something_else_is_no_alias(name):
    with pytest.raises(UsageError):
        AliasName("demo", name)


def test_the_last_run_is_no_alias():
    assert is_alias("@production")
    assert is_alias("@demo/production")
    assert not is_alias("@last")
    assert not is_alias("@last/train")
    assert not is_alias("train")


def test_an_alias_is_read_where_nothing_may_be_written(tmp_path):
    assert AliasStore(Workspace(tmp_path / "nowhere")).list() == []

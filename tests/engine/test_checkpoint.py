"""Saving and restoring: bitwise, over meshes, and clear where tree and checkpoint differ."""

import threading
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from blake3 import blake3
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from redco_flow.engine.checkpoint.checkpointer import (
    Checkpointer,
    checkpoint_files,
    parameter_digests,
    restore_params,
)
from redco_flow.engine.errors import CheckpointError
from redco_flow.engine.files import canonical_json, digest_file


def mesh_of(num_data, num_model):
    devices = np.array(jax.devices()[: num_data * num_model]).reshape(num_data, num_model)
    return jax.sharding.Mesh(devices, ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def params_of(seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    return {
        "layer": {
            "kernel": jax.random.normal(keys[0], (8, 16)),
            "bias": jax.random.normal(keys[1], (16,)).astype(jnp.bfloat16),
        },
        "scale": jax.random.normal(keys[2], ()),
    }


def state_of(optimizer=None, seed=0):
    params = params_of(seed)
    return {
        "params": params,
        "opt_state": (optimizer or optax.adamw(1e-3)).init(params),
        "step": jnp.int32(7),
        "seed": jax.random.key(5),
    }


def abstract(tree, sharding=None):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding or x.sharding), tree
    )


def bits(tree):
    """Every leaf as its bytes, so that -0.0 and NaN count too."""

    def of(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf).tobytes()

    return jax.tree.map(of, tree)


OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "adafactor": optax.adafactor(1e-3),
    "lion": optax.lion(1e-3),
    "clipped with a schedule": optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 10))
    ),
    "MultiSteps": optax.MultiSteps(optax.adamw(1e-3), 2),
    "multi_transform": optax.multi_transform(
        {"a": optax.adamw(1e-3), "b": optax.sgd(1e-2, momentum=0.9)},
        {"layer": "a", "scale": "b"},
    ),
    "sgd, without any state": optax.sgd(1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_restored_state_is_bitwise_the_saved_one(tmp_path, name):
    """Engine case 46, a saved state: it is restored bitwise."""
    state = state_of(OPTIMIZERS[name])
    cursor = {"step": 7, "seed": 3, "nested": {"α": [1, 2.5, None]}}

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(7, state, metrics={"loss": 0.25}, cursor=cursor)
        restored, commit = checkpointer.restore(like=abstract(state))

    assert jax.tree.structure(restored) == jax.tree.structure(state)
    assert bits(restored) == bits(state)
    assert jax.tree.map(lambda x: x.dtype, restored) == jax.tree.map(lambda x: x.dtype, state)
    assert (commit.step, commit.metrics, commit.cursor) == (7, {"loss": 0.25}, cursor)


def test_random_keys_numbers_and_empty_arrays_come_back_as_what_they_were(tmp_path):
    """Engine case 46, a saved state: it is restored bitwise."""
    state = {
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), (2, 3)),
        "no_keys": jax.random.split(jax.random.key(0), 4)[:0],
        "epoch": 3,
        "rate": 0.1,
        "done": True,
        "table": np.arange(6, dtype=np.int64).reshape(2, 3),
        "empty": jnp.zeros((0, 4)),
        "special": jnp.array([np.nan, -0.0, np.inf]),
    }

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, cursor={})
        restored, _ = checkpointer.restore(like=state)

    assert {k: type(v) for k, v in restored.items()} == {k: type(v) for k, v in state.items()}
    assert [restored[k] for k in ("epoch", "rate", "done")] == [3, 0.1, True]
    arrays = ("keys", "no_keys", "table", "empty", "special")
    assert bits({k: restored[k] for k in arrays}) == bits({k: state[k] for k in arrays})
    assert restored["keys"].dtype == state["keys"].dtype
    assert restored["no_keys"].shape == (0,)


def test_a_state_without_a_params_key_is_saved_too(tmp_path):
    with Checkpointer(tmp_path, keep_last=2) as checkpointer:
        checkpointer.save(1, [jnp.arange(3), {"x": jnp.ones(2)}], cursor={})
        checkpointer.save(2, {"params": jnp.arange(4), "step": 2}, cursor={})
        checkpointer.wait()
        listed, _ = checkpointer.restore(1, like=[jnp.zeros(3, jnp.int32), {"x": jnp.ones(2)}])
        alone = restore_params(checkpointer.step_directory(2), jnp.zeros(4, jnp.int32))
        whole, _ = checkpointer.restore(like={"params": jnp.zeros(4, jnp.int32), "step": 0})

    assert (listed[0].tolist(), listed[1]["x"].tolist()) == ([0, 1, 2], [1.0, 1.0])
    assert alone.tolist() == whole["params"].tolist() == [0, 1, 2, 3]
    assert whole["step"] == 2


def test_a_donated_state_is_saved_as_it_was_when_save_was_called(tmp_path):
    state = {"params": {"w": jnp.arange(1_000_000.0)}, "table": np.zeros(1000)}
    add_one = jax.jit(lambda x: x + 1, donate_argnums=0)

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state, cursor={})
        changed = {"params": {"w": state["params"]["w"]}}
        for _ in range(3):
            changed["params"]["w"] = add_one(changed["params"]["w"])
        jax.block_until_ready(changed)
        state["table"] += 1
        like = {"params": abstract(changed)["params"], "table": state["table"]}
        restored, _ = checkpointer.restore(like=like)

    np.testing.assert_array_equal(restored["params"]["w"], np.arange(1_000_000.0))
    assert restored["table"].sum() == 0


def test_a_state_restores_exactly_onto_other_meshes(tmp_path):
    """Engine case 47: 2x2 -> 1x4 -> 1x1."""
    specs = {
        "layer": {"kernel": PartitionSpec(None, "model"), "bias": PartitionSpec("model")},
        "scale": PartitionSpec(),
    }
    reference = params_of()

    def like_on(mesh):
        return {
            "params": jax.tree.map(
                lambda x, spec: jax.ShapeDtypeStruct(
                    x.shape, x.dtype, sharding=NamedSharding(mesh, spec)
                ),
                reference,
                specs,
            ),
            "seed": jax.ShapeDtypeStruct(
                (), jax.random.key(5).dtype, sharding=NamedSharding(mesh, PartitionSpec())
            ),
        }

    meshes = [mesh_of(2, 2), mesh_of(1, 4), mesh_of(1, 1)]
    first = jax.tree.map(lambda x: x.sharding, like_on(meshes[0]))
    state = jax.device_put({"params": reference, "seed": jax.random.key(5)}, first)
    for number, (here, there) in enumerate(pairwise(meshes)):
        with Checkpointer(tmp_path / str(number)) as checkpointer:
            checkpointer.save(1, state, cursor={})
            like = like_on(there)
            state, _ = checkpointer.restore(like=like)

        assert jax.tree.map(lambda x: x.sharding, state) == jax.tree.map(
            lambda x: x.sharding, like
        ), f"{here} -> {there}"
        assert bits(state["params"]) == bits(reference)
    assert bits(state["seed"]) == bits(jax.random.key(5))


def test_a_restored_params_tree_needs_only_the_params_files(tmp_path):
    state = state_of()
    with Checkpointer(tmp_path / "from") as checkpointer:
        checkpointer.save(3, state, cursor={})
        checkpointer.wait()
        source = checkpointer.step_directory(3)
    copy = tmp_path / "copy"
    for path in checkpoint_files(source, params_only=True):
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        (copy / path).write_bytes((source / path).read_bytes())

    restored = restore_params(copy, abstract(state["params"]))

    assert bits(restored) == bits(state["params"])
    assert not (copy / "training").exists()


def digests_of(directory, params):
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, {"params": params, "step": jnp.int32(1)}, cursor={})
        checkpointer.wait()
        return parameter_digests(checkpointer.step_directory(1))


def test_a_parameters_digest_is_that_of_its_shape_dtype_and_bytes(tmp_path, monkeypatch):
    params = params_of()["layer"] | {
        "scale": jnp.float32(-0.0),
        "a.b/c ä": jnp.arange(6, dtype=jnp.int8).reshape(2, 3),
        "none": jnp.zeros((0, 3)),
    }
    monkeypatch.chdir(tmp_path)

    found = digests_of("relative", params)

    def expected(leaf):
        head = {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "key_impl": None}
        return blake3(canonical_json(head) + np.asarray(leaf).tobytes()).hexdigest()

    assert found == {path: expected(leaf) for path, leaf in params.items()}


def test_small_replicated_arrays_are_saved_without_compiling_anything(tmp_path, caplog):
    """Orbax's default is a program for each device's slice of each."""
    copied = NamedSharding(mesh_of(4, 2), PartitionSpec())
    params = {"kernel": jax.device_put(np.ones((24, 40), np.float32), copied)}

    with jax.log_compiles(), caplog.at_level("WARNING"), Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"params": params}, metrics={}, cursor={})

    assert "XLA compilation" not in caplog.text


def test_equal_parameters_have_equal_digests_whatever_mesh_they_were_saved_from(tmp_path):
    """Split by rows, by columns and by both: other chunks, other files, the same parameters."""
    # Of more than one block of bytes, which must follow each other in order.
    table = np.arange(2048 * 2560, dtype=np.float32).reshape(2048, 2560)
    params = {"table": table, "bias": jnp.arange(16.0)}
    ways = [
        (mesh_of(1, 1), PartitionSpec()),
        (mesh_of(1, 2), PartitionSpec(None, "model")),
        (mesh_of(4, 1), PartitionSpec("data")),
        (mesh_of(2, 2), PartitionSpec("data", "model")),
    ]

    found = [
        digests_of(
            tmp_path / str(number),
            {
                "table": jax.device_put(table, NamedSharding(mesh, spec)),
                "bias": jax.device_put(params["bias"], NamedSharding(mesh, PartitionSpec())),
            },
        )
        for number, (mesh, spec) in enumerate(ways)
    ]

    assert all(digests == found[0] for digests in found)
    table[-1, -1] += 8
    changed = digests_of(tmp_path / "changed", params)
    assert changed["table"] != found[0]["table"]
    assert changed["bias"] == found[0]["bias"]


def test_a_parameter_that_cannot_be_read_is_named(tmp_path):
    digests_of(tmp_path, params_of())
    for path in (tmp_path / "1" / "params").rglob("*"):
        if path.parent.name == "d":
            path.write_bytes(b"")

    with pytest.raises(CheckpointError, match=r"params: parameter layer/bias cannot be read"):
        parameter_digests(tmp_path / "1")


def test_the_listed_digests_are_those_of_all_files(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(3, state_of(), cursor={})
        checkpointer.wait()
        directory = checkpointer.step_directory(3)

    on_disk = {p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file()}
    assert checkpoint_files(directory) == {path: digest_file(directory / path) for path in on_disk}


def test_different_trees_are_refused_with_every_path_expected_and_found(tmp_path):
    """Engine case 48: the error names path, expected and found shape."""
    saved = {"params": {"a": jnp.zeros((2, 3)), "b": jnp.zeros(4), "d": jnp.zeros(1)}, "step": 1}
    like = {
        "params": {
            "a": jax.ShapeDtypeStruct((3, 2), jnp.float32),
            "c": jax.ShapeDtypeStruct((4,), jnp.float32),
            "d": jax.ShapeDtypeStruct((1,), jnp.bfloat16),
        },
        "step": 0,
    }
    expected = [
        "params/a: expected float32[3, 2], found float32[2, 3]",
        "params/b: not expected, the checkpoint has float32[4]",
        "params/c: expected float32[4], the checkpoint has none",
        "params/d: expected bfloat16[1], found float32[1]",
    ]

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, saved, cursor={})
        with pytest.raises(CheckpointError) as whole:
            checkpointer.restore(like=like)
        with pytest.raises(CheckpointError) as alone:
            restore_params(checkpointer.step_directory(1), like["params"])

    for line in expected:
        assert line in str(whole.value)
    for line in expected[:3]:  # parameters alone are converted to another float dtype
        assert line in str(alone.value)
    assert "params/d" not in str(alone.value)
    assert str(tmp_path) in str(whole.value)
    assert "step:" not in str(whole.value)


def test_parameters_alone_are_read_into_the_float_dtype_that_is_asked_for(tmp_path):
    saved = {"params": {"w": jnp.asarray([1.0, 1 / 3], jnp.bfloat16), "n": jnp.asarray([3])}}
    like = {"w": jax.ShapeDtypeStruct((2,), jnp.float32), "n": jax.ShapeDtypeStruct((1,), "int32")}

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, saved, cursor={})
        checkpointer.wait()
        found = restore_params(checkpointer.step_directory(1), like)

    assert found["w"].dtype == jnp.float32
    assert found["w"].tolist() == saved["params"]["w"].astype(jnp.float32).tolist()
    assert found["n"].tolist() == [3]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"params": {"name": "t5"}}, "params/name|name: a checkpoint holds arrays"),
        ({"x": np.array([object()])}, "x: a checkpoint holds arrays and numbers"),
        ({"a/b": jnp.ones(1), "a": {"b": jnp.ones(1)}}, "a/b: two leaves"),
    ],
)
def test_what_cannot_be_saved_is_named_and_leaves_nothing(tmp_path, state, message):
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointError, match=message):
            checkpointer.save(1, state, cursor={})

    assert list(tmp_path.iterdir()) == []


def test_a_cursor_that_is_not_json_is_refused_before_anything_is_written(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(CheckpointError, match="cursor must be JSON"):
            checkpointer.save(1, state_of(), cursor={"step": np.int64(3)})

    assert list(tmp_path.iterdir()) == []


def test_a_committed_step_is_not_saved_over(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, state_of(seed=1), cursor={})
        with pytest.raises(CheckpointError, match="step 1 is already committed"):
            checkpointer.save(1, state_of(seed=2), cursor={})
        restored, _ = checkpointer.restore(like=abstract(state_of()))

    assert bits(restored) == bits(state_of(seed=1))


def test_a_synchronous_save_is_committed_when_it_returns(tmp_path):
    with Checkpointer(tmp_path, is_async=False) as checkpointer:
        checkpointer.save(4, state_of(), cursor={})

        assert checkpointer.steps() == [4]
        assert Checkpointer(tmp_path).latest() == 4


def test_a_save_goes_through_this_machines_disk_where_that_has_room(tmp_path, caplog):
    local, seen = tmp_path / "disk", set()
    local.mkdir()
    state = state_of()

    with Checkpointer(tmp_path / "a", local_directory=local) as checkpointer:
        checkpointer.save(1, state, cursor={})
        while checkpointer.latest() is None:
            seen.update(path.name for path in local.iterdir())
        checkpointer.wait()
        restored, _ = checkpointer.restore(like=abstract(state))
        checkpointer.save(2, state, cursor={}, through_local=False)

    assert bits(restored) == bits(state)
    assert seen & {"1", "1.orbax-checkpoint-tmp"}
    assert list(local.iterdir()) == []
    assert checkpointer.steps() == [2]
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("named", "problem"),
    [("disk", "estination"), ("gone", "No such file or directory"), ("/proc", "bytes do not fit")],
)
def test_where_this_machines_disk_fails_a_save_is_written_directly(
    tmp_path, caplog, named, problem
):
    local = tmp_path / named
    (tmp_path / "disk" / "1").mkdir(parents=True)  # where Orbax will not write
    state = {"params": {"w": np.arange(4.0)}}

    with Checkpointer(tmp_path / "a", local_directory=local) as checkpointer:
        checkpointer.save(1, state, cursor={})
        state["params"]["w"] += 1
        checkpointer.wait()
        restored, _ = checkpointer.restore(like=state)

    assert np.array_equal(restored["params"]["w"], np.arange(4.0))
    (message,) = caplog.messages
    assert f"a/1 could not be written through {local} (" in message
    assert problem in message
    assert named != "disk" or list(local.iterdir()) == []


def test_closing_ends_the_background_threads(tmp_path):
    before = set(threading.enumerate())
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, state_of(), cursor={})
    checkpointer.close()
    checkpointer.close()

    left = [t.name for t in set(threading.enumerate()) - before if "checkpoint" in t.name]
    assert left == []
    assert Checkpointer(tmp_path).steps() == [1]


def test_an_empty_directory_has_nothing_to_restore(tmp_path):
    with Checkpointer(tmp_path / "new" / "deep") as checkpointer:
        assert checkpointer.steps() == []
        assert checkpointer.latest() is None
        with pytest.raises(CheckpointError, match="no committed checkpoint here"):
            checkpointer.restore(like=state_of())
        with pytest.raises(CheckpointError, match="step 5 is not committed; committed: none"):
            checkpointer.restore(5, like=state_of())


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(CheckpointError, match=f"{tmp_path}/file/checkpoints: cannot be made"):
        Checkpointer(tmp_path / "file" / "checkpoints")

"""A train step's memory is estimated from its trace, alike for equal work on each device."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from redco_flow import Deployer, TrainingPlan
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.engine.step.memory_estimate import estimate_step
from redco_flow.models.find import find_model

llama = find_model("llama")

LENGTH = 64
CONFIG = llama.Config.from_hugging_face(
    {
        "model_type": "llama",
        "vocab_size": 128,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "max_position_embeddings": LENGTH,
    }
)
TOKENS = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)


def of_llama(params, batch, rngs, is_training):
    return cross_entropy(llama.apply(CONFIG, params, batch["x"]), batch["x"])


def estimate(loss_fn, params, row, *, rows, num_devices, **shards):
    deployer = Deployer(devices=jax.devices()[:num_devices], **shards)
    plan = TrainingPlan(
        deployer,
        loss_fn=loss_fn,
        sharding_rules=deployer.get_sharding_rules(params, loss_fn, {"x": row}, None, False),
        params=params,
        optimizer=optax.adamw(1e-3),
        global_batch_size=rows,
        batch={"x": row},
    )
    return plan.estimate_bytes()


def of_windows(params, batch, rngs, is_training):
    """Products, and the largest of each window of their results."""
    images = jnp.tanh(batch["x"] @ params["w"])
    window = (1, 2, 2, 1)
    largest = jax.lax.reduce_window(images, -jnp.inf, jax.lax.max, window, window, "SAME")
    return (largest @ params["w"]).mean()


def of_matrices(params, batch, rngs, is_training):
    """Factors of matrices, 64 of each row."""
    matrices = batch["x"].reshape(-1, 64, 32, 32) @ params["w"]
    return (jnp.linalg.cholesky(matrices + jnp.eye(32)) @ params["w"]).mean()


@pytest.mark.parametrize("loss_fn", [of_windows, of_matrices])
def test_operations_of_a_users_own_model_split_their_rows_over_devices(loss_fn):
    params = {"w": jax.ShapeDtypeStruct((32, 32), jnp.float32)}
    row = jax.ShapeDtypeStruct((1, 64, 32, 32), jnp.float32)

    one = estimate(loss_fn, params, row, rows=4, num_devices=1)
    eight = estimate(loss_fn, params, row, rows=32, num_devices=8)

    assert eight == one


@pytest.mark.parametrize("num_context_shards", [2, 8])
def test_context_shards_split_as_much_as_data_shards_do(num_context_shards):
    sizes = {"rows": 8, "num_devices": 8}
    model = (of_llama, llama.abstract_params(CONFIG), TOKENS)

    of_data = estimate(*model, **sizes)
    of_context = estimate(*model, **sizes, num_context_shards=num_context_shards)

    # But for the sums of a ring's turns, and the numbers of rows.
    assert of_context == pytest.approx(of_data, rel=0.05)


def test_a_lookup_in_a_small_table_is_not_stored():
    params = {"w": jax.ShapeDtypeStruct((256, 8), jnp.float32)}
    row = jax.ShapeDtypeStruct((1, 256), jnp.uint8)
    sizes = {"rows": 64, "num_devices": 1}
    table = jnp.linspace(-1, 1, 16)

    def of_looked_up(params, batch, rngs, is_training):
        return (jnp.sin(table[batch["x"]]) @ params["w"]).mean()

    def of_computed(params, batch, rngs, is_training):
        return (jnp.sin(batch["x"] / 8.0 - 1) @ params["w"]).mean()

    looked_up = estimate(of_looked_up, params, row, **sizes)

    assert looked_up == estimate(of_computed, params, row, **sizes)


def in_layers(kernel_dims):
    """Return a loss of layers, whose kernels have these dims, and a head of its own."""

    def of_layers(params, batch, rngs, is_training):
        def layer(x, kernel):
            wide = jnp.tanh(jnp.einsum(f"bd,{kernel_dims}->bf", x, kernel))
            return jnp.einsum(f"bf,{kernel_dims}->bd", jnp.tanh(wide), kernel), None

        last, _ = jax.lax.scan(layer, batch["x"], params["layers"])
        return jnp.tanh(last @ params["head"]).mean()

    return of_layers


LAYERS, WIDTH, WIDE, HEAD, ROWS = 4, 16, 512, 64, 128


def estimate_layers(kernel_dims, **settings):
    sizes = {"d": WIDTH, "f": WIDE}
    kernels = (LAYERS, *[sizes[dim] for dim in kernel_dims])
    params = {
        "layers": jax.ShapeDtypeStruct(kernels, jnp.float32),
        "head": jax.ShapeDtypeStruct((WIDTH, HEAD), jnp.float32),
    }
    row = jax.ShapeDtypeStruct((1, WIDTH), jnp.float32)
    return estimate(in_layers(kernel_dims), params, row, **settings)


def test_on_several_devices_a_heads_gradient_waits_for_the_layers():
    """Meanwhile what it is the product of is kept."""
    one = estimate_layers("df", rows=ROWS, num_devices=1)
    two = estimate_layers("df", rows=2 * ROWS, num_devices=2)

    assert two - one == 4 * (ROWS * (HEAD + WIDTH) - HEAD * WIDTH)


def test_parameters_that_are_gathered_along_a_later_dim_are_laid_out_again_once():
    """Kernels are split along their widest dim."""
    first = estimate_layers("fd", rows=2 * ROWS, num_devices=2, num_fsdp_shards=2)
    later = estimate_layers("df", rows=2 * ROWS, num_devices=2, num_fsdp_shards=2)

    assert later - first == 4 * LAYERS * WIDTH * WIDE / 2


def of_loops(params, batch, rngs, is_training):
    """Layers that are computed again, one after another, each with a loop in it."""

    @jax.checkpoint
    def layer(x, kernel):
        return jax.lax.map(jnp.tanh, (x @ kernel).T).T

    x = batch["x"]
    for kernel in params["layers"]:
        x = layer(x, kernel)
    return (x @ params["head"]).mean()


def test_kernels_gradients_wait_for_the_next_loop_and_not_for_all():
    params = {
        "layers": [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 8,
        "head": jax.ShapeDtypeStruct((WIDTH, HEAD), jnp.float32),
    }
    row = jax.ShapeDtypeStruct((1, WIDTH), jnp.float32)

    one, two = (estimate(of_loops, params, row, rows=ROWS * n, num_devices=n) for n in (1, 2))

    assert two < 1.2 * one


def test_zeros_of_one_shape_are_made_at_once_for_all_loops():
    """XLA needs as many arrays for a chain of loops; 1.03, 2.03, 4.03, 8.03 for H100s."""
    params = {"w": jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)}
    row = jax.ShapeDtypeStruct((1, ROWS, WIDTH), jnp.float32)

    def of_chain(num_loops):
        def loss(params, batch, rngs, is_training):
            x = batch["x"]
            for _ in range(num_loops):
                x = jax.lax.map(jnp.tanh, x)
            return (x @ params["w"]).mean()

        return estimate(loss, params, row, rows=64, num_devices=1)

    assert of_chain(8) - of_chain(4) == 4 * (4 * 64 * ROWS * WIDTH)


@pytest.mark.parametrize(
    ("queries", "keys", "scores", "compiled_mib"),
    [("bqgrk", "bmgk", "bgrqm", 1667), ("bqhk", "bmhk", "bhqm", 1227)],
    ids=["grouped", "heads"],
)
def test_scores_of_grouped_heads_are_copied_between_loops(queries, keys, scores, compiled_mib):
    """XLA writes products of heads alone as they are read; the figures are its own for an H100."""
    sharding = NamedSharding(Mesh(jax.devices()[:1], ("data",)), PartitionSpec())
    shapes = [(16, 64), (2, 1024, 4, 64)]
    scales, x = (jax.ShapeDtypeStruct(one, jnp.float32, sharding=sharding) for one in shapes)

    def loss(scales, x):
        def attend(x, scale):
            key = jnp.tanh(x)
            query = (x * scale).reshape(2, 1024, 4, *[1] * (len(queries) - 4), 64)
            weights = jax.nn.softmax(jnp.einsum(f"{queries},{keys}->{scores}", query, key))
            mixed = jnp.einsum(f"{scores},{keys}->{queries}", weights, key)
            return mixed.reshape(x.shape), None

        return jax.lax.scan(attend, x, scales)[0].mean()

    estimated = estimate_step(jax.make_jaxpr(jax.grad(loss))(scales, x), scales, x)

    assert estimated / 2**20 == pytest.approx(compiled_mib, rel=0.01)


def test_parameters_kept_in_another_type_are_split_as_the_parameters():
    params = {"layers": jax.ShapeDtypeStruct((64, WIDE, WIDTH), jnp.float32)}
    row = jax.ShapeDtypeStruct((1, WIDE), jnp.bfloat16)

    def loss(params, batch, rngs, is_training):
        def layer(x, kernel):
            kernel = kernel.astype(jnp.bfloat16)
            return (x @ kernel) @ kernel.T, None

        return jax.lax.scan(layer, batch["x"], params["layers"])[0].mean()

    one = estimate(loss, params, row, rows=1, num_devices=1)
    two = estimate(loss, params, row, rows=2, num_devices=2, num_fsdp_shards=2)

    assert two == pytest.approx(one / 2, rel=0.1)

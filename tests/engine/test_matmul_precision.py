"""Products of a float32 model are float32 on accelerators too, forward and backward."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental import topologies

from redco_flow import Deployer, TrainingPlan
from redco_flow.engine.step.loss import cross_entropy
from redco_flow.models.find import find_model

llama = find_model("llama")

LENGTH = 128
CONFIG = llama.Config.from_hugging_face(
    {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "intermediate_size": 512,
        "max_position_embeddings": LENGTH,
    }
)
ROWS = jax.ShapeDtypeStruct((4, LENGTH), jnp.int32)


@pytest.fixture
def tpus(monkeypatch):
    pytest.importorskip("libtpu", reason="pip install libtpu")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    return topologies.get_topology_desc("v5e:2x2", platform="tpu").devices


def plan_of(devices, dtype="float32", precision="highest"):
    config = CONFIG.updated({"dtype": dtype})
    params, batch = llama.abstract_params(config), {"ids": ROWS}

    def loss_fn(params, batch, rngs, is_training):
        return cross_entropy(llama.apply(config, params, batch["ids"]), batch["ids"])

    deployer = Deployer(num_fsdp_shards=4, devices=devices, matmul_precision=precision)
    return TrainingPlan(
        deployer,
        loss_fn=loss_fn,
        params=params,
        optimizer=optax.adamw(1e-3),
        sharding_rules=deployer.get_sharding_rules(params, loss_fn, batch, None, False),
        global_batch_size=4,
        batch=batch,
    )


def precisions(lowered):
    """Each product's, as the program that XLA gets says it."""
    products = re.findall(r"stablehlo\.dot_general .*", lowered.as_text())
    assert products
    return [re.findall(r"HIGHEST|HIGH|DEFAULT", product) for product in products]


@pytest.mark.slow
def test_a_float32_step_for_tpus_multiplies_in_float32(tpus):
    """All of XLA's products, forward and backward; `test_attention_kernels` compiles one."""
    plan = plan_of(tpus)
    seed = jax.ShapeDtypeStruct((), jnp.uint32)
    evaluated = plan.eval_step.lower(plan.state["params"], seed, plan.micro_batches())
    lowered = plan.lower()

    assert all(one == ["HIGHEST", "HIGHEST"] for one in precisions(lowered))
    assert all(one == ["HIGHEST", "HIGHEST"] for one in precisions(evaluated))


@pytest.mark.slow
def test_without_a_precision_programs_are_as_jax_makes_them(tpus):
    assert "HIGHEST" not in plan_of(tpus, "float32", None).lower().as_text()


@pytest.mark.slow
def test_jaxs_own_setting_wins(tpus):
    with jax.default_matmul_precision("bfloat16"):
        found = precisions(plan_of(tpus).lower())

    # JAX's name of the default, one pass.
    assert not [one for one in found if "HIGHEST" in one]


def test_a_program_for_cpus_is_the_same():
    asked = plan_of(jax.devices()[:4]).lower().as_text()

    assert asked == plan_of(jax.devices()[:4], precision=None).lower().as_text()

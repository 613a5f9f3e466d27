"""Programs for GPUs and TPUs compute while they communicate; the user's own flags win."""

import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental import topologies

from redco_flow import Deployer, TrainingPlan
from redco_flow.engine import compiler_options as options
from redco_flow.engine.compiler_options import compiler_options

WIDTH = 512


@pytest.fixture
def tpus(monkeypatch):
    """Give the chips of a slice that is not there."""
    pytest.importorskip("libtpu", reason="pip install libtpu")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    return lambda name: topologies.get_topology_desc(name, platform="tpu").devices


def on_one(device):
    shape = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    deployer = Deployer(devices=[device])
    return deployer.jit(jnp.sin, in_shardings=deployer.named_sharding()).lower(shape)


def plan_of(devices):
    """Two kernels of each layer, split over all devices."""
    kernels = jax.ShapeDtypeStruct((4, WIDTH, WIDTH), jnp.bfloat16)
    params = {"wi": kernels, "wo": kernels}
    batch = {"x": jax.ShapeDtypeStruct((8, 512, WIDTH), jnp.bfloat16)}

    def loss_fn(params, batch, rngs, is_training):
        def layer(x, kernels):
            inner = jax.nn.relu(x @ kernels["wi"].astype(x.dtype))
            return x + inner @ kernels["wo"].astype(x.dtype), None

        x, _ = jax.lax.scan(layer, batch["x"], params)
        return jnp.mean(jnp.square(x.astype(jnp.float32)), (1, 2)), jnp.ones(len(x))

    deployer = Deployer(num_fsdp_shards=len(devices), devices=devices)
    return TrainingPlan(
        deployer,
        loss_fn=loss_fn,
        params=params,
        optimizer=optax.adamw(1e-3),
        sharding_rules=deployer.get_sharding_rules(params, loss_fn, batch, None, False),
        global_batch_size=8,
        batch=batch,
    )


def num_asynchronous(program):
    return len(re.findall(r"^ +(?:ROOT )?%async-collective-start", program, re.MULTILINE))


def test_cpus_have_no_options():
    assert compiler_options(Deployer().mesh, {}) == {}


def test_each_xla_is_given_the_gpu_options_that_it_knows():
    """One compiler reads the options of all platforms but TPUs; some were renamed."""
    given = {"xla_gpu_enable_nothing": True, **options.GPU_OPTIONS}

    with jax.set_mesh(Deployer(2).mesh):  # a caller's own, of more devices
        known = options.known_options(jax.devices()[0], tuple(given.items()))

    assert jax.jit(jnp.sin).lower(1.0).compile(known)
    assert "xla_gpu_enable_latency_hiding_scheduler" in known
    for name in ("all_gather", "all_reduce", "reduce_scatter"):
        names = {f"xla_gpu_enable_pipelined_{name}", f"xla_gpu_pipeline_{name}"}
        assert len(names & known.keys()) == 1
    assert len(known) == 4


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2"])
def test_the_compiler_of_each_tpu_accepts_its_options(tpus, topology):
    device = tpus(topology)[0]
    given = compiler_options(Deployer(devices=[device]).mesh, {})

    assert on_one(device).compile()
    assert ("xla_tpu_scoped_vmem_limit_kib" in given) == topology.startswith("v6e")
    with pytest.raises(jax.errors.JaxRuntimeError, match="No such compile option"):
        on_one(device).compile({"xla_tpu_enable_nothing": True})


@pytest.mark.slow
def test_an_option_that_the_environment_names_is_left_to_it(tpus):
    mesh = Deployer(devices=tpus("v5e:2x2")).mesh
    environ = {
        "XLA_FLAGS": "--xla_dump_to=/tmp --xla_enable_async_all_gather=false",
        "LIBTPU_INIT_ARGS": "--noxla_tpu_overlap_compute_collective_tc",
    }

    found = compiler_options(mesh, environ)

    left = {"xla_enable_async_all_gather", "xla_tpu_overlap_compute_collective_tc"}
    assert left <= set(compiler_options(mesh, {}))
    assert set(found) == set(compiler_options(mesh, {})) - left


def test_programs_are_compiled_with_their_platforms_options(monkeypatch, tmp_path):
    monkeypatch.setitem(options._BY_PLATFORM, "cpu", {"xla_dump_to": str(tmp_path)})

    def some_step(x):
        return jnp.sin(x)

    compiled = Deployer(devices=jax.devices()[:1]).jit(some_step)
    compiled.lower(jax.ShapeDtypeStruct((4,), jnp.float32)).compile()

    assert list(tmp_path.glob("*jit_some_step*"))


@pytest.mark.slow
def test_training_gathers_while_it_computes_on_tpus(tpus):
    """On v5e: libtpu 0.0.50 does so on no other chip, 0.0.42 by these options on v5p, too."""
    devices = tpus("v5e:2x2")

    assert num_asynchronous(plan_of(devices).compile().as_text()) > 0

from pathlib import Path

from redco_flow.launch.worker_process import jax_variables

CACHE = Path("/cache/jax")


def test_an_inherited_number_of_cpu_devices_is_replaced_and_other_flags_are_kept():
    environ = {"XLA_FLAGS": "--xla_a=1 --xla_force_host_platform_device_count=8 --xla_b"}

    variables = jax_variables(environ, num_cpu_devices=2, compile_cache=CACHE)

    assert variables["XLA_FLAGS"] == "--xla_a=1 --xla_b"
    assert variables["JAX_NUM_CPU_DEVICES"] == "2"


def test_without_a_number_the_devices_are_left_as_inherited():
    environ = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}

    variables = jax_variables(environ, num_cpu_devices=None, compile_cache=CACHE)

    assert "XLA_FLAGS" not in variables
    assert "JAX_NUM_CPU_DEVICES" not in variables


def test_the_compile_cache_keeps_everything_and_gives_way_to_a_place_of_the_users_own():
    ours = jax_variables({}, num_cpu_devices=1, compile_cache=CACHE)
    theirs = jax_variables(
        {"JAX_COMPILATION_CACHE_DIR": "/mine"}, num_cpu_devices=1, compile_cache=CACHE
    )

    assert ours["JAX_COMPILATION_CACHE_DIR"] == "/cache/jax"
    assert ours["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "0"
    assert theirs["JAX_COMPILATION_CACHE_DIR"] == "/mine"


def test_a_worker_may_take_most_of_a_gpus_memory_unless_the_user_names_a_share():
    ours = jax_variables({}, num_cpu_devices=None, compile_cache=CACHE)
    theirs = [
        jax_variables({name: "0.4"}, num_cpu_devices=None, compile_cache=CACHE)
        for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
    ]

    assert ours["XLA_CLIENT_MEM_FRACTION"] == "0.92"
    assert not any("XLA_CLIENT_MEM_FRACTION" in one for one in theirs)

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from redco_flow.engine.step.traffic import Collective, read_collectives, wire_bytes

SHARDS = 4
FLOATS = 64  # on each device


@pytest.fixture(scope="module")
def mesh():
    devices = jax.devices()[: 2 * SHARDS]
    return jax.make_mesh((2, SHARDS), ("data", "model"), (AxisType.Auto,) * 2, devices=devices)


def compiled(mesh, function):
    """The HLO of `function` run by every device on its own 64 floats."""
    spec = PartitionSpec(("data", "model"))
    manual = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    values = jax.ShapeDtypeStruct((2 * SHARDS * FLOATS,), jnp.float32)
    return jax.jit(manual).lower(values).compile().as_text()


def test_an_all_reduce_counts_its_bytes_twice_but_for_the_own_share(mesh):
    text = compiled(mesh, lambda x: jax.lax.psum(x, "model"))

    assert read_collectives(text) == [Collective("all-reduce", FLOATS * 4, SHARDS, 1)]
    assert wire_bytes(text) == 2 * 3 / 4 * FLOATS * 4


def test_the_group_is_the_axes_that_are_reduced_over(mesh):
    text = compiled(mesh, lambda x: jax.lax.psum(x, ("data", "model")))

    assert [one.group_size for one in read_collectives(text)] == [2 * SHARDS]


def test_an_all_gather_counts_its_result(mesh):
    text = compiled(mesh, lambda x: jax.lax.all_gather(x, "model", tiled=True).sum() + x)

    (gather,) = (one for one in read_collectives(text) if one.kind == "all-gather")
    assert gather.num_bytes == SHARDS * FLOATS * 4
    assert gather.wire_bytes == 3 * FLOATS * 4


def test_what_a_loop_sends_counts_once_per_turn(mesh):
    def five_turns(x):
        def turn(carry, _):
            return jax.lax.psum(carry, "model") / SHARDS, None

        return jax.lax.scan(turn, x, None, length=5)[0]

    assert wire_bytes(compiled(mesh, five_turns)) == 5 * 2 * 3 / 4 * FLOATS * 4


def test_a_loop_of_which_the_compiler_tells_no_length_counts_to_its_constant(mesh):
    """As the compilers of other devices write them."""

    def five_turns(x):
        return jax.lax.fori_loop(0, 5, lambda i, carry: jax.lax.psum(carry, "model"), x)

    text = compiled(mesh, five_turns)
    untold = re.sub(r'"known_trip_count":\{"n":"5"\},?', "", text)

    assert untold != text
    assert wire_bytes(untold) == wire_bytes(text) == 5 * 2 * 3 / 4 * FLOATS * 4


def test_a_permutation_counts_its_bytes_once(mesh):
    ring = [(i, (i + 1) % SHARDS) for i in range(SHARDS)]
    text = compiled(mesh, partial(jax.lax.ppermute, axis_name="model", perm=ring))

    assert wire_bytes(text) == FLOATS * 4


def test_a_permutation_that_is_started_and_awaited_counts_once():
    """As compilers for accelerators write it: operands, results, and two counters."""
    text = """HloModule step

ENTRY %main (x: bf16[2,32]) -> bf16[2,32] {
  %x = bf16[2,32]{1,0} parameter(0)
  %start = (bf16[2,32]{1,0:T(8,128)}, bf16[2,32]{1,0:T(8,128)}, u32[]{:S(2)}, u32[]{:S(2)}) \
collective-permute-start(%x), channel_id=1, source_target_pairs={{0,1},{1,0}}
  ROOT %done = bf16[2,32]{1,0} collective-permute-done(%start)
}
"""

    assert read_collectives(text) == [Collective("collective-permute", 2 * 32 * 2, 2, 1)]


def test_a_program_without_exchange_sends_nothing(mesh):
    assert wire_bytes(compiled(mesh, jnp.sin)) == 0


def test_a_collective_in_a_loop_of_unknown_length_is_an_error(mesh):
    def until_large(x):
        return jax.lax.while_loop(lambda x: x[0] < 1e6, lambda x: jax.lax.psum(x, "model") + 1.0, x)

    with pytest.raises(ValueError, match="not known"):
        read_collectives(compiled(mesh, until_large))


def test_what_is_no_module_is_an_error():
    with pytest.raises(ValueError, match="ENTRY"):
        read_collectives("nothing here")

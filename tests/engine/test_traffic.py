import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, PartitionSpec

from tests.engine.traffic import Collective, read_collectives, wire_bytes

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


def test_a_loop_whose_condition_is_fused_counts_to_its_constant():
    text = """HloModule step

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%a, %b)
}

%body (state: (s32[], f32[64])) -> (s32[], f32[64]) {
  %state = (s32[], f32[64]{0}) parameter(0)
  %one = s32[] constant(1)
  %turn = s32[] get-tuple-element(%state), index=0
  %x = f32[64]{0} get-tuple-element(%state), index=1
  %reduced = f32[64]{0} all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%sum
  %next = s32[] add(%turn, %one)
  ROOT %result = (s32[], f32[64]{0}) tuple(%next, %reduced)
}

%compare (limit: s32[], counted: s32[]) -> pred[] {
  %limit = s32[]{:T(128)} parameter(0)
  %counted = s32[] parameter(1)
  ROOT %less = pred[] compare(%counted, %limit), direction=LT
}

%condition (state.1: (s32[], f32[64])) -> pred[] {
  %state.1 = (s32[], f32[64]{0}) parameter(0)
  %five = s32[] constant(5)
  %turn.1 = s32[] get-tuple-element(%state.1), index=0
  ROOT %fused = pred[] fusion(%five, %turn.1), kind=kLoop, calls=%compare
}

ENTRY %main (y: (s32[], f32[64])) -> (s32[], f32[64]) {
  %y = (s32[], f32[64]{0}) parameter(0)
  ROOT %loop = (s32[], f32[64]{0}) while(%y), condition=%condition, body=%body
}
"""

    assert read_collectives(text) == [Collective("all-reduce", FLOATS * 4, SHARDS, 5)]


@pytest.mark.parametrize(("step", "turns"), [(1, 6), (2, 3), (4, 2)])
def test_a_loop_that_does_several_turns_at_once_counts_by_them(step, turns):
    """As a TPU's compiler writes a product whose operand comes in parts."""
    text = f"""HloModule step

%body (state: (u32[], f32[64])) -> (u32[], f32[64]) {{
  %seven = u32[] constant(7)
  %step = u32[]{{:T(128)}} constant({step})
  %state = (u32[]{{:T(128)}}, f32[64]{{0}}) parameter(0)
  %turn = u32[]{{:T(128)}} get-tuple-element(%state), index=0
  %x = f32[64]{{0}} get-tuple-element(%state), index=1
  %part = u32[] add(%turn, %seven)
  %sent = f32[64]{{0}} collective-permute(%x), source_target_pairs={{{{0,1}},{{1,0}}}}
  %next = u32[]{{:T(128)}} add(%turn, %step)
  ROOT %result = (u32[]{{:T(128)}}, /*index=1*/f32[64]{{0}}) tuple(%next, %sent)
}}

%condition (state.1: (u32[], f32[64])) -> pred[] {{
  %six = u32[]{{:T(128)}} constant(6)
  %state.1 = (u32[]{{:T(128)}}, f32[64]{{0}}) parameter(0)
  %turn.1 = u32[]{{:T(128)}} get-tuple-element(%state.1), index=0
  ROOT %less = pred[]{{:T(512)}} compare(%turn.1, %six), direction=LT
}}

ENTRY %main (y: (u32[], f32[64])) -> (u32[], f32[64]) {{
  %y = (u32[], f32[64]{{0}}) parameter(0)
  ROOT %loop = (u32[], f32[64]{{0}}) while(%y), condition=%condition, body=%body
}}
"""

    assert read_collectives(text) == [Collective("collective-permute", 64 * 4, 2, turns)]


def test_a_collective_that_fusions_begin_and_end_beside_other_work_counts_once():
    """As a TPU's compiler writes an all-gather that runs beside two products."""
    channels = {"begin": 7, "beside": 7, "end": 7, "another": 8}
    groups = "replica_groups={{0,1,2,3}}, dimensions={0}"
    fused = "".join(
        f"""
%{name} (part: bf16[8,16]) -> bf16[32,16] {{
  %part = bf16[8,16] parameter(0)
  ROOT %whole = bf16[32,16] all-gather(%part), channel_id={channel}, {groups}
}}
"""
        for name, channel in channels.items()
    )
    calls = "\n".join(
        f"  %of.{name} = bf16[32,16] fusion(%x), kind=kCustom, calls=%{name}" for name in channels
    )
    text = f"""HloModule step
{fused}
ENTRY %main (x: bf16[8,16]) -> bf16[32,16] {{
  %x = bf16[8,16] parameter(0)
{calls}
  ROOT %copy = bf16[32,16] copy(%of.end)
}}
"""

    assert read_collectives(text) == [Collective("all-gather", 32 * 16 * 2, SHARDS, 1)] * 2


def test_an_all_reduce_that_a_fusion_slices_is_a_reduce_scatter():
    """As a TPU's compiler writes one."""
    text = """HloModule step

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%all-reduce-scatter.3 (input: f32[64,8]) -> f32[16,8] {
  %input = f32[64,8]{1,0} parameter(0)
  %all-reduce.2 = f32[64,8]{1,0} all-reduce(%input), channel_id=2, replica_groups={{0,1,2,3}}, to_apply=%add
  %partition-id.2 = u32[] partition-id()
  %constant.12 = u32[] constant(16)
  %multiply.2 = u32[] multiply(%partition-id.2, %constant.12)
  %constant.13 = u32[] constant(0)
  ROOT %dynamic-slice.3 = f32[16,8]{1,0} dynamic-slice(%all-reduce.2, %multiply.2, %constant.13), dynamic_slice_sizes={16,8}
}

ENTRY %main (x: f32[64,8]) -> f32[16,8] {
  %x = f32[64,8]{1,0} parameter(0)
  ROOT %fusion = f32[16,8]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.3
}
"""  # noqa: E501

    assert read_collectives(text) == [Collective("reduce-scatter", 64 * 8 * 4, SHARDS, 1)]


def test_groups_of_a_mesh_whose_devices_are_listed_are_its_axes():
    text = """HloModule step

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

ENTRY %main (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  ROOT %all-reduce = f32[64]{0} all-reduce(%x), channel_id=6, replica_groups=mesh['axis_0'=4,'axis_1'=2], device_ids=([2,4]T(1,0)) {'axis_0'}, use_global_device_ids=true, to_apply=%add
}
"""  # noqa: E501

    assert read_collectives(text) == [Collective("all-reduce", 64 * 4, 4, 1)]


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

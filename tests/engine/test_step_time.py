"""Times of hand-written programs: closed forms of an H100's data sheet."""

from dataclasses import replace

import pytest

from redco_flow.engine.devices import find_device
from redco_flow.engine.step.links import Fabrics, Figures, Links, NotPredicted, find_traffic
from redco_flow.engine.step.program import Program
from redco_flow.engine.step.step_time import BEST, USUAL, WORST, predict_step_time

FLOPS, HBM, NVLINK, NETWORK = 989.4e12, 3350e9, 450e9, 50e9
LAUNCH = USUAL.launch_seconds
MB = 2**20
# Of 2**20 floats: what a kernel reads and writes, and what is computed in it.
MOVED = 2 * 4 * MB / (USUAL.memory * HBM) + LAUNCH
N = 4096

PROGRAM = """\
HloModule test, is_scheduled=true

%fused (p: f32[1048576]) -> f32[1048576] {{
  %p = f32[1048576]{{0}} parameter(0)
  ROOT %double = f32[1048576]{{0}} add(%p, %p)
}}

%once (v: f32[1048576]) -> f32[1048576] {{
  %v = f32[1048576]{{0}} parameter(0)
  ROOT %twice = f32[1048576]{{0}} fusion(%v), kind=kLoop, calls=%fused
}}

%multiplied (l: bf16[4096,4096], r: bf16[4096,4096]) -> bf16[4096,4096] {{
  %l = bf16[4096,4096]{{1,0}} parameter(0)
  %r = bf16[4096,4096]{{1,0}} parameter(1)
  ROOT %product = bf16[4096,4096]{{1,0}} dot(%l, %r), lhs_contracting_dims={{1}}, {rhs}
}}

%turn (state: (s32[], f32[1048576])) -> (s32[], f32[1048576]) {{
  %state = (s32[], f32[1048576]{{0}}) parameter(0)
  %count = s32[] get-tuple-element(%state), index=0
  %value = f32[1048576]{{0}} get-tuple-element(%state), index=1
  %next = f32[1048576]{{0}} fusion(%value), kind=kLoop, calls=%fused
  ROOT %result = (s32[], f32[1048576]{{0}}) tuple(%count, %next)
}}

%more (state: (s32[], f32[1048576])) -> pred[] {{
  %judged = (s32[], f32[1048576]{{0}}) parameter(0)
  ROOT %yes = pred[] constant(true)
}}

ENTRY %main (a: bf16[4096,4096], x: f32[1048576], s: (s32[], f32[1048576])) -> f32[1048576] {{
  %a = bf16[4096,4096]{{1,0}} parameter(0)
  %x = f32[1048576]{{0}} parameter(1)
  %s = (s32[], f32[1048576]{{0}}) parameter(2)
{body}
}}
"""
ELEMENTWISE = "  %y = f32[1048576]{0} fusion(%x), kind=kLoop, calls=%fused"
PRODUCT = "  %b = bf16[4096,4096]{1,0} fusion(%a, %a), kind=kCustom, calls=%multiplied"
LOOP = "  %w = (s32[], f32[1048576]{0}) while(%s), condition=%more, body=%turn"
TRIPS = ', backend_config={"known_trip_count":{"n":"7"}}'
REDUCE = "  %r = f32[1048576]{{0}} all-reduce(%x), {groups}, to_apply=%add"
QUERIES, KEYS = "bf16[4,2048,8,128]{3,2,1,0}", "bf16[4,1024,2,128]{3,2,1,0}"
ATTENTION = f"""\
  %q = {QUERIES} bitcast(%a)
  %k = {KEYS} bitcast(%a)
  %o = {QUERIES} custom-call(%q, %k, %k), custom_call_target="__gpu$xla.gpu.triton", \
metadata={{op_name="jit(step)/jvp(flash_forward)/pallas_call"}}"""
SQUARE = "  %e = f32[1024,1024]{1,0} bitcast(%x)"
FLOAT32 = (
    "  %d = f32[1024,1024]{1,0} dot(%e, %e), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
)
ONE_PRODUCT = 2 * N**3 / (USUAL.products * FLOPS) + LAUNCH


def program(*lines):
    return Program(PROGRAM.format(body="\n".join(lines), rhs="rhs_contracting_dims={0}"))


def step_time(*lines, device="h100", num_devices=1, per_host=8, fabrics=None, **measured):
    hosts = [number // per_host for number in range(num_devices)]
    known = replace(find_device(device), measured=measured)
    return predict_step_time(program(*lines), known, hosts, fabrics)


@pytest.mark.parametrize(
    ("lines", "seconds"),
    [
        ([ELEMENTWISE], MOVED),
        ([PRODUCT], ONE_PRODUCT),
        ([PRODUCT, ELEMENTWISE], ONE_PRODUCT + MOVED),
        ([LOOP + TRIPS], 7 * MOVED),
        # Its longest branch: one fusion, or what that computes, which reads the array twice.
        (
            [
                "  %c = f32[1048576]{0} conditional(%x, %x, %x), true_computation=%once, "
                "false_computation=%fused"
            ],
            3 * 4 * MB / (USUAL.memory * HBM) + LAUNCH,
        ),
        (["  %c = f32[1048576]{0} conditional(%x, %x), branch_computations={%once, %once}"], MOVED),
        # Float32 is multiplied as TF32 where nothing else is prescribed.
        (
            [SQUARE, FLOAT32 + ', metadata={op_name="highest_score"}'],
            2 * 1024**3 / (USUAL.products * 494.7e12) + LAUNCH,
        ),
        (
            [SQUARE, FLOAT32 + ", operand_precision={highest,highest}"],
            2 * 1024**3 / (USUAL.products * 66.9e12) + LAUNCH,
        ),
        # A query sees each of the keys; in causal order half of them.
        (
            [ATTENTION],
            2 * 2 * 4 * 8 * 2048 * 1024 * 128 / (USUAL.attention * FLOPS) + LAUNCH,
        ),
        (
            [ATTENTION.replace("forward", "forward_causal")],
            2 * 4 * 8 * 2048 * 1024 * 128 / (USUAL.attention * FLOPS) + LAUNCH,
        ),
    ],
)
def test_a_step_takes_the_sum_of_its_kernels_rooflines_and_launches(lines, seconds):
    time = step_time(*lines)

    assert time.seconds == pytest.approx(seconds, rel=1e-9)
    assert sum(time.parts.values()) == pytest.approx(time.seconds)


def test_measured_figures_take_the_place_of_usual_shares():
    time = step_time(PRODUCT, ELEMENTWISE, bfloat16_tflops=500.0, hbm_gb_s=2000.0)
    computing = 2 * N**3 / 500e12
    usual = step_time(PRODUCT, ELEMENTWISE)

    assert time.parts["products"] == pytest.approx(computing)
    moving = usual.parts["other kernels"] * USUAL.memory * HBM / 2000e9
    assert time.parts["other kernels"] == pytest.approx(moving)
    assert time.facts == ["hbm_gb_s", "bfloat16_tflops"]
    assert time.least < time.seconds < time.most


def test_the_interval_is_what_kernels_attain_at_best_and_at_worst():
    time = step_time(PRODUCT)

    for found, attained in ((time.least, BEST), (time.most, WORST)):
        computing = 2 * N**3 / (attained.products * FLOPS)
        assert found == pytest.approx(computing + attained.launch_seconds, rel=1e-9)


@pytest.mark.parametrize(
    ("groups", "num_devices", "size", "in_host"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", 8, 4, 4),
        ("replica_groups={}", 8, 8, 8),
        ("replica_groups=[2,8]<=[16]", 16, 8, 8),
        ("replica_groups=[8,2]<=[2,8]T(1,0)", 16, 2, 1),
        ("replica_groups=[1,16]<=[16]", 16, 16, 8),
        ("replica_groups=mesh['data'=2,'model'=8] {'model'}", 16, 8, 8),
        ("replica_groups=mesh['data'=2,'model'=8] {'data'}", 16, 2, 1),
        ("replica_groups=mesh['all'=16] {'all':(1)4}", 16, 4, 2),
        ("replica_groups=mesh['a'=8,'b'=2], device_ids=([2,8]T(1,0)) {'a'}", 16, 8, 8),
        ("replica_groups=mesh['a'=8,'b'=2], device_ids=([2,8]T(1,0)) {'b'}", 16, 2, 1),
    ],
)
def test_an_all_reduce_takes_what_its_rings_send_over_the_slower_link(
    groups, num_devices, size, in_host
):
    time = step_time(REDUCE.format(groups=groups), num_devices=num_devices)

    turns = 2 * (size - 1)
    sent = turns / size * 4 * MB / USUAL.links
    on_links = [sent / NVLINK + turns * 0.6e-6] if in_host > 1 else []
    if size > in_host:
        on_links.append(sent / in_host / NETWORK + turns * 2.7e-6)
    assert time.seconds == pytest.approx(6.6e-6 + max(on_links), rel=1e-9)


def test_in_an_all_to_all_each_device_sends_its_parts_over_its_own_links():
    line = "  %t = f32[1048576]{0} all-to-all(%x), replica_groups=[1,16]<=[16]"

    time = step_time(line, num_devices=16)

    sent = 4 * MB / 16 / USUAL.links
    on_links = (7 * sent / NVLINK + 15 * 0.6e-6, 8 * sent / NETWORK + 15 * 2.7e-6)
    assert time.seconds == pytest.approx(6.6e-6 + max(on_links), rel=1e-9)


@pytest.mark.parametrize(
    ("of_host", "groups", "size", "num_sharing"),
    [
        # All-reduces of a device of each host: all of them share a host's slow link.
        ([0, 1], "replica_groups=[8,2]<=[2,8]T(1,0)", 2, 8),
        ([0, 0, 1, 1], "replica_groups=[4,4]<=[4,4]T(1,0)", 4, 4),
        # One ring over all devices crosses it once.
        ([0, 1], "replica_groups=[1,16]<=[16]", 16, 1),
        # Rings within a fabric do not.
        ([0, 0, 1, 1], "replica_groups=[2,8]<=[16]", 8, 0),
    ],
)
def test_what_goes_between_fabrics_shares_the_slow_link_of_its_host(
    of_host, groups, size, num_sharing
):
    line, per_host = REDUCE.format(groups=groups), 16 // len(of_host)
    fabrics = Fabrics(of_host, between_gb_s=1.0, latency_us=50.0)

    plain = step_time(line, num_devices=16, per_host=per_host).seconds
    time = step_time(line, num_devices=16, per_host=per_host, fabrics=fabrics).seconds

    turns = 2 * (size - 1)
    slow = turns * (4 * MB / size * num_sharing / (USUAL.links * 1e9) + 50e-6)
    assert time == pytest.approx(6.6e-6 + slow if num_sharing else plain, rel=1e-9)


@pytest.mark.parametrize(
    ("line", "sent"),
    [
        # Of a shift over two hosts of eight, one device of each sends to the other.
        ("collective-permute(%x), source_target_pairs={PAIRS}", 1),
        # Each of eight sends its parts for eight of the other fabric.
        ("all-to-all(%x), replica_groups=[1,16]<=[16]", 8 * 8 / 16),
    ],
)
def test_only_what_crosses_between_fabrics_shares_the_slow_link(line, sent):
    pairs = ",".join(f"{{{number},{(number + 1) % 16}}}" for number in range(16))
    line = "  %t = f32[1048576]{0} " + line.replace("PAIRS", pairs)
    fabrics = Fabrics([0, 1], between_gb_s=1.0, latency_us=0.0)

    time = step_time(line, num_devices=16, fabrics=fabrics)

    assert time.seconds == pytest.approx(6.6e-6 + sent * 4 * MB / (USUAL.links * 1e9), rel=1e-9)


def test_traffic_is_of_the_axes_that_collectives_go_along_and_counts_loops():
    body = REDUCE.format(groups="replica_groups=[8,2]<=[16]").replace("%x", "%value")
    text = PROGRAM.replace("  %next =", body.replace("{", "{{").replace("}", "}}") + "\n  %next =")
    lines = [
        LOOP + TRIPS,
        REDUCE.format(groups="replica_groups=[8,2]<=[2,8]T(1,0)").replace("%r", "%over_data"),
        REDUCE.format(groups="replica_groups=[1,16]<=[16]").replace("%r", "%over_all"),
    ]
    found = Program(text.format(body="\n".join(lines), rhs="rhs_contracting_dims={0}"))
    links = Links(Figures(find_device("h100")), [0] * 8 + [1] * 8, 1.0)

    traffic = find_traffic(found, links, {"data": 2, "fsdp": 4, "model": 2})

    assert {(one.axes, one.link): one.bytes_per_device / (4 * MB) for one in traffic} == {
        ("data", "between hosts"): 1,
        ("data and fsdp and model", "between hosts"): 2 * 15 / 16,
        ("model", "in a host"): 7,
    }
    seconds = {one.axes: one.seconds for one in traffic}
    assert seconds["model"] == pytest.approx(7 * (6.6e-6 + 4 * MB / NVLINK + 2 * 0.6e-6))


def test_of_an_asynchronous_collective_only_the_wait_counts():
    reduce = REDUCE.format(groups="replica_groups={}")
    start = reduce.replace("%r =", "%s1 =").replace("all-reduce(", "all-reduce-start(")
    done = "  %r = f32[1048576]{0} all-reduce-done(%s1)"
    alone = step_time(reduce, num_devices=8).seconds

    hidden = step_time(start, PRODUCT, done, num_devices=8)
    waited = step_time(start, ELEMENTWISE, done, num_devices=8)

    assert MOVED < alone < ONE_PRODUCT
    assert hidden.seconds == pytest.approx(ONE_PRODUCT)
    assert waited.seconds == pytest.approx(alone)
    assert waited.parts["communication"] == pytest.approx(alone - MOVED)


@pytest.mark.parametrize(
    ("line", "device", "reason"),
    [
        (LOOP, "h100", "the loop w does not say how often it turns"),
        (
            '  %c = f32[4] custom-call(%x), custom_call_target="own_kernel"',
            "h100",
            "the custom call own_kernel is not known",
        ),
        (
            ATTENTION.replace("flash_forward", "own"),
            "h100",
            "a kernel of Triton is not known",
        ),
        (
            "  %d = f64[64,64] dot(%e, %e), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
            "h100",
            "the speed of products of f64 on h100 is not known",
        ),
        (
            "  %d = f32[64,64] dot(%x, %x), rhs_contracting_dims={0}, algorithm=dot_f32_f32_f32",
            "h100",
            "the speed of products of f32 dot_f32_f32_f32 on h100 is not known",
        ),
        (
            "  %g = f32[1048576]{0} ragged-all-to-all-start(%x, %x)",
            "h100",
            "the ragged-all-to-all-start is not known",
        ),
        (
            REDUCE.format(groups="replica_groups={}"),
            "gh200",
            "the speed of the link of gh200 to other devices of its host is not known",
        ),
        (PRODUCT, "v5p", "no step on a TPU has been measured yet to compare with"),
        (
            "  %f = f32[8]{0:S(5)} copy(%x)",
            "h100",
            "the speed of copies to the host's memory is not known",
        ),
    ],
)
def test_what_is_not_known_is_refused(line, device, reason):
    doubles = "  %e = f64[64,64] bitcast(%a)"

    with pytest.raises(NotPredicted) as refused:
        step_time(doubles, line, device=device, num_devices=4)

    assert str(refused.value) == reason

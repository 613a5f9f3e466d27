"""Names of devices and targets, and what is said where nothing compiles for them."""

import sys
from dataclasses import replace

import pytest

from redco_flow.engine.devices import DEVICES, GpuArchitecture, find_device
from redco_flow.engine.errors import EngineError
from redco_flow.engine.targets import NoCompiler, read_target


@pytest.mark.parametrize(
    ("text", "kind", "topology"),
    [
        ("h100x8", "h100", (1, 1, 8)),
        ("a100-40gx4", "a100-40g", (1, 1, 4)),
        ("H200x32", "h200", (1, 4, 8)),
        ("v5p:2x2x4", "v5p", (2, 2, 4)),
        ("v5px4", "v5p", (2, 2, 1)),
        ("v4x64", "v4", (4, 4, 4)),
        ("v5ex8", "v5e", (2, 4)),
        ("v6e:4x4", "v6e", (4, 4)),
    ],
)
def test_a_target_names_a_device_and_a_topology(text, kind, topology):
    target = read_target(text)

    assert (target.device.kind, target.topology) == (kind, topology)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h100", "is not KINDxNUMBER or KIND:TOPOLOGY"),
        ("a100x8", "may be any of a100-40g, a100-80g, a100-80g-pcie"),
        ("h100x12", "12 GPUs are not a number of hosts with 8 each"),
        ("h100:2x4", "of GPUs give the number, as h100x8"),
        ("l4x1", "nothing can be compiled for l4 where there is none"),
        ("v5px12", "give the topology of 12 chips"),
        ("v5e:2x2x2", "a slice of v5e is AxB."),
        ("v4x0", "has no devices"),
    ],
)
def test_an_impossible_target_is_refused(text, said):
    with pytest.raises(EngineError, match=said):
        read_target(text)


@pytest.mark.parametrize(
    ("gres", "kind"),
    [
        ("nvidia_a100-sxm4-80gb", "a100-80g"),
        ("A100-SXM4-40GB", "a100-40g"),
        ("nvidia_h100_80gb_hbm3", "h100"),
        ("h200", "h200"),
        ("l40s", "l40s"),
    ],
)
def test_a_clusters_names_of_gpus_are_known(gres, kind):
    assert find_device(gres).kind == kind


ARCHITECTURE = {
    "compute_capability": 89, "num_cores": 142, "fpus_per_core": 128, "clock_ghz": 2.52,
    "shared_memory_per_core_bytes": 102400, "shared_memory_per_block_bytes": 101376,
    "l2_cache_bytes": 100663296,
}  # fmt: skip
OWN = {"reported": "NVIDIA Own", "bfloat16_tflops": 100.0, "memory_gib": 30.0, "hbm_gb_s": 900.0}


def test_described_facts_replace_those_of_the_table_or_describe_another_gpu():
    described = {
        "H100": {"hbm_gb_s": 3000.0},
        "l40s": {"architecture": ARCHITECTURE},
        "own": {**OWN, "architecture": ARCHITECTURE},
    }

    h100, l40s, own = (
        read_target(f"{name}x4", described=described).device for name in ("h100", "l40s", "own")
    )

    assert h100 == replace(find_device("h100"), hbm_gb_s=3000.0, described=frozenset({"hbm_gb_s"}))
    assert l40s.hbm_gb_s == find_device("l40s").hbm_gb_s
    assert (own.platform, own.reported, own.memory_gib) == ("cuda", "NVIDIA Own", 30.0)
    assert (own.tf32_tflops, own.host_gb_s, own.torus_dims) == (None, None, None)
    assert own.architecture == l40s.architecture == GpuArchitecture(**ARCHITECTURE)


@pytest.mark.parametrize(
    ("described", "said"),
    [
        ({"own": OWN}, "devices.own is not a known device, and lacks architecture; known devices"),
        ({"a100": {"hbm_gb_s": 2000.0}}, "may be any of a100-40g, .*: add `kind: a100-40g`"),
        ({"a100": {"kind": "a101"}}, "devices.a100: kind 'a101' is not a known device"),
        ({"h100": {}, "H100-SXM5": {}}, "devices.h100 and devices.H100-SXM5 are both h100"),
    ],
)
def test_facts_of_no_device_are_refused(described, said):
    with pytest.raises(EngineError, match=said):
        read_target("h100x8", described=described)


def test_a_profile_says_which_device_a_clusters_name_means():
    with pytest.raises(EngineError, match=r"`devices: \{A100: \{kind: a100-40g\}\}`"):
        find_device("A100")

    found = find_device("A100", {"a100": {"kind": "a100-80g", "hbm_gb_s": 1900.0}})

    described = frozenset({"hbm_gb_s"})
    assert found == replace(find_device("a100-80g"), hbm_gb_s=1900.0, described=described)


@pytest.mark.parametrize(
    ("reported", "kind"),
    [("NVIDIA A100-SXM4-80GB", "a100-80g"), ("NVIDIA A100 80GB PCIe", "a100-80g-pcie")],
)
def test_what_jax_reports_is_one_kind(reported, kind):
    assert [one.kind for one in DEVICES if one.is_reported_as(reported)] == [kind]


def test_kinds_are_unique_and_their_memory_is_read_in_far_less_than_a_second():
    assert len({one.kind for one in DEVICES}) == len(DEVICES)
    seconds = [one.memory_gib * 2**30 / (one.hbm_gb_s * 1e9) for one in DEVICES]
    assert all(0.01 < each < 0.1 for each in seconds)


@pytest.mark.parametrize(
    ("text", "module", "extra"),
    [("h100x8", "jax_plugins", "plan-gpu"), ("v5ex8", "libtpu", "plan-tpu")],
)
def test_a_missing_compiler_names_its_extra(monkeypatch, text, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, f"{module}.xla_cuda13", raising=False)

    with pytest.raises(NoCompiler, match=rf"pip install 'redco-flow\[{extra}\]'"):
        read_target(text).find_devices()

"""Names of devices and targets, and what is said where nothing compiles for them."""

import sys

import pytest

from redco_flow.engine.devices import DEVICES, find_device
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

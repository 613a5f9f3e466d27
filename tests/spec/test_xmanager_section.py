"""The `xmanager:` section: what a backend needs is asked for, and names are names."""

import pytest

from redco_flow.errors import ConfigError
from redco_flow.spec.load import load_profile


def test_mistakes_are_told_at_once_with_their_places(write):
    path = write(
        """\
        executor: xmanager
        xmanager:
          backend: slurm
          processes_per_host: 0
          kubernetes:
            image: "$(reboot)"
            namespace: Upper
            stored_variables: [{variable: HF TOKEN, object: hf}]
        """,
        "p.yaml",
    )

    with pytest.raises(ConfigError) as caught:
        load_profile(path)

    places = sorted((one.line, one.message.split(" ")[0]) for one in caught.value.problems)
    assert places == [
        (3, "'xmanager.backend'"),
        (4, "'xmanager.processes_per_host'"),
        (6, "'xmanager.kubernetes.image'"),
        (7, "'xmanager.kubernetes.namespace'"),
        (8, "'xmanager.kubernetes.stored_variables[0]'"),
        (8, "'xmanager.kubernetes.stored_variables[0].variable'"),
    ]


def test_a_cluster_needs_an_image_and_a_volume(write):
    path = write("executor: xmanager\nxmanager: {backend: kubernetes}\n", "p.yaml")

    with pytest.raises(ConfigError, match=r"needs kubernetes.image, volume_claim"):
        load_profile(path)


@pytest.mark.parametrize(
    ("backend", "missing"),
    [
        ("vertex", "vertex.project, image, machine_type, nfs_server, nfs_path, network"),
        ("containers", "containers.image"),
    ],
)
def test_other_backends_say_what_they_need(write, backend, missing):
    path = write(f"executor: xmanager\nxmanager: {{backend: {backend}}}\n", "p.yaml")

    with pytest.raises(ConfigError, match=f"needs {missing}"):
        load_profile(path)


def test_a_secret_is_a_version_of_secret_manager_by_its_whole_name(write):
    stored = "{variable: HF_TOKEN, secret: hf_abc}"
    path = write(f"xmanager: {{vertex: {{stored_variables: [{stored}]}}}}\n", "p.yaml")

    with pytest.raises(ConfigError, match=r"vertex.stored_variables\[0\].secret"):
        load_profile(path)


def test_the_profile_that_is_shipped_loads():
    profile = load_profile("xmanager")

    assert (profile.executor, profile.xmanager.backend) == ("xmanager", "local")
    assert profile.cluster is profile.xmanager

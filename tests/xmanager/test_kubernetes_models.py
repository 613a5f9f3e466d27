"""The rendered objects are what Kubernetes' own client knows: no key is unknown or misplaced."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from redco_flow.launch.call import JobResources
from redco_flow.launch.xmanager.executor import XManagerExecutor
from redco_flow.spec.xmanager_section import XManagerSection
from redco_flow.tracking.attempt import AttemptDirectory

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize(("kind", "model"), [("Service", "V1Service"), ("Job", "V1Job")])
def test_the_client_reads_an_object_and_writes_the_same_again(xmanager, tmp_path, kind, model):
    from kubernetes import client

    settings = XManagerSection.from_json(
        {
            "backend": "kubernetes",
            "processes_per_host": 2,
            "kubernetes": {
                "image": "registry.example/redco-flow:1",
                "volume_claim": "workspace",
                "service_account": "trainer",
                "stored_variables": [
                    {"variable": "HF_TOKEN", "object": "hugging-face", "entry": "token"}
                ],
            },
        }
    )
    resources = JobResources(2, 2, 8, 16, 64.0, 90)
    executor = XManagerExecutor(tmp_path, settings, variables={"A": "b"})
    text = executor.render(AttemptDirectory(Path("/w/a")), "run train 1", resources)
    (written,) = (one for one in yaml.safe_load_all(text) if one["kind"] == kind)

    api = client.ApiClient()
    read = api.deserialize(SimpleNamespace(data=json.dumps(written)), model)

    assert api.sanitize_for_serialization(read) == written

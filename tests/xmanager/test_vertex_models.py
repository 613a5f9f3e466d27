"""The rendered request is what Vertex AI's own client knows: no key is unknown or misplaced."""

import json
from pathlib import Path

import pytest

from redco_flow.launch.call import JobResources
from redco_flow.launch.xmanager.executor import XManagerExecutor
from redco_flow.spec.xmanager_section import XManagerSection
from redco_flow.tracking.attempt import AttemptDirectory

pytestmark = pytest.mark.cluster


def test_the_client_reads_the_request_and_writes_the_same_again(xmanager, tmp_path):
    from google.cloud.aiplatform_v1.types import CustomJob
    from google.protobuf import json_format

    vertex = {
        "project": "research-1",
        "image": "registry.example/redco-flow:1",
        "machine_type": "a2-highgpu-8g",
        "accelerator_type": "NVIDIA_TESLA_A100",
        "nfs_server": "10.0.0.2",
        "nfs_path": "/share",
        "network": "projects/1/global/networks/default",
        "service_account": "trainer@research-1.iam.gserviceaccount.com",
    }
    settings = XManagerSection.from_json({"backend": "vertex", "vertex": vertex})
    executor = XManagerExecutor(tmp_path, settings, variables={"A": "b"})
    text = executor.render(
        AttemptDirectory(Path("/w/a")), "run train 1", JobResources(2, 1, 8, 16, 64.0, 90)
    )
    written = json.loads(text.partition("\n")[2])

    read = json_format.ParseDict(written, CustomJob.pb()())  # raises for a key it does not know

    again = json_format.MessageToDict(read)
    again["jobSpec"]["scheduling"].setdefault("restartJobOnWorkerRestart", False)
    assert again == written

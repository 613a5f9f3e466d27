"""One rank in a replica of a Vertex AI custom job, in the foreground.

`python -P -m redco_flow.launch.xmanager.vertex_task ATTEMPT …`; which replica this is stands in
CLUSTER_SPEC, which Vertex sets. Fetches the variables that Secret Manager keeps, then goes on as
any rank in a container.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from redco_flow.launch.xmanager import pod
from redco_flow.launch.xmanager.stored_secrets import fetch_stored_variables

_POOL = "workerpool"


def main(arguments: list[str]) -> int:
    """Run the rank to its end."""
    rank = rank_of(json.loads(os.environ["CLUSTER_SPEC"]))
    os.environ["REDCO_FLOW_RANK"] = str(rank)
    os.environ.update(fetch_stored_variables(os.environ))
    return pod.main(arguments)


def rank_of(cluster: Mapping[str, Any]) -> int:
    """Return a replica's rank: pool by pool, in the order of their numbers.

    Args:
        cluster: as Vertex writes CLUSTER_SPEC: `cluster` has the replicas' addresses by pool,
            `task` has the `type` of this one's pool and its `index` there.
    """
    task, pools = cluster["task"], cluster["cluster"]
    number = int(task["type"].removeprefix(_POOL))
    before = sum(len(pools.get(f"{_POOL}{one}", [])) for one in range(number))
    return before + int(task["index"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

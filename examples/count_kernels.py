"""Count kernels over the annotations of many runs and ranks with Dask: python count_kernels.py FOLDER.

FOLDER is what `tlk_tracking.tracking.dataset.collect_runs(run_ids, FOLDER)` made, or a folder of a store's
artifacts. The cluster is two processes of this machine; give `Client` the address of a scheduler to use others.
"""

from __future__ import annotations

import json
import sys

from dask.distributed import Client, LocalCluster

from tlk_tracking.tracking.dataset import open_manifests, open_with_dask


def main(folder: str) -> None:
    """Print how often each kernel ran in a step, and for how many annotations that is a lower bound."""
    manifests = open_manifests(folder)
    bounded = sum(manifests["lower_bound"].to_pylist())
    with (
        LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=None) as cluster,
        Client(cluster),
    ):
        launches = open_with_dask(folder, columns=["launch_name", "kind", "step"])
        kernels = launches[(launches["kind"] == "kernel") & launches["step"].notnull()]
        counted = kernels.groupby("launch_name").size().compute()
    print(
        json.dumps(
            {
                "annotations": len(manifests),
                "annotations with lower bounds": bounded,
                "kernels": dict(sorted(counted.to_dict().items())),
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1])

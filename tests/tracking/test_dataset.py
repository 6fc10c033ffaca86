"""Many annotations as one table: pyarrow's dataset, and Dask on two processes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pyarrow.dataset as ds
import pytest
from paths import EXAMPLES

from tlk_tracking import KernelAnnotation, import_trace, load_annotation, log_annotation
from tlk_tracking.annotation.manifest import decode_manifest, encode_manifest
from tlk_tracking.annotation.schemas import LAUNCHES_FILE
from tlk_tracking.core.errors import AnnotationError
from tlk_tracking.core.places import MANIFEST_FILE
from tlk_tracking.tracking.dataset import (
    collect_runs,
    find_annotations,
    open_dataset,
    open_manifests,
    open_with_dask,
)

EXAMPLE = EXAMPLES / "count_kernels.py"
RUNS = ("a", "b")
# The whole thousand: TLK_ANNOTATIONS=1000.
ANNOTATIONS = int(os.environ.get("TLK_ANNOTATIONS", "48"))


@pytest.fixture(scope="module")
def pair(data_folder: Path) -> list[KernelAnnotation]:
    return [
        import_trace(
            data_folder / f"ddp_rank{rank}.trace.json.gz", ops=data_folder / f"ddp_rank{rank}.ops.json"
        )
        for rank in (0, 1)
    ]


@pytest.fixture(scope="module")
def root(pair: list[KernelAnnotation], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the two ranks in each of two runs, one as in a store's artifacts."""
    folder = tmp_path_factory.mktemp("runs")
    for run, between in zip(RUNS, ("kernel_telemetry", "artifacts/kernel_telemetry"), strict=True):
        for annotation in pair:
            annotation.save(folder / run / between / annotation.folder_name)
    return folder


def test_every_annotation_is_found_with_its_run_window_and_rank(root: Path) -> None:
    assert [tuple(each.partition.values()) for each in find_annotations(root)] == [
        (run, 2, session, rank) for run in RUNS for rank, session in enumerate(("dd000000", "dd000001"))
    ]


def test_the_dataset_has_the_rows_of_every_annotation_and_whose_they_are(
    root: Path, pair: list[KernelAnnotation]
) -> None:
    table = open_dataset(root).to_table()
    assert len(table) == 2 * sum(len(each.launch_table) for each in pair)
    for rank, annotation in enumerate(pair):
        is_one = (ds.field("run") == "b") & (ds.field("rank") == rank)
        one = open_dataset(root).to_table(filter=is_one).to_pylist()
        own = annotation.launch_table.to_pylist()
        for row in one:  # pyarrow rounds the stored thousandths of a µs once more
            row["duration"] = round(row["duration"], 3)
        assert [{name: row[name] for name in own[0]} for row in one] == own
        assert {(row["first_step"], row["session"]) for row in one} == {(2, annotation.manifest.session)}


def test_a_filter_on_the_partition_leaves_whole_files_out(root: Path) -> None:
    dataset = open_dataset(root, "aten_calls")
    assert len(list(dataset.get_fragments())) == 4
    assert len(list(dataset.get_fragments(filter=(ds.field("run") == "a") & (ds.field("rank") == 1)))) == 1


def test_the_manifests_say_how_far_numbers_can_be_trusted(root: Path) -> None:
    rows = open_manifests(root).to_pylist()
    assert len(rows) == 4
    assert rows[0] == {
        "run": "a", "first_step": 2, "session": "dd000000", "rank": 0, "world_size": 2,
        "availability": "recorded", "lower_bound": False, "lower_bound_reasons": [], "complete_steps": [2, 3],
    }  # fmt: skip


def test_what_is_not_there_is_a_typed_error(root: Path, tmp_path: Path) -> None:
    with pytest.raises(AnnotationError, match="holds no window_"):
        open_dataset(tmp_path)
    with pytest.raises(AnnotationError, match="no table 'launches'; there are aten_calls, kernel_launches"):
        open_dataset(root, "launches")


def test_runs_of_a_store_are_collected(
    mlflow_sqlite: str, pair: list[KernelAnnotation], tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    run_id = MlflowClient(mlflow_sqlite).create_run("0").info.run_id
    log_annotation(pair[0], run_id, mlflow_sqlite)
    assert collect_runs([run_id], tmp_path / "collected", mlflow_sqlite) == 1
    (place,) = find_annotations(tmp_path / "collected")
    assert (place.run, place.window.rank) == (run_id, 0)
    assert load_annotation(place.folder).launch_table.equals(pair[0].launch_table)


def many(pair: list[KernelAnnotation], root: Path, count: int) -> None:
    """Make that many valid annotations, 8 ranks a window and 5 windows a run, whose tables are links to two."""
    for number in range(count):
        rank, window, run = number % 8, number // 8 % 5, number // 40
        source = root / f"source_{rank % 2}"
        if not source.exists():
            pair[rank % 2].save(source)
        manifest = decode_manifest((source / MANIFEST_FILE).read_bytes())
        session = f"{number // 8:08x}"
        window_facts = msgspec.structs.replace(manifest.window, first_step=100 * window)
        own = msgspec.structs.replace(
            manifest, rank=rank, world_size=8, session=session, window=window_facts, recording_ranks="all"
        )
        folder = root / f"run_{run:03d}" / f"window_{100 * window:06d}_{session}" / f"rank_{rank}"
        folder.mkdir(parents=True)
        for file in source.iterdir():
            if file.name != MANIFEST_FILE:
                os.link(file, folder / file.name)
        (folder / MANIFEST_FILE).write_bytes(encode_manifest(own))
    for source in root.glob("source_*"):
        shutil.rmtree(source)


def test_a_cluster_of_two_workers_counts_kernels_over_many_annotations(
    pair: list[KernelAnnotation], tmp_path: Path
) -> None:
    many(pair, tmp_path, ANNOTATIONS)
    sample = next(tmp_path.glob("run_000/window_*/rank_1"))
    assert load_annotation(sample).manifest.rank == 1
    assert (sample / LAUNCHES_FILE).stat().st_nlink > 1
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), str(tmp_path)],
        check=False,
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    expected: Counter[str] = Counter()
    for rank, annotation in enumerate(pair):
        times = len([number for number in range(ANNOTATIONS) if number % 2 == rank])
        for row in annotation.launch_table.to_pylist():
            if row["kind"] == "kernel" and row["step"] is not None:
                expected[row["launch_name"]] += times
    assert json.loads(done.stdout) == {
        "annotations": ANNOTATIONS,
        "annotations with lower bounds": 0,
        "kernels": dict(expected),
    }


def test_a_dask_frame_has_a_part_for_each_group_of_annotations(root: Path) -> None:
    frame = open_with_dask(root, columns=["run", "rank", "step"], annotations_per_partition=3)
    assert frame.npartitions == 2
    assert len(frame) == open_dataset(root).count_rows()

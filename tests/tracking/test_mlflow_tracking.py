from __future__ import annotations

import http.server
import json
import re
import socket
import tempfile
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from outboxes import small_annotation
from paths import TOP

from tlk_tracking.analysis import metrics as summary
from tlk_tracking.annotation.kernel_annotation import KernelAnnotation
from tlk_tracking.attribution.annotate import import_trace
from tlk_tracking.core.errors import AnnotationError, TrackingError
from tlk_tracking.core.gaps import Bound
from tlk_tracking.tracking.mlflow_tracking import (
    load_run,
    log_annotation,
    search_runs,
    send_annotation,
)
from tlk_tracking.tracking.run_artifacts import RunArtifacts
from tlk_tracking.tracking.run_record import record_of
from tlk_tracking.tracking.run_telemetry import RunSummary, RunTelemetry

FILES = {
    "annotation.json",
    "aten_calls.parquet",
    "kernel_launches.parquet",
    "launch_relations.parquet",
    "launch_summary.csv",
    "module_summary.csv",
}

SENT = {*FILES, "report.html"}


@pytest.fixture(params=["mlflow_sqlite", "mlflow_server"])
def store(request: pytest.FixtureRequest) -> str:
    """The tracking URI of a real store: embedded with direct artifacts, served with proxied ones."""
    uri: str = request.getfixturevalue(request.param)
    return uri


@pytest.fixture
def run_id(store: str) -> str:
    return _new_run(store)


def _new_run(store: str, experiment: str | None = None) -> str:
    client = MlflowClient(tracking_uri=store)
    experiment_id = experiment or client.create_experiment(uuid.uuid4().hex)
    run_id: str = client.create_run(experiment_id, run_name="seed 0").info.run_id
    return run_id


@pytest.fixture(scope="module")
def exact(data_folder: Path) -> KernelAnnotation:
    return _imported(data_folder, "lightning_fit")


@pytest.fixture(scope="module")
def bounded(data_folder: Path) -> KernelAnnotation:
    return _imported(data_folder, "warmup_leak")


def _imported(data_folder: Path, name: str) -> KernelAnnotation:
    return import_trace(data_folder / f"{name}.trace.json.gz", ops=data_folder / f"{name}.ops.json")


def _tags(store: str, run_id: str) -> dict[str, str]:
    tags = MlflowClient(tracking_uri=store).get_run(run_id).data.tags
    return {key: value for key, value in tags.items() if key.startswith("tlk.")}


def _files(store: str, run_id: str, path: str) -> set[str]:
    return {found.path for found in MlflowClient(tracking_uri=store).list_artifacts(run_id, path)}


def _as_rank(annotation: KernelAnnotation, rank: int) -> KernelAnnotation:
    size = max(rank + 1, annotation.manifest.world_size)
    manifest = msgspec.structs.replace(annotation.manifest, rank=rank, world_size=size)
    return replace(annotation, manifest=manifest)


def _identity(annotation: KernelAnnotation) -> tuple[object, ...]:
    return (annotation.manifest, annotation.call_table, annotation.launch_table, annotation.relation_table)


# --- what is sent


def test_an_annotation_comes_back_from_its_run_as_it_was(
    store: str, run_id: str, exact: KernelAnnotation
) -> None:
    log_annotation(exact, run_id, store)
    run = load_run(run_id, store)
    assert [_identity(annotation) for annotation in run.annotations] == [_identity(exact)]
    assert (run.run_id, run.run_name, run.incomplete) == (run_id, "seed 0", ())


def test_a_folder_is_sent_as_the_annotation_it_holds(
    store: str, run_id: str, exact: KernelAnnotation, tmp_path: Path
) -> None:
    exact.save(tmp_path / "annotation")
    log_annotation(tmp_path / "annotation", run_id, store)
    assert [_identity(annotation) for annotation in load_run(run_id, store).annotations] == [_identity(exact)]


def test_metrics_are_those_of_the_summary_at_the_global_step(
    store: str, run_id: str, bounded: KernelAnnotation
) -> None:
    log_annotation(bounded, run_id, store)
    client = MlflowClient(tracking_uri=store)
    stored = client.get_run(run_id).data.metrics
    assert stored == {f"kernel_telemetry/{row.name}": row.value for row in summary.metrics(bounded)}
    steps = {point.step for key in stored for point in client.get_metric_history(run_id, key)}
    assert steps == {bounded.manifest.global_step}


@pytest.mark.parametrize("name", ["lightning_fit", "warmup_leak", "cuda_graph_replay", "paused_interior"])
def test_every_metric_and_every_artifact_has_its_lower_bound_tag(
    mlflow_sqlite: str, data_folder: Path, name: str
) -> None:
    annotation = _imported(data_folder, name)
    run_id = _new_run(mlflow_sqlite)
    log_annotation(annotation, run_id, mlflow_sqlite)
    says = {False: "false", True: "true"}
    manifest = annotation.manifest
    expected = {
        "tlk.lower_bound": says[manifest.lower_bound],
        "tlk.lower_bound_reasons": ",".join(sorted(manifest.lower_bound_reasons)),
        "tlk.availability": manifest.availability.value,
        "tlk.schema_version": "1",
    }
    for row in summary.metrics(annotation):
        expected[f"tlk.lower_bound/kernel_telemetry/{row.name}"] = says[row.bound is not Bound.EXACT]
    for file in SENT:
        expected[f"tlk.lower_bound/artifact/{file}"] = says[manifest.lower_bound]
    assert _tags(mlflow_sqlite, run_id) == expected


def test_artifacts_lie_under_window_and_rank(store: str, run_id: str, exact: KernelAnnotation) -> None:
    log_annotation(exact, run_id, store)
    manifest = exact.manifest
    place = f"kernel_telemetry/window_{manifest.window.first_step:06d}_{manifest.session}/rank_0"
    assert _files(store, run_id, place) == {f"{place}/{name}" for name in SENT}


def test_a_report_beside_the_annotation_is_sent_and_tagged_too(
    mlflow_sqlite: str, exact: KernelAnnotation, tmp_path: Path
) -> None:
    run_id = _new_run(mlflow_sqlite)
    exact.save(tmp_path / "a")
    (tmp_path / "a" / "report.html").write_text("<html></html>")
    log_annotation(tmp_path / "a", run_id, mlflow_sqlite)
    place = f"kernel_telemetry/{exact.folder_name}"
    assert _files(mlflow_sqlite, run_id, place) == {f"{place}/{name}" for name in (*FILES, "report.html")}
    assert _tags(mlflow_sqlite, run_id)["tlk.lower_bound/artifact/report.html"] == "false"


def test_an_annotation_whose_report_cannot_be_drawn_is_sent_without(
    mlflow_sqlite: str, exact: KernelAnnotation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(annotation: KernelAnnotation) -> str:
        raise ValueError("no font")

    monkeypatch.setattr("tlk_tracking.report.annotation_report.render_report", fail)
    run_id = _new_run(mlflow_sqlite)
    log_annotation(exact, run_id, mlflow_sqlite)
    place = f"kernel_telemetry/{exact.folder_name}"
    assert _files(mlflow_sqlite, run_id, place) == {f"{place}/{name}" for name in FILES}


def test_without_device_telemetry_no_device_metric_is_logged(store: str, run_id: str) -> None:
    log_annotation(small_annotation(), run_id, store)
    run = load_run(run_id, store)
    assert run.metrics == {"kernel_telemetry/aten_calls": 0.0, "kernel_telemetry/steps_recorded": 1.0}
    assert run.tags["tlk.availability"] == "unavailable"
    assert run.tags["tlk.lower_bound_reasons"] == "no_device_evidence"


def test_a_run_that_has_ended_stays_as_it_ended(store: str, run_id: str, exact: KernelAnnotation) -> None:
    client = MlflowClient(tracking_uri=store)
    client.set_terminated(run_id, status="FAILED")
    ended = client.get_run(run_id).info
    log_annotation(exact, run_id, store)
    assert client.get_run(run_id).info == ended


def test_the_same_sent_again_leaves_one_value_for_each_metric(
    store: str, run_id: str, exact: KernelAnnotation, tmp_path: Path
) -> None:
    exact.save(tmp_path / "a")
    for _ in range(2):
        send_annotation(exact, tmp_path / "a", run_id, tracking_uri=store, timestamp_ms=1_700_000_000_000)
    client = MlflowClient(tracking_uri=store)
    histories = [client.get_metric_history(run_id, key) for key in client.get_run(run_id).data.metrics]
    assert {len(history) for history in histories} == {1}
    assert len(load_run(run_id, store).annotations) == 1


def test_metrics_and_tags_go_in_one_batch_and_before_any_artifact(
    mlflow_sqlite: str, exact: KernelAnnotation, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = _new_run(mlflow_sqlite)
    asked: list[str] = []
    for name in ("log_batch", "log_artifact", "log_metric", "set_tag", "log_artifacts", "set_terminated"):
        real = getattr(MlflowClient, name)

        def noted(*args: object, name: str = name, real: object = real, **kwargs: object) -> object:
            asked.append(name)
            return real(*args, **kwargs)  # type: ignore[operator]  # a method of the client

        monkeypatch.setattr(MlflowClient, name, noted)
    log_annotation(exact, run_id, mlflow_sqlite)
    assert asked == ["log_batch", *["log_artifact"] * len(SENT)]


def test_the_manifest_is_sent_last_since_it_vouches_for_the_rest(
    mlflow_sqlite: str, exact: KernelAnnotation, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = _new_run(mlflow_sqlite)
    sent: list[str] = []
    monkeypatch.setattr(
        MlflowClient, "log_artifact", lambda self, run, path, place: sent.append(Path(path).name)
    )
    log_annotation(exact, run_id, mlflow_sqlite)
    assert (sent[0], sent[-1]) == ("launch_summary.csv", "annotation.json")


# --- tags over several windows and ranks


def test_a_tag_once_true_does_not_go_back_to_false(
    store: str, run_id: str, bounded: KernelAnnotation, exact: KernelAnnotation
) -> None:
    log_annotation(bounded, run_id, store)
    once_true = {key for key, value in _tags(store, run_id).items() if value == "true"}
    log_annotation(exact, run_id, store)
    after = _tags(store, run_id)
    assert once_true
    assert {after[key] for key in once_true} == {"true"}


def test_a_later_lower_bound_turns_the_tag_true(
    store: str, run_id: str, bounded: KernelAnnotation, exact: KernelAnnotation
) -> None:
    log_annotation(exact, run_id, store)
    assert _tags(store, run_id)["tlk.lower_bound"] == "false"
    log_annotation(bounded, run_id, store)
    assert _tags(store, run_id)["tlk.lower_bound"] == "true"


def test_reasons_are_the_union_over_windows_and_the_worst_availability_stands(
    mlflow_sqlite: str, bounded: KernelAnnotation, exact: KernelAnnotation
) -> None:
    run_id = _new_run(mlflow_sqlite)
    for annotation in (bounded, small_annotation(), exact):
        log_annotation(annotation, run_id, mlflow_sqlite)
    tags = _tags(mlflow_sqlite, run_id)
    reasons = {*bounded.manifest.lower_bound_reasons, "no_device_evidence"}
    assert tags["tlk.lower_bound_reasons"] == ",".join(sorted(reasons))
    assert tags["tlk.availability"] == "unavailable"


def test_another_rank_writes_its_files_and_one_tag_only(
    store: str, run_id: str, exact: KernelAnnotation
) -> None:
    log_annotation(_as_rank(exact, 3), run_id, store)
    run = load_run(run_id, store)
    assert (run.metrics, run.tags) == ({}, {"tlk.lower_bound/rank_3": "false"})
    assert [list(window.ranks) for window in run.windows] == [[3]]


def test_the_ranks_of_a_window_are_joined_and_never_mixed(store: str, run_id: str, data_folder: Path) -> None:
    ranks = [_imported(data_folder, "ddp_rank0"), _imported(data_folder, "ddp_rank1")]
    session = ranks[0].manifest.session
    ranks = [
        replace(annotation, manifest=msgspec.structs.replace(annotation.manifest, session=session, rank=rank))
        for rank, annotation in enumerate(ranks)
    ]
    for annotation in reversed(ranks):
        log_annotation(annotation, run_id, store)
    (window,) = load_run(run_id, store).windows
    assert {rank: _identity(found) for rank, found in window.ranks.items()} == {
        rank: _identity(annotation) for rank, annotation in enumerate(ranks)
    }


def test_windows_come_back_by_first_step(store: str, run_id: str) -> None:
    for step in (2000, 10, 1000):
        log_annotation(small_annotation(step), run_id, store)
    assert [window.first_step for window in load_run(run_id, store).windows] == [10, 1000, 2000]


def test_more_metrics_or_tags_than_a_batch_holds_are_refused(
    exact: KernelAnnotation, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = summary.metrics(exact)[0]
    many = tuple(replace(row, name=f"m{i}") for i in range(41))
    monkeypatch.setattr("tlk_tracking.tracking.run_record.metrics", lambda annotation: many)
    with pytest.raises(TrackingError, match="41 metrics and 45 tags are more than one batch may hold"):
        record_of(exact, files=(), run_tags={})


# --- what cannot be sent


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_link_is_never_sent(mlflow_sqlite: str, exact: KernelAnnotation, tmp_path: Path, name: str) -> None:
    run_id = _new_run(mlflow_sqlite)
    exact.save(tmp_path / "a")
    (tmp_path / "a" / name).rename(tmp_path / "elsewhere")
    (tmp_path / "a" / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises((AnnotationError, TrackingError), match=f"{name}.* (plain|regular) file"):
        log_annotation(tmp_path / "a", run_id, mlflow_sqlite)
    assert _tags(mlflow_sqlite, run_id) == {}


def test_a_linked_report_is_never_sent(mlflow_sqlite: str, exact: KernelAnnotation, tmp_path: Path) -> None:
    run_id = _new_run(mlflow_sqlite)
    exact.save(tmp_path / "a")
    (tmp_path / "a" / "report.html").symlink_to("/etc/hostname")
    with pytest.raises(TrackingError, match="links are neither sent nor read"):
        log_annotation(tmp_path / "a", run_id, mlflow_sqlite)
    assert _tags(mlflow_sqlite, run_id) == {}


def test_a_run_that_does_not_exist_is_an_error_that_names_run_and_store(store: str) -> None:
    with pytest.raises(
        TrackingError, match=rf"^run deadbeef… at {re.escape(store)} cannot be used: .*not found"
    ):
        log_annotation(small_annotation(), "deadbeef" * 4, store)


def test_a_deleted_run_is_not_written(store: str, run_id: str) -> None:
    MlflowClient(tracking_uri=store).delete_run(run_id)
    with pytest.raises(TrackingError, match="cannot be used"):
        log_annotation(small_annotation(), run_id, store)


def test_a_store_that_is_not_there_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(TrackingError, match=r"there is no MLflow store .*give the run's own tracking URI"):
        log_annotation(small_annotation(), "a" * 32, f"sqlite:///{tmp_path}/none.db")
    assert list(tmp_path.iterdir()) == []


def test_no_message_carries_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound and not listening: refused
        uri = f"http://user:secret@127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(TrackingError) as refused:
            load_run("a" * 32, uri)
    assert "secret" not in str(refused.value)
    assert "127.0.0.1" in str(refused.value)


# --- what is read


def test_a_run_without_annotation_is_an_error_that_says_what_to_look_for(store: str, run_id: str) -> None:
    with pytest.raises(
        TrackingError,
        match=rf"^run {run_id[:8]}… has no kernel annotation; was KernelTelemetry among its callbacks, or did "
        r"the fit end before its first window\?$",
    ):
        load_run(run_id, store)


def test_an_annotation_whose_upload_has_not_ended_is_named_and_not_read(
    mlflow_sqlite: str, exact: KernelAnnotation, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_id = _new_run(mlflow_sqlite)
    real = MlflowClient.log_artifact

    def cut(self: MlflowClient, run: str, path: str, place: str) -> None:
        if path.endswith("annotation.json"):
            raise MlflowException("cut")
        real(self, run, path, place)

    monkeypatch.setattr(MlflowClient, "log_artifact", cut)
    with pytest.raises(TrackingError, match="cut"):
        log_annotation(exact, run_id, mlflow_sqlite)
    with pytest.raises(TrackingError, match=r"has 1 kernel annotation whose upload has not ended"):
        load_run(run_id, mlflow_sqlite)
    monkeypatch.undo()
    log_annotation(small_annotation(), run_id, mlflow_sqlite)
    assert load_run(run_id, mlflow_sqlite).incomplete == (f"kernel_telemetry/{exact.folder_name}",)


def test_other_artifacts_of_the_run_are_left_alone(store: str, run_id: str, exact: KernelAnnotation) -> None:
    client = MlflowClient(tracking_uri=store)
    for place in ("kernel_telemetry", "kernel_telemetry/notes", "kernel_telemetry/window_1/rank_0", "model"):
        client.log_text(run_id, "mine", f"{place}/annotation.json")
    log_annotation(exact, run_id, store)
    assert [_identity(found) for found in load_run(run_id, store).annotations] == [_identity(exact)]


def test_a_damaged_annotation_in_a_run_is_a_typed_error(
    store: str, run_id: str, exact: KernelAnnotation
) -> None:
    log_annotation(exact, run_id, store)
    place = f"kernel_telemetry/{exact.folder_name}"
    MlflowClient(tracking_uri=store).log_text(run_id, "sequence", f"{place}/aten_calls.parquet")
    with pytest.raises(AnnotationError, match=r"aten_calls\.parquet"):
        load_run(run_id, store)


def test_an_annotation_in_the_place_of_another_is_refused(
    mlflow_sqlite: str, exact: KernelAnnotation, tmp_path: Path
) -> None:
    run_id = _new_run(mlflow_sqlite)
    exact.save(tmp_path / "a")
    client = MlflowClient(tracking_uri=mlflow_sqlite)
    client.log_artifacts(run_id, str(tmp_path / "a"), "kernel_telemetry/window_000007_00000000/rank_0")
    with pytest.raises(AnnotationError, match="lies in window_000007_00000000/rank_0 and says"):
        load_run(run_id, mlflow_sqlite)


@pytest.mark.parametrize("linked", ["file", "rank", "window", "root"])
def test_links_in_a_local_artifact_store_are_not_followed(
    mlflow_sqlite: str, exact: KernelAnnotation, tmp_path: Path, linked: str
) -> None:
    run_id = _new_run(mlflow_sqlite)
    log_annotation(exact, run_id, mlflow_sqlite)
    root = Path(MlflowClient(tracking_uri=mlflow_sqlite).get_run(run_id).info.artifact_uri)
    rank = root / "kernel_telemetry" / exact.folder_name
    path = {
        "file": rank / "aten_calls.parquet",
        "rank": rank,
        "window": rank.parent,
        "root": root / "kernel_telemetry",
    }[linked]
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TrackingError, match="is a link"):
        load_run(run_id, mlflow_sqlite)


def test_reading_leaves_no_temporary_file(
    store: str, run_id: str, exact: KernelAnnotation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    log_annotation(exact, run_id, store)
    load_run(run_id, store)
    assert list((tmp_path / "tmp").iterdir()) == []


# --- a hostile repository


@dataclass(frozen=True)
class _Listed:
    path: str
    is_dir: bool
    file_size: int | None = 10


class _Hostile:
    """Lists what it is told to, for any folder, and writes what it likes."""

    def __init__(self, listing: dict[str, list[_Listed]], body: bytes = b"{}") -> None:
        self.listing = listing
        self.body = body
        self.asked: list[str] = []

    def list_artifacts(self, path: str | None = None) -> Sequence[_Listed]:
        return self.listing.get(path or "", [])

    def _download_file(self, remote_file_path: str, local_path: str) -> None:
        self.asked.append(remote_file_path)
        Path(local_path).write_bytes(self.body)


PLACE = "window_000010_ab12cd34/rank_0"


def _hostile(names: list[str], **sizes: int) -> _Hostile:
    root = "kernel_telemetry"
    return _Hostile(
        {
            root: [_Listed(f"{root}/window_000010_ab12cd34", True)],
            f"{root}/window_000010_ab12cd34": [_Listed(f"{root}/{PLACE}", True)],
            f"{root}/{PLACE}": [_Listed(f"{root}/{PLACE}/{name}", False, **sizes) for name in names],
        }
    )


@pytest.mark.parametrize(
    "name",
    ["../../../escape", "..", ".", "", "/etc/passwd", "a/b", "a\\b", "..\\x", "a\nb", "a\x1b[2Jb", "a\x00b"],
)
def test_a_name_that_is_no_plain_name_is_refused(name: str) -> None:
    repository = _hostile(["annotation.json", name])
    with pytest.raises(TrackingError, match="its artifacts are not read"):
        RunArtifacts(repository, local_root=None).fetch(PLACE)
    assert repository.asked == []


@pytest.mark.parametrize(
    "name", ["../window_000010_ab12cd34", "/window_000010_ab12cd34", "window_000010_ab12cd34/.."]
)
def test_a_folder_name_that_is_no_plain_name_is_refused(name: str) -> None:
    repository = _Hostile({"kernel_telemetry": [_Listed(f"kernel_telemetry/{name}", True)]})
    with pytest.raises(TrackingError, match="its artifacts are not read"):
        list(RunArtifacts(repository, local_root=None).places())


def test_a_listing_that_names_paths_outside_its_folder_is_refused() -> None:
    repository = _Hostile({"kernel_telemetry": [_Listed("/etc/passwd", False), _Listed("elsewhere/x", True)]})
    with pytest.raises(TrackingError, match="its artifacts are not read"):
        list(RunArtifacts(repository, local_root=None).places())


def test_only_files_of_an_annotation_are_asked_for() -> None:
    repository = _hostile(["annotation.json", "passwords.txt", "report.html", "more.parquet"])
    with pytest.raises(AnnotationError):
        RunArtifacts(repository, local_root=None).fetch(PLACE)
    assert repository.asked == [f"kernel_telemetry/{PLACE}/annotation.json"]


def test_a_file_listed_as_too_large_is_not_downloaded() -> None:
    repository = _hostile(["annotation.json"], file_size=1 << 40)
    with pytest.raises(
        AnnotationError, match=r"annotation\.json: has 1099511627776 bytes, more than the limit"
    ):
        RunArtifacts(repository, local_root=None).fetch(PLACE)
    assert repository.asked == []


def test_a_file_larger_than_listed_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlk_tracking.tracking.run_artifacts.MAX_MANIFEST_BYTES", 10)
    repository = _hostile(["annotation.json"], file_size=2)
    repository.body = b"{" * 11
    with pytest.raises(AnnotationError, match=r"annotation\.json: has 11 bytes, more than the limit of 10"):
        RunArtifacts(repository, local_root=None).fetch(PLACE)


@pytest.mark.parametrize("body", [b"[" * 1_000_000, b"\xff\xfe\x00", b'{"schema": NaN}', b"", b"null"])
def test_a_manifest_that_is_no_manifest_is_a_typed_error(body: bytes) -> None:
    repository = _hostile(["annotation.json"])
    repository.body = body
    with pytest.raises(AnnotationError, match=r"^annotation\.json"):
        RunArtifacts(repository, local_root=None).fetch(PLACE)


def test_a_repository_that_writes_a_link_is_refused() -> None:
    class Linking(_Hostile):
        def _download_file(self, remote_file_path: str, local_path: str) -> None:
            Path(local_path).symlink_to("/etc/hostname")

    with pytest.raises(TrackingError, match="links are neither sent nor read"):
        RunArtifacts(Linking(_hostile(["annotation.json"]).listing), local_root=None).fetch(PLACE)


class _HostileServer(http.server.BaseHTTPRequestHandler):
    """An MLflow server whose run lists artifacts outside of every folder."""

    def do_GET(self) -> None:
        run = {
            "info": {"run_id": "a" * 32, "experiment_id": "0", "artifact_uri": "mlflow-artifacts:/x"},
            "data": {},
        }
        body: dict[str, object] = {"run": run}
        if "mlflow-artifacts" in self.path:
            escape = {"path": "../../../../escape", "is_dir": "/rank_" not in self.path, "file_size": 2}
            body = {"files": [escape, {**escape, "path": "/tmp/escape"}]}
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args: object) -> None:
        """Say nothing."""


@pytest.fixture
def hostile_server() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _HostileServer) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_a_hostile_server_makes_nothing_outside_and_gets_a_typed_error(
    hostile_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    with pytest.raises(TrackingError):
        load_run("a" * 32, hostile_server)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["tmp"]


# --- searching


def test_a_search_gives_metrics_and_tags_of_runs_with_telemetry_newest_first(
    store: str, exact: KernelAnnotation, bounded: KernelAnnotation
) -> None:
    client = MlflowClient(tracking_uri=store)
    name = uuid.uuid4().hex
    experiment = client.create_experiment(name)
    first, _without, second = (_new_run(store, experiment) for _ in range(3))
    log_annotation(exact, first, store)
    log_annotation(bounded, second, store)
    found = search_runs(name, store)
    assert found == search_runs(experiment, store)
    assert [_summarized(run) for run in found] == [
        _summarized(_summary_of(load_run(run_id, store))) for run_id in (second, first)
    ]


def _summary_of(run: RunTelemetry) -> RunSummary:
    return RunSummary(
        run_id=run.run_id,
        run_name=run.run_name,
        status="RUNNING",
        start_time_ms=None,
        metrics=run.metrics,
        tags=run.tags,
    )


def _summarized(run: RunSummary) -> RunSummary:
    return replace(run, start_time_ms=None)


def test_a_search_reads_every_page(mlflow_sqlite: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tlk_tracking.tracking.mlflow_tracking._SEARCH_PAGE", 2)
    client = MlflowClient(tracking_uri=mlflow_sqlite)
    experiment = client.create_experiment("many")
    runs = {_new_run(mlflow_sqlite, experiment) for _ in range(5)}
    for run_id in runs:
        client.set_tag(run_id, "tlk.schema_version", "1")
    assert {run.run_id for run in search_runs("many", mlflow_sqlite)} == runs


def test_an_experiment_that_does_not_exist_is_an_error(store: str) -> None:
    with pytest.raises(TrackingError, match=r"^there is no experiment .987654. at "):
        search_runs("987654", store)


@pytest.mark.parametrize(
    ("query", "matches"),
    [
        ("tags.`tlk.lower_bound` = 'true'", "bounded"),
        ("tags.`tlk.lower_bound` = 'false' AND tags.`tlk.availability` = 'recorded'", "exact"),
        ("tags.`tlk.lower_bound/kernel_telemetry/launches` = 'true'", "bounded"),
        ("tags.`tlk.lower_bound_reasons` LIKE '%record_without_launch%'", "bounded"),
        (
            "tags.`tlk.lower_bound/kernel_telemetry/launches` = 'false' AND metrics.`kernel_telemetry/launches` > 1",
            "exact",
        ),
    ],
)
def test_the_documented_searches_find_what_they_say(
    store: str, exact: KernelAnnotation, bounded: KernelAnnotation, query: str, matches: str
) -> None:
    documented = (TOP / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert query in documented
    client = MlflowClient(tracking_uri=store)
    experiment = client.create_experiment(uuid.uuid4().hex)
    runs = {"exact": _new_run(store, experiment), "bounded": _new_run(store, experiment)}
    log_annotation(exact, runs["exact"], store)
    log_annotation(bounded, runs["bounded"], store)
    assert [run.info.run_id for run in client.search_runs([experiment], query)] == [runs[matches]]


def test_every_metric_is_documented_with_the_gaps_that_bound_it() -> None:
    documented = (TOP / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in documented.splitlines()
        if "|" in line
    ]
    gaps = {row[0]: set(re.findall("`(.+?)`", row[1])) for row in rows if len(row) == 2}
    bounded_by = {
        row[0].strip("`"): set().union(*(gaps[group] for group in row[3].split(", ")))
        for row in rows
        if len(row) == 4 and row[0].startswith("`")
    }
    assert bounded_by == {name: {str(gap) for gap in lossy} for name, lossy in summary.METRIC_GAPS.items()}

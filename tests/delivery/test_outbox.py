from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from outboxes import environment_with_tests, seal, small_annotation, visible_files, window_facts

from tlk_tracking.annotation.kernel_annotation import load_annotation
from tlk_tracking.core.errors import TrackingError
from tlk_tracking.delivery.outbox import TRACE_FILE, Outbox
from tlk_tracking.tracking.tracking_uri import Destination, absolute_tracking_uri, without_credentials

DESTINATION = Destination(
    run_id="4f2a" * 8, tracking_uri="http://user:secret@tracking.test:5000/path?token=secret"
)
NAME = f"{'4f2a' * 8}.window_000010_ab12cd34.rank_0"


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    return Outbox(tmp_path / "outbox")


def _save(folder: Path) -> None:
    small_annotation().save(folder)


def test_a_sealed_window_is_read_back_as_it_was(outbox: Outbox) -> None:
    folder = outbox.open_window()
    (folder / TRACE_FILE).write_text("{}")
    sealed = outbox.seal_window(folder, window_facts(10), DESTINATION)
    (found,) = outbox.raw_windows()
    assert (found, found.name, found.facts()) == (sealed, NAME, window_facts(10))
    assert (found.trace, found.calls) == (found.folder / TRACE_FILE, None)


def test_a_window_is_not_seen_before_it_is_sealed(outbox: Outbox) -> None:
    folder = outbox.open_window()
    (folder / TRACE_FILE).write_text("{}")
    assert outbox.raw_windows() == ()


def test_a_discarded_window_leaves_nothing(outbox: Outbox) -> None:
    outbox.discard_window(outbox.open_window())
    assert visible_files(outbox.root) == []


def test_nobody_else_may_look_into_the_outbox(outbox: Outbox) -> None:
    seal(outbox, window_facts(10), DESTINATION)
    folders = [outbox.root, *(path for path in outbox.root.rglob("*") if path.is_dir())]
    assert {oct(folder.stat().st_mode & 0o777) for folder in folders} == {"0o700"}


def test_the_disk_keeps_the_run_and_no_credentials(outbox: Outbox) -> None:
    window = seal(outbox, window_facts(10), DESTINATION)
    entry = outbox.add_annotation(window, _save)
    address = entry.address()
    assert (address.run_id, address.tracking_uri, address.credentials_removed, address.global_step) == (
        "4f2a" * 8,
        "http://tracking.test:5000/path",
        True,
        10,
    )
    kept = b"".join(path.read_bytes() for path in outbox.root.rglob("*") if path.is_file())
    assert b"secret" not in kept


def test_the_repr_of_a_destination_has_no_tracking_uri() -> None:
    assert repr(DESTINATION) == f"Destination(run_id='{'4f2a' * 8}')"


@pytest.mark.parametrize(
    ("uri", "kept"),
    [
        ("https://tracking.test", "https://tracking.test"),
        ("https://user:p%40ss@tracking.test:5000/mlflow", "https://tracking.test:5000/mlflow"),
        (
            "postgresql+psycopg2://user:secret@db.test/mlflow?password=secret",
            "postgresql+psycopg2://db.test/mlflow",
        ),
        ("sqlite:////data/mlflow.db?timeout=5", "sqlite:////data/mlflow.db?timeout=5"),
        ("databricks://profile", "databricks://profile"),
        ("databricks", "databricks"),
    ],
)
def test_a_uri_without_credentials_keeps_scheme_host_and_path(uri: str, kept: str) -> None:
    assert without_credentials(uri) == kept


def test_a_relative_local_store_is_the_same_from_every_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    uris = [
        "sqlite:///mlflow.db",
        "sqlite:////abs.db",
        "sqlite:///:memory:",
        "sqlite://",
        "databricks",
        "http://a/b",
    ]
    assert [absolute_tracking_uri(uri) for uri in uris] == [f"sqlite:///{tmp_path}/mlflow.db", *uris[1:]]


def test_an_annotation_takes_the_place_of_its_raw_window(outbox: Outbox) -> None:
    window = seal(outbox, window_facts(10), DESTINATION)
    entry = outbox.add_annotation(window, _save)
    assert (outbox.raw_windows(), outbox.entries(), entry.name) == ((), (entry,), NAME)
    assert load_annotation(entry.annotation_folder).manifest == small_annotation().manifest


def test_an_annotation_that_cannot_be_made_leaves_its_raw_window_and_nothing_else(outbox: Outbox) -> None:
    window = seal(outbox, window_facts(10), DESTINATION)
    before = visible_files(outbox.root)

    def fail(folder: Path) -> None:
        folder.mkdir()
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        outbox.add_annotation(window, fail)
    assert visible_files(outbox.root) == before


def test_an_annotation_that_stands_already_is_not_made_again(outbox: Outbox) -> None:
    window = seal(outbox, window_facts(10), DESTINATION)
    entry = outbox.add_annotation(window, _save)
    again = seal(outbox, window_facts(10), DESTINATION)

    def fail(folder: Path) -> None:
        raise AssertionError("made again")

    assert outbox.add_annotation(again, fail) == entry
    assert outbox.raw_windows() == ()


def test_a_removed_entry_takes_the_raw_window_it_came_from_along(outbox: Outbox) -> None:
    entry = outbox.add_annotation(seal(outbox, window_facts(10), DESTINATION), _save)
    seal(outbox, window_facts(10), DESTINATION)
    outbox.remove(entry)
    assert visible_files(outbox.root) == []


def test_a_window_is_kept_once(outbox: Outbox) -> None:
    seal(outbox, window_facts(10), DESTINATION)
    before = visible_files(outbox.root)
    with pytest.raises(TrackingError, match="a window is kept once"):
        seal(outbox, window_facts(10), DESTINATION)
    assert visible_files(outbox.root) == before


def test_windows_of_two_runs_and_two_ranks_are_kept_apart(outbox: Outbox) -> None:
    other = Destination(run_id="b" * 32, tracking_uri="http://tracking.test")
    for rank in (0, 1):
        seal(outbox, window_facts(10, rank=rank), DESTINATION)
        seal(outbox, window_facts(10, rank=rank), other)
    assert len(outbox.raw_windows()) == 4


def test_a_run_id_never_becomes_a_path(outbox: Outbox) -> None:
    window = seal(
        outbox, window_facts(10), Destination(run_id="../../x/y", tracking_uri="http://tracking.test")
    )
    assert window.folder.parent == outbox.root / "raw"
    assert window.name == "______x_y.window_000010_ab12cd34.rank_0"


def test_a_full_outbox_refuses_a_window_and_keeps_what_it_holds(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path, max_bytes=5000)
    folder = outbox.open_window()
    (folder / TRACE_FILE).write_bytes(bytes(3000))
    outbox.seal_window(folder, window_facts(10), DESTINATION)
    before = visible_files(tmp_path)
    folder = outbox.open_window()
    (folder / TRACE_FILE).write_bytes(bytes(3000))
    with pytest.raises(TrackingError, match=r"holds 0 MB and may hold 0 MB.*tlk upload --outbox"):
        outbox.seal_window(folder, window_facts(20), DESTINATION)
    assert visible_files(tmp_path) == before


def test_a_window_larger_than_the_outbox_is_refused_before_it_is_sealed(tmp_path: Path) -> None:
    outbox = Outbox(tmp_path, max_bytes=1000)
    folder = outbox.open_window()
    (folder / TRACE_FILE).write_bytes(bytes(2000))
    with pytest.raises(TrackingError, match="this window is not kept"):
        outbox.open_window()
    with pytest.raises(TrackingError, match="this window is not kept"):
        outbox.seal_window(folder, window_facts(10), DESTINATION)
    assert visible_files(tmp_path) == []


def test_what_one_works_on_another_cannot_claim(outbox: Outbox) -> None:
    window = seal(outbox, window_facts(10), DESTINATION)
    with outbox.claim(window) as first, Outbox(outbox.root).claim(window) as second:
        assert (first, second) == (True, False)
    with outbox.claim(window) as third:
        assert third is True


def test_what_is_gone_cannot_be_claimed(outbox: Outbox) -> None:
    entry = outbox.add_annotation(seal(outbox, window_facts(10), DESTINATION), _save)
    outbox.remove(entry)
    with outbox.claim(entry) as claimed:
        assert claimed is False


def test_a_sweep_leaves_a_window_that_is_being_made(outbox: Outbox) -> None:
    folder = outbox.open_window()
    Outbox(outbox.root).sweep()
    assert folder.is_dir()
    outbox.discard_window(folder)


def test_a_folder_that_is_a_link_is_no_outbox(outbox: Outbox, tmp_path: Path) -> None:
    outbox.root.mkdir()
    (tmp_path / "elsewhere").mkdir()
    (outbox.root / "raw").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TrackingError, match="is not a folder of this user's own"):
        outbox.open_window()


def test_an_outbox_that_was_never_used_is_empty(outbox: Outbox) -> None:
    outbox.sweep()
    assert (outbox.raw_windows(), outbox.entries(), outbox.size_bytes(), outbox.is_there()) == (
        (),
        (),
        0,
        False,
    )


@pytest.mark.parametrize("damage", [b"", b"{", b"[]", b'{"run_id": 7}', b"\xff\xfe"])
def test_a_damaged_destination_is_an_error_that_names_the_folder_to_remove(
    outbox: Outbox, damage: bytes
) -> None:
    entry = outbox.add_annotation(seal(outbox, window_facts(10), DESTINATION), _save)
    (entry.folder / "destination.json").write_bytes(damage)
    with pytest.raises(TrackingError, match=f"remove {entry.folder}"):
        entry.address()


# Kills a child of its own at each of its file operations in turn; says how often it did, and what was half.
_KILLED_EVERYWHERE = """
import json, os, shutil, signal, sys
from pathlib import Path
from outboxes import seal, small_annotation, visible_files, window_facts
from tlk_tracking.annotation.kernel_annotation import load_annotation
from tlk_tracking.tracking.tracking_uri import Destination
from tlk_tracking.delivery.outbox import TRACE_FILE, Outbox

TO = Destination(run_id="r", tracking_uri="http://tracking.test")
WRITES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}

def work(root):
    outbox = Outbox(root)
    folder = outbox.open_window()
    (folder / TRACE_FILE).write_text("{}")
    window = outbox.seal_window(folder, window_facts(10), TO)
    with outbox.claim(window):
        entry = outbox.add_annotation(window, annotation.save)
    with outbox.claim(entry):
        outbox.remove(entry)

def die_at(count):
    left = [count]
    def hook(event, args):
        if event in WRITES:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)

annotation = small_annotation()
work(Path(sys.argv[1]))  # everything lazily imported is there
kills, half = 0, []
while True:
    root = Path(sys.argv[1]) / str(kills)
    child = os.fork()
    if child == 0:
        die_at(kills + 1)
        work(root)
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        break
    kills += 1
    outbox = Outbox(root)
    outbox.sweep()
    try:
        for window in outbox.raw_windows():
            assert (window.facts(), window.trace.read_text()) == (window_facts(10), "{}")
            with outbox.claim(window) as mine:
                assert mine
                outbox.add_annotation(window, annotation.save)
        for entry in outbox.entries():
            assert load_annotation(entry.annotation_folder).manifest == annotation.manifest
            assert entry.address().run_id == "r"
            with outbox.claim(entry) as mine:
                assert mine
                outbox.remove(entry)
        # All that may stay is a folder whose maker was killed before it could lock it.
        assert [path for path in visible_files(root) if path != "tags.lock"] == [], visible_files(root)
    except Exception as error:  # whatever is wrong with a killed outbox is what the test tells
        half.append(f"{kills}: {error!r}")
    shutil.rmtree(root, ignore_errors=True)
print(json.dumps([kills, half]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_killed_at_any_file_operation_every_window_is_whole_or_absent(tmp_path: Path) -> None:
    printed = subprocess.run(
        [sys.executable, "-c", _KILLED_EVERYWHERE, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
        env=environment_with_tests(),
    ).stdout
    kills, half = json.loads(printed)
    assert half == []
    assert kills > 40

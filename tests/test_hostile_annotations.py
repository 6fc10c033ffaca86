"""Whatever an annotation's files hold, they are refused with a typed error or load as valid."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from damage import FILES, MANIFEST, rewrite_file, rewrite_manifest, rewrite_table, with_value
from mutations import (
    HANG_S,
    HOSTILE_TEXTS,
    HOSTILE_VALUES,
    MUTATIONS,
    dump_json,
    processor_time,
    scramble_bytes,
    scramble_json,
    untouched,
)
from real_traces import real_trace
from soak_figures import TIMEOUT_S, tell
from synthetic_trace import SyntheticTrace, one_step

from tlk_tracking.analysis.metrics import facts, launch_summary, metrics
from tlk_tracking.annotation.kernel_annotation import load_annotation
from tlk_tracking.attribution.annotate import import_trace
from tlk_tracking.core.errors import AnnotationError

pytestmark = [pytest.mark.timeout(TIMEOUT_S), pytest.mark.usefixtures("without_fsync")]

TABLES = tuple(name for name in FILES if name.endswith(".parquet"))
OUTSIDE = "outside"

Mutation = Callable[[Path, random.Random], object]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return saved annotations: with gaps, unavailable, of a real trace."""
    folder = tmp_path_factory.mktemp("originals")
    with_gaps = one_step()
    with_gaps.call(50, 500, name="cudaGraphLaunch")
    with_gaps.record(50, 510, grid=[1, 2, 3], block=[32, 1, 1])
    with_gaps.record(50, 520, duration=0)
    with_gaps.launch(51, 2000)
    unavailable = SyntheticTrace()
    unavailable.op(0, 100, 200)
    real = real_trace("raises_in_backward")
    annotations = [
        import_trace(with_gaps.write(folder)),
        import_trace(unavailable.write(folder)),
        import_trace(real.trace, ops=real.ops),
    ]
    for number, annotation in enumerate(annotations):
        annotation.save(folder / str(number))
    return [folder / str(number) for number in range(len(annotations))]


def _damaged(originals: list[Path], folder: Path, mutate: Mutation, seed: int) -> bool:
    """Copy an annotation, damage it, load it; return whether it was still good, and then use all of it."""
    dice = random.Random(seed)
    target = folder / "annotation"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(dice.choice(originals), target)
    mutate(target, dice)
    with (
        processor_time(HANG_S),
        untouched(folder, but=lambda path: (folder / "again") in (path, *path.parents)),
    ):
        refusal = None
        try:
            annotation = load_annotation(target)
        except AnnotationError as error:
            refusal = error
        if refusal is not None:
            assert refusal.file is None or refusal.file in FILES
            assert len(str(refusal)) < 5000
            return False
        json.dumps(facts(annotation), allow_nan=False)
        metrics(annotation)
        launch_summary(annotation)
        list(annotation.iter_launches())
        list(annotation.iter_aten_calls())
        annotation.save(folder / "again")
        assert load_annotation(folder / "again").manifest == annotation.manifest
    shutil.rmtree(folder / "again")
    return True


# What is done to them


def _scrambled_bytes(target: Path, dice: random.Random) -> None:
    path = target / dice.choice(FILES)
    path.write_bytes(scramble_bytes(path.read_bytes(), dice))


def _scrambled_manifest(target: Path, dice: random.Random) -> None:
    said = json.loads((target / MANIFEST).read_bytes())
    for _ in range(dice.randint(1, 3)):
        scramble_json(said, dice)
    (target / MANIFEST).write_bytes(dump_json(said))


def _scrambled_parquet(target: Path, dice: random.Random) -> None:
    """Damage a table and let the manifest vouch for it."""
    name = dice.choice(TABLES)
    rewrite_file(target, name, scramble_bytes((target / name).read_bytes(), dice))


def _changed_value(target: Path, dice: random.Random) -> None:
    def change(table: pa.Table) -> pa.Table:
        for _ in range(dice.randint(1, 2)):
            name, row = dice.choice(table.column_names), dice.randrange(len(table)) if len(table) else None
            others = table[dice.choice(table.column_names)].to_pylist()
            value = dice.choice((*HOSTILE_VALUES, *HOSTILE_TEXTS, *others[:20]))
            if row is not None:
                try:
                    table = with_value(row, name, value)(table)
                except (pa.ArrowException, OverflowError, TypeError, ValueError):
                    continue  # no value of this column's type
        return table

    rewrite_table(target, dice.choice(TABLES), change)


def _changed_rows(target: Path, dice: random.Random) -> None:
    def change(table: pa.Table) -> pa.Table:
        rows = list(range(len(table)))
        match dice.randrange(4):
            case 0:
                dice.shuffle(rows)
            case 1:
                rows = rows[: dice.randrange(len(rows) + 1)]
            case 2:
                rows += rows[:1]
            case _:
                rows = rows[1:]
        return table.take(pa.array(rows, pa.int64()))

    rewrite_table(target, dice.choice(TABLES), change)


def _changed_columns(target: Path, dice: random.Random) -> None:
    def change(table: pa.Table) -> pa.Table:
        name = dice.choice(table.column_names)
        place = table.column_names.index(name)
        match dice.randrange(4):
            case 0:
                return table.drop_columns([name])
            case 1:
                return table.append_column(dice.choice((name, "extra", "../x")), table[name])
            case 2:
                kind = dice.choice((pa.int8(), pa.float32(), pa.binary(), pa.list_(pa.int64()), pa.null()))
                return table.set_column(place, name, pa.nulls(len(table), kind))
            case _:
                return table.rename_columns(
                    [dice.choice(HOSTILE_TEXTS[:10]) if n == name else n for n in table.column_names]
                )

    rewrite_table(target, dice.choice(TABLES), change)


def _swapped_files(target: Path, dice: random.Random, *, originals: list[Path]) -> None:
    name, other = dice.choice(FILES), dice.choice(originals) / dice.choice(FILES)
    body = other.read_bytes()
    if name == MANIFEST or dice.random() < 0.3:
        (target / name).write_bytes(body)
    else:
        rewrite_file(target, name, body, rows=dice.choice((0, 1, 2, 20)))


def _hostile_names(target: Path, dice: random.Random) -> None:
    """Let the manifest list files elsewhere."""
    outside = target.parent / OUTSIDE
    outside.mkdir(exist_ok=True)
    shutil.copy(target / TABLES[0], outside / TABLES[0])
    name = dice.choice(sorted(set(FILES) - {MANIFEST}))
    elsewhere = dice.choice(
        (f"../{OUTSIDE}/{TABLES[0]}", str(outside / TABLES[0]), "/etc/passwd", "..", ".", "")
    )

    def change(said: dict[str, Any]) -> None:
        if dice.random() < 0.5:
            said["files"][elsewhere] = said["files"][name]
        else:
            said["files"][elsewhere] = said["files"].pop(name)

    rewrite_manifest(target, change)


def _links(target: Path, dice: random.Random) -> None:
    outside = target.parent / OUTSIDE
    outside.mkdir(exist_ok=True)
    name = dice.choice(FILES)
    shutil.copy(target / name, outside / name)
    (target / name).unlink()
    goal = dice.choice(
        (
            outside / name,
            Path(f"../{OUTSIDE}/{name}"),
            target / name,
            Path("/dev/zero"),
            outside,
            Path("nowhere"),
        )
    )
    (target / name).symlink_to(goal)


@pytest.mark.parametrize(
    "mutate",
    [
        _scrambled_bytes, _scrambled_manifest, _scrambled_parquet, _changed_value, _changed_rows,
        _changed_columns, _hostile_names, _links,
    ],
    ids=lambda mutate: mutate.__name__,
)  # fmt: skip
def test_a_mutated_annotation_is_refused_or_valid(
    originals: list[Path], tmp_path: Path, mutate: Mutation
) -> None:
    good = [_damaged(originals, tmp_path, mutate, seed) for seed in range(MUTATIONS)]
    tell(mutate.__name__.strip("_"), tried=MUTATIONS, valid=sum(good))
    if mutate not in (_changed_value, _changed_rows):  # which may be no change, or a valid one
        assert not all(good)
    if mutate in (_hostile_names, _links):
        assert not any(good)


def test_files_of_other_annotations_are_refused(originals: list[Path], tmp_path: Path) -> None:
    mutate = partial(_swapped_files, originals=originals)
    good = [_damaged(originals, tmp_path, mutate, seed) for seed in range(MUTATIONS)]
    tell("swapped_files", tried=MUTATIONS, valid=sum(good))
    assert not all(good)

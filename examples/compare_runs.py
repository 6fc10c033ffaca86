"""Put two configurations of one model into two MLflow runs and say what changed from the one to the other.

    python examples/compare_runs.py [BASELINE CANDIDATE]

BASELINE and CANDIDATE are folders of annotations; by default the two in examples/data, recorded on an H200 by
record_configurations.py: fp32 and bf16.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mlflow import MlflowClient

from tlk_tracking import compare_runs, load_annotation, log_annotation
from tlk_tracking.core.text import show_number
from tlk_tracking.report.comparison_report import render_comparison
from tlk_tracking.report.row_names import show_key

TRACKING_URI = "sqlite:///mlflow.db"
DATA = Path(__file__).parent / "data"


def log_run(folder: Path) -> str:
    """Log all annotations below the folder into a new run and return its id."""
    client = MlflowClient(TRACKING_URI)
    experiment = client.get_experiment_by_name("tlk_tracking_compare")
    experiment_id = (
        experiment.experiment_id if experiment else client.create_experiment("tlk_tracking_compare")
    )
    run_id: str = client.create_run(experiment_id, run_name=folder.name).info.run_id
    for manifest in sorted(folder.rglob("annotation.json")):
        log_annotation(load_annotation(manifest.parent), run_id, TRACKING_URI)
    client.set_terminated(run_id)
    return run_id


def main(baseline: Path, candidate: Path) -> None:
    """Compare the two and print circumstances, totals and the largest changes; write the page beside."""
    comparison = compare_runs(log_run(baseline), log_run(candidate), tracking_uri=TRACKING_URI)
    (differences,) = comparison.context.values()
    for each in differences:
        print(f"{each.field}: {each.baseline} -> {each.candidate}")
    for table in ("total", "phase", "module", "call", "kernel"):
        rows = [row for row in comparison.rows if row.table == table]
        changes = [row for row in rows if row in comparison.changes]
        print(f"\n{table}: {len(changes)} of {len(rows)} rows changed")
        for row in changes[:5]:
            before = show_number(row.baseline, row.baseline_bound)
            after = show_number(row.candidate, row.candidate_bound)
            print(
                f"  {row.verdict:9} {row.measure:15} {before:>10} -> {after:<10} {show_key(row.table, row.key)}"
            )
    Path("comparison.html").write_text(render_comparison(comparison), encoding="utf-8")
    print("\ncomparison.html: open it in a browser")


if __name__ == "__main__":
    main(*(Path(folder) for folder in sys.argv[1:] or (DATA / "compare_fp32", DATA / "compare_bf16")))

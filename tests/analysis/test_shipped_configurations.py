from __future__ import annotations

from paths import EXAMPLES

from tlk_tracking import compare_annotations, load_annotation
from tlk_tracking.analysis.verdicts import Verdict

SHIPPED = EXAMPLES / "data"


def test_the_shipped_configurations_differ_as_the_docs_say() -> None:
    """Two precisions of one model, recorded on a GPU: what changed is said, and for times too."""
    sides = [
        [load_annotation(path) for path in sorted((SHIPPED / name).glob("window_*/rank_*"))]
        for name in ("compare_fp32", "compare_bf16")
    ]
    found = compare_annotations(*sides)
    totals = {row.measure: row.verdict for row in found.rows if row.table == "total"}
    assert totals["launches"] is Verdict.INCREASED
    assert totals["device_time_ms"] is Verdict.DECREASED
    assert totals["memcpys"] is Verdict.UNCHANGED
    (differences,) = found.context.values()
    assert [(each.field, each.baseline, each.candidate) for each in differences] == [
        ("precision", "32-true", "bf16-mixed")
    ]

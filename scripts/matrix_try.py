"""Try the installed package from end to end; the last line printed is the versions it ran with.

python scripts/matrix_try.py LIGHTNING_PACKAGE TRACKING_URI TRACES
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = (
    "torch",
    "lightning",
    "pytorch-lightning",
    "mlflow",
    "mlflow-skinny",
    "pandas",
    "numpy",
    "pyarrow",
)


def main(package: str, uri: str, traces: Path) -> None:
    """Fit, read back, import, show, compare and report."""
    from mlflow import MlflowClient

    client = MlflowClient(uri)
    run_id = fit(package, uri)
    tlk("show", f"runs:/{run_id}", "--tracking-uri", uri)
    tags = client.get_run(run_id).data.tags
    assert tags["tlk.availability"] in ("recorded", "unavailable"), tags
    trace, ops = traces / "lightning_fit.trace.json.gz", traces / "lightning_fit.ops.json"
    imported = client.create_run("0").info.run_id
    tlk("import", trace, "--ops", ops, "--run", imported, "--tracking-uri", uri)
    expected = json.loads((traces / "lightning_fit.expected.json").read_text())
    shown = json.loads(tlk("show", f"runs:/{imported}", "--json", "--tracking-uri", uri))
    assert shown["by_step"] == expected["by_step"], shown
    tlk("compare", f"runs:/{imported}", f"runs:/{run_id}", "--tracking-uri", uri, "--html", "comparison.html")
    tlk("report", f"runs:/{imported}", "--tracking-uri", uri, "--html", "report.html")
    tlk("validate", f"runs:/{run_id}", "--tracking-uri", uri)
    versions = {"python": platform.python_version()} | {
        name: number for name in PACKAGES if (number := found(name))
    }
    sys.stdout.write("\n" + ", ".join(f"{name} {number}" for name, number in versions.items()) + "\n")


def fit(package: str, uri: str) -> str:
    """Train a little with the callback; return the run."""
    import torch

    from tlk_tracking import load_run
    from tlk_tracking.callbacks import KernelTelemetry

    lightning = import_module(package)
    boring = import_module(f"{package}.demos.boring_classes")
    logger = import_module(f"{package}.loggers").MLFlowLogger(tracking_uri=uri)
    trainer = lightning.Trainer(
        max_steps=20,
        logger=logger,
        callbacks=[KernelTelemetry(skip_first=5, warmup=1, active=3)],
        enable_progress_bar=False,
    )
    trainer.fit(boring.BoringModel(), torch.utils.data.DataLoader(torch.ones(64, 32)))
    (annotation,) = load_run(logger.run_id, uri).annotations
    assert annotation.complete_steps == (6, 7, 8), annotation.complete_steps
    return str(logger.run_id)


def tlk(*arguments: str | Path) -> str:
    """Run the command line; return what it printed."""
    command = ["tlk", *(str(argument) for argument in arguments)]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def found(package: str) -> str | None:
    """Return the version of a package that is installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))

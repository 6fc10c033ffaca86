"""What the documentation shows works: its Python runs, its `tlk` commands end well, its links lead somewhere.

A block is left out by a comment before it, `<!-- not run: WHY -->`; of shell blocks only `tlk`, `python` and
`export` lines are run.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from paths import DATA, TOP

PAGES = sorted([*(TOP / "docs").rglob("*.md"), *TOP.glob("*.md")])

_FENCE = re.compile(r"^(?P<before>[^\n]*)\n+```(?P<kind>python|bash)\n(?P<code>.*?)^```$", re.M | re.S)
_LINK = re.compile(r"\[[^\]\n]*\]\((?P<target>[^)\s]+)\)")
_COMMAND = re.compile(r"^(?:tlk|python|export) .*?[^\\]$", re.M | re.S)

# What a page takes as given, by its name.
GIVEN = {
    "README.md": """
import torch
from tlk_tracking import record_kernels
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel

class Brief(BoringModel):
    def on_train_epoch_end(self):
        self.trainer.should_stop = True

model, batches = Brief(), torch.utils.data.DataLoader(torch.ones(64, 32))
train_one_step = lambda: torch.ones(3).sum()
""",
    "metrics.md": "run_id, annotation = a_run('before'), import_trace('traces/before.json.gz')",
    "compare.md": "baseline_id, candidate_id = a_run('before'), a_run('after')",
    "search-runs.md": "a_run('before'), a_run('after')",
    "remote-servers.md": """
for stage in ("raw", "annotations"):
    Path("kernel_telemetry_outbox", stage).mkdir(parents=True)
""",
}

# Runs the blocks of one page, in their order, in one namespace; names in capitals stand for its variables, or for the
# runs that an import of the page made. What is exported stays so, as in one shell.
DRIVER = """
import json, os, re, subprocess, sys
from pathlib import Path
from tlk_tracking import import_trace, log_annotation

def a_run(trace):
    from tlk_tracking.tracking.mlflow_store import create_finished_run
    uri = "sqlite:///mlflow.db"
    run_id = create_finished_run("old", run_name=trace, tracking_uri=uri)
    log_annotation(import_trace(f"traces/{trace}.json.gz"), run_id, uri)
    return run_id

page = json.load(sys.stdin)
namespace = dict(globals())
exec(compile(page["given"], "given", "exec"), namespace)
for kind, code in page["blocks"]:
    if kind == "python":
        exec(compile(code, page["name"], "exec"), namespace)
        continue
    for name in ("run_id", "baseline_id", "candidate_id"):
        code = code.replace(name.upper(), str(namespace.get(name)))
    print("$", code, flush=True)
    os.environ.update(re.findall(r"^export (\\w+)=(\\S+)$", code, re.M))
    done = subprocess.run(["bash", "-euc", code], check=True, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    made = re.findall(r"^next: tlk show runs:/(\\w+)", done.stdout, re.M)
    for name, run in zip(("baseline_id", "candidate_id"), made):
        namespace.setdefault(name, run)
"""


def _blocks(page: Path) -> list[tuple[str, str]]:
    """Return (kind, code) of the blocks of a page that are run."""
    found = []
    for block in _FENCE.finditer(page.read_text(encoding="utf-8")):
        code = block["code"]
        if block["kind"] == "bash":
            code = "\n".join(command[0] for command in _COMMAND.finditer(code))
        if code and not block["before"].startswith("<!-- not run: "):
            found.append((block["kind"], code))
    return found


@pytest.mark.parametrize("page", [page for page in PAGES if _blocks(page)], ids=lambda page: page.name)
def test_the_code_of_a_page_works(page: Path, mlflow_sqlite: str, tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    traces.mkdir()
    shutil.copy(DATA / "eager_transformer.trace.json.gz", traces / "before.json.gz")
    shutil.copy(DATA / "compiled_transformer.trace.json.gz", traces / "after.json.gz")
    for side in ("before", "after"):
        window = tmp_path / "old_traces" / side / "iteration_10"
        window.mkdir(parents=True)
        for rank in (0, 1):
            shutil.copy(DATA / f"ddp_rank{rank}.trace.json.gz", window / f"rank{rank}_trace.json.gz")
    shutil.copytree(TOP / "examples", tmp_path / "examples")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/data").symlink_to(DATA)
    blocks = [(kind, code.replace("http://127.0.0.1:5000", mlflow_sqlite)) for kind, code in _blocks(page)]
    given = {"name": page.name, "given": GIVEN.get(page.name, ""), "blocks": blocks}
    done = subprocess.run(
        [sys.executable, "-c", DRIVER],
        input=json.dumps(given),
        cwd=tmp_path,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_to_files_or_to_secure_addresses(page: Path) -> None:
    targets = [link["target"] for link in _LINK.finditer(page.read_text(encoding="utf-8"))]
    local = [target.partition("#")[0] for target in targets if not target.startswith("https://")]
    assert [target for target in local if target and not (page.parent / target).exists()] == []


def test_every_page_of_the_site_is_in_its_navigation() -> None:
    named = set(re.findall(r"^\s+- (\S+\.md)$", (TOP / "mkdocs.yml").read_text(), re.M))
    assert {path.relative_to(TOP / "docs").as_posix() for path in (TOP / "docs").rglob("*.md")} == named


def test_every_gap_is_explained() -> None:
    from tlk_tracking.core.gaps import GapReason

    text = (TOP / "docs" / "concepts.md").read_text()
    assert [reason.value for reason in GapReason if f"`{reason.value}`" not in text] == []


def test_the_readme_names_every_verb() -> None:
    from tlk_tracking.cli import tlk

    text = (TOP / "README.md").read_text()
    assert [verb for verb in tlk.list_commands(None) if f"`tlk {verb}" not in text] == []  # type: ignore[arg-type]  # no context needed

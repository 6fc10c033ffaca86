"""Where things are in a checkout."""

from __future__ import annotations

from pathlib import Path

SUPPORT = Path(__file__).parent
TESTS = SUPPORT.parent
TOP = TESTS.parent
DATA = TESTS / "data"
CAPTURED = DATA / "captured"
EXAMPLES = TOP / "examples"

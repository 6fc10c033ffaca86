"""What scripts/soak measures: with TLK_SOAK=FILE set, tests do their full count and tell FILE of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

SOAK = "TLK_SOAK" in os.environ
# A test of the full count may take this long.
TIMEOUT_S = 7200 if SOAK else 180


def tell(promise: str, **figures: object) -> None:
    """Add figures to the file that scripts/soak reads."""
    if SOAK:
        with Path(os.environ["TLK_SOAK"]).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"promise": promise, **figures}) + "\n")

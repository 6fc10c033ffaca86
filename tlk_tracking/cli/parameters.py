"""Refuse values that are none, like those of an unset variable (argument text -> value)."""

from __future__ import annotations

import math
from typing import Any

import click


class Given(click.types.StringParamType):
    """A text that is not empty: `--tracking-uri "$UNSET"` names no store, least of all the default one."""

    # Any here and below: click's own signature.
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Return the text, or end with what is wrong with it."""
        text = super().convert(value, param, ctx)
        if not text.strip():
            self.fail("it is empty; is a variable unset?", param, ctx)
        return text


class FiniteRange(click.FloatRange):
    """A range without nan, with which no comparison is true, and inf, which no gate can reach."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, or end with what is wrong with it."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number} is no finite number", param, ctx)
        return number


GIVEN = Given()

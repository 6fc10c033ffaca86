"""Callbacks for training frameworks; nothing in tlk_tracking imports this package."""

from __future__ import annotations

from .kernel_telemetry import KernelTelemetry

__all__ = ["KernelTelemetry"]

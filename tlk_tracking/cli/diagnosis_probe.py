"""Record three small kernels with `record_kernels` and print what came of it: one line of JSON.

`tlk doctor` runs this as a process of its own, so that a driver that hangs or crashes takes only the process.
"""

from __future__ import annotations

import sys

import msgspec
import torch

from tlk_tracking.cli.diagnosis_lines import PROBE_KERNELS, ProbeAnswer
from tlk_tracking.core.errors import TlkError
from tlk_tracking.recording.block_recording import record_kernels
from tlk_tracking.recording.environment import describe_environment


def probe() -> ProbeAnswer:
    """Record `PROBE_KERNELS` kernels on the first device, or as many additions on the CPU where there is none."""
    availability, reason, kernels = None, None, None
    gpus: tuple[str, ...] = ()
    try:
        gpus = tuple(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        operand = torch.ones(8, device="cuda" if gpus else "cpu")
        with record_kernels() as recording:
            for _ in range(PROBE_KERNELS):
                operand = operand + 1
        manifest = recording.annotation.manifest
        availability, reason = manifest.availability, manifest.availability_reason
        count = manifest.counts["kernels"].value
        kernels = None if count is None else int(count)
    except (TlkError, RuntimeError) as error:  # RuntimeError is what torch raises for the driver's errors
        reason = next(iter(str(error).splitlines()), type(error).__name__)
    return ProbeAnswer(
        environment=describe_environment(),
        gpus=gpus,
        availability=availability,
        reason=reason,
        kernels=kernels,
    )


if __name__ == "__main__":
    sys.stdout.write(msgspec.json.encode(probe()).decode() + "\n")

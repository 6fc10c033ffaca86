"""The models whose steps are measured: small enough to be bound by launches, or large enough by the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A transformer encoder and the batch that it is trained with."""

    layers: int
    width: int
    heads: int
    batch: int
    length: int


# About 970 and 1,230 ATen calls a step; on an H200 about 10 ms and 95 ms.
LAUNCH_BOUND = Size(layers=6, width=256, heads=8, batch=8, length=64)
# As many calls on tensors so small that a CPU makes them as fast.
CPU_BOUND = Size(layers=6, width=32, heads=2, batch=2, length=8)
DEVICE_BOUND = Size(layers=8, width=1024, heads=16, batch=12, length=512)


class Encoder(nn.Module):
    """A transformer encoder with a linear head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            size.width, size.heads, dim_feedforward=4 * size.width, dropout=0.0, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, size.layers, enable_nested_tensor=False)
        self.head = nn.Linear(size.width, size.width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the head's output for each position."""
        out: torch.Tensor = self.head(self.encoder(inputs))
        return out


def training_step(size: Size, device: str) -> tuple[nn.Module, Callable[[], None]]:
    """Return a model and a function that does one whole training step on a fixed batch."""
    torch.manual_seed(0)
    model = Encoder(size).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True, fused=False)
    inputs = torch.randn(size.batch, size.length, size.width, device=device)

    def step() -> None:
        loss = (model(inputs) - inputs).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return model, step

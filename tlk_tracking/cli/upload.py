"""`tlk upload`: send the windows and annotations that wait in an outbox."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import click

from tlk_tracking.cli.parameters import GIVEN
from tlk_tracking.cli.server import SENDING_S, bounded_requests
from tlk_tracking.delivery.outbox import DEFAULT_FOLDER, Delivery, DeliveryState, Entry, Outbox, RawWindow

_Item = TypeVar("_Item", RawWindow, Entry)


@click.command("upload")
@click.option(
    "--outbox",
    "folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=DEFAULT_FOLDER,
    show_default=True,
    help="The outbox, as the training's warning named it.",
)
@click.option(
    "--tracking-uri", type=GIVEN, help="MLflow server or store, instead of the one the outbox remembers."
)
def command(folder: Path, tracking_uri: str | None) -> None:
    """Send what waits in an outbox: each window once, however often this runs.

    Exit code 1 when something is left.
    """
    outbox = Outbox(folder)
    if not outbox.is_there():
        raise click.UsageError(
            f"{folder} is not an outbox; give the folder that the training's warning named"
        )
    with bounded_requests(tracking_uri, limit_s=SENDING_S):
        outbox.sweep()
        deliveries = _deliver_all(outbox, tracking_uri)
    for delivery in deliveries:
        click.echo(_line(delivery))
    left = sum(delivery.is_waiting for delivery in deliveries)
    sent = sum(delivery.state is DeliveryState.SENT for delivery in deliveries)
    click.echo(f"{sent} sent, {left} left in {outbox.root}")
    raise SystemExit(1 if left else 0)


def _deliver_all(outbox: Outbox, tracking_uri: str | None) -> list[Delivery]:
    from tlk_tracking.delivery.delivery_loop import send, settle

    settled = list(_tracked("annotating", outbox.raw_windows(), lambda window: settle(outbox, window)))
    # A window that is no annotation yet is left; the others are among the entries now.
    left = [delivery for delivery in settled if delivery.state is DeliveryState.RAW]
    sent = _tracked("sending", outbox.entries(), lambda entry: send(outbox, entry, tracking_uri))
    return left + list(sent)


def _tracked(verb: str, items: Sequence[_Item], work: Callable[[_Item], Delivery]) -> Iterator[Delivery]:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    shown = track(items, verb, console=console, transient=True, disable=not console.is_terminal)
    yield from map(work, shown)


def _line(delivery: Delivery) -> str:
    text = f"{delivery.state.value:5} {delivery.name}"
    if delivery.reason is not None:
        text += f": {delivery.reason}"
    return "".join(character if character.isprintable() else "?" for character in text)

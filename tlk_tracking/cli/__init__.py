"""The command line: one verb, one file; a verb's module is loaded when the verb is used."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import NoReturn, cast

import click

from tlk_tracking.cli.terminal import prepare_output
from tlk_tracking.core.errors import TlkError
from tlk_tracking.core.text import visible

_MESSAGE_LENGTH = 2000

# Verb -> (module below this package, what `tlk --help` says of it).
_VERBS = {
    "compare": ("compare", "Say what changed between two or more annotations or runs."),
    "doctor": ("doctor", "Say what can be recorded here and where it would go."),
    "export": ("export", "Write a window as a timeline for ui.perfetto.dev."),
    "history": ("history", "Show one number over the runs of an experiment."),
    "import": ("import_", "Make an annotation of a Kineto trace."),
    "report": ("report", "Write one annotation as a self-contained HTML page."),
    "show": ("show", "Show what launched what, how often and how long."),
    "upload": ("upload", "Send annotations that wait in the outbox."),
    "validate": ("validate", "Check every file of an annotation."),
}


class _Verbs(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _VERBS:
            return None
        module = import_module(f"{__name__}.{_VERBS[cmd_name][0]}")
        return cast("click.Command", module.command)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, _VERBS[verb][1]) for verb in self.list_commands(ctx)])


@click.group(cls=_Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tlk-tracking", prog_name="tlk")
def tlk() -> None:
    """CUDA kernel telemetry of PyTorch Lightning training in MLflow.

    TARGET is an annotation folder or runs:/RUN_ID. Exit codes: 0 fine, 1 the check asked for fails,
    2 usage or bad input.
    """


def main() -> None:
    """Run `tlk`; what this package or the file system refuses is one line on standard error and exit code 2."""
    prepare_output()
    try:
        try:
            tlk.main(prog_name="tlk")
        finally:
            if sys.stdout is not None:  # a program without one, `>&-`
                sys.stdout.flush()
    except TlkError as error:
        # It may quote a hostile file.
        _refuse(str(error))
    except OSError as error:
        if error.filename is None:
            raise
        _refuse(f"{error.filename}: {error.strerror}")


def _refuse(why: str) -> NoReturn:
    click.echo(f"tlk: {visible(why)[:_MESSAGE_LENGTH]}", err=True)
    sys.exit(2)

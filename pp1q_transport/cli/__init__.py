"""The `pp1q` command: one file a subcommand, loaded only when it is asked for.

Between a shell and everything below. Parses, prints and exits; decides nothing about frames. SPEC section 9.
"""

from __future__ import annotations

import importlib
from typing import Final

import click

COMMANDS: Final = {
    "daemon": ("pp1q_transport.cli.daemon", "daemon"),
    "demo": ("pp1q_transport.cli.demo", "demo"),
    "demo-draft": ("pp1q_transport.cli.demo", "demo_draft"),
    "demo-sidecar": ("pp1q_transport.cli.demo_sidecar", "demo_sidecar"),
    "demo-target": ("pp1q_transport.cli.demo_sidecar", "demo_target"),
    "doctor": ("pp1q_transport.cli.doctor", "doctor"),
    "keys": ("pp1q_transport.cli.keys", "keys"),
    "send": ("pp1q_transport.cli.send", "main"),
    "recv": ("pp1q_transport.cli.recv", "main"),
    "simulate": ("pp1q_transport.cli.simulate", "simulate"),
    "replay": ("pp1q_transport.cli.replay", "replay"),
    "top": ("pp1q_transport.cli.top", "top"),
}


class LazyGroup(click.Group):
    """Imports a subcommand's module when it runs, so that `pp1q --help` costs no numpy."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order of `COMMANDS`."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, or None for an unknown name."""
        entry = COMMANDS.get(cmd_name)
        if entry is None:
            return None
        command = getattr(importlib.import_module(entry[0]), entry[1])
        assert isinstance(command, click.Command)
        return command


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="pp1q-transport")
def main() -> None:
    """Carries a draft model's exact proposal distribution q to the model that verifies it.

    Example: pp1q demo
    """

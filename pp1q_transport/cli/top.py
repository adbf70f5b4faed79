"""`pp1q top`: a live view of one or more daemons, asked over their Unix sockets.

Between a terminal (or a pipe) and `daemon.status`. Attaches to nothing: a daemon serves its sessions as before. SPEC section 9.
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from typing import TYPE_CHECKING, Final

import click

from ._common import command_errors

if TYPE_CHECKING:
    from ..daemon.view import Reading

HOME: Final = "\x1b[H"
CLEAR: Final = "\x1b[2J"
CLEAR_LINE: Final = "\x1b[K"
CLEAR_BELOW: Final = "\x1b[J"
ASK_S: Final = 1.0  # for one answer; a daemon's loop turns in milliseconds


@click.command(context_settings={"show_default": True})
@click.argument("sockets", metavar="SOCKET...", nargs=-1, required=True, type=click.Path())
@click.option("--interval", type=click.FloatRange(0.1, 3600.0), default=1.0, metavar="S", help="Between two looks.")
@click.option("--once", is_flag=True, help="Look once and exit; status 1 when a daemon is gone.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a look on stdout.")
@command_errors
def top(sockets: tuple[str, ...], interval: float, once: bool, as_json: bool) -> None:
    """Shows what daemons do: sessions, slots, rates, latency, discards. Ctrl-C ends it.

    Example: pp1q top /run/pp1q-leader/leader.sock /run/pp1q-receiver-0/receiver.sock
    """
    from ..errors import ConfigError, PeerFault, Reason

    if not math.isfinite(interval):
        raise ConfigError(f"--interval must be a number of seconds, not {interval}")
    before: dict[str, Reading] = {}
    live = not once and not as_json and sys.stdout.isatty()
    try:
        if live:
            click.echo(CLEAR, nl=False)
        while True:
            now = {socket: _ask(socket, before.get(socket)) for socket in dict.fromkeys(sockets)}
            _show(now, before, live, as_json)
            if once:
                break
            before = now
            time.sleep(interval)
    except KeyboardInterrupt:
        return
    gone = [reading.fault for reading in now.values() if reading.status is None]
    if gone:
        raise PeerFault(Reason.PEER_LOST, "; ".join(gone))


def _ask(socket: str, before: Reading | None) -> Reading:
    from ..daemon.status import fetch_status
    from ..daemon.view import Reading
    from ..errors import PeerFault

    try:
        status = fetch_status(socket, ASK_S)
    except PeerFault as fault:
        since = before.gone_since if before is not None and before.status is None else time.time()
        return Reading(socket, time.monotonic(), None, fault.detail, since)
    return Reading(socket, time.monotonic(), status)


def _show(now: dict[str, Reading], before: dict[str, Reading], live: bool, as_json: bool) -> None:
    from ..daemon.view import COLUMNS, describe

    if as_json:
        daemons = [{"socket": reading.socket, "status": reading.status, "fault": reading.fault} for reading in now.values()]
        click.echo(json.dumps({"at": time.time(), "daemons": daemons}))
        sys.stdout.flush()
        return
    columns, rows = shutil.get_terminal_size((COLUMNS, 24)) if live else (COLUMNS, 0)
    lines: list[str] = []
    for socket, reading in now.items():
        lines += [*describe(reading, before.get(socket), columns), ""]
    if live:
        if len(lines) >= rows > 2:
            lines = [*lines[: rows - 2], f"... {len(lines) - rows + 2} more lines"]
        click.echo(HOME + "".join(f"{line}{CLEAR_LINE}\n" for line in lines) + CLEAR_BELOW, nl=False)
    else:
        click.echo("\n".join(lines))
    sys.stdout.flush()

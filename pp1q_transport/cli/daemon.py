"""`pp1q daemon`: the sidecar beside a draft or target process, until SIGTERM.

Between a shell or service manager and `daemon.service`. Exit status: 0 after a whole drain, 2 for a configuration or host that
can't work (trying again is no use), 3 when SIGTERM's drain was cut short. SPEC section 9.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

import click

from ._capture import CaptureChoice, capture_options
from ._common import command_errors, setup_logging

LEVELS: Final = {"debug": 2, "info": 1, "warning": 0, "error": -1}
CUT_SHORT: Final = 3


@click.command("daemon", context_settings={"show_default": True})
@click.option("--config", "config_path", required=True, metavar="FILE", help="The TOML file (examples: deploy/examples).")
@click.option("--check", is_flag=True, help="Judge the file, print what it means, start nothing.")
@click.option("--json", "as_json", is_flag=True, help="With --check: every setting, as one JSON object on stdout.")
@click.option("-v", "--verbose", count=True, help="More log lines than log_level asks for.")
@command_errors
@capture_options
def daemon(config_path: str, check: bool, as_json: bool, verbose: int, capture: CaptureChoice) -> None:
    """Runs the sidecar of one draft or target process: holds its sessions, slots and links until SIGTERM.

    SIGTERM drains: nothing new is begun, what is under way ends, peers and the attached process are told. SIGHUP reads the file
    again and takes over what can change live. Exit status 0 after a whole drain, 2 for a configuration or host that can't
    work, 3 when the drain was cut short.

    Example: pp1q daemon --config deploy/examples/local-leader.toml
    """
    from ..daemon.config import load
    from ..daemon.meaning import meaning
    from ..daemon.settings import CaptureSettings
    from ..local.unix_socket import check_folder

    config = load(config_path)
    if capture.path is not None:
        file = Path(capture.path).absolute()
        config = replace(config, capture=CaptureSettings(file=file, file_mib=capture.mib, redact=capture.redact))
    if check:
        check_folder(str(config.daemon.socket))
        if as_json:
            click.echo(json.dumps({"valid": True, "source": config.source, "settings": config.describe()}))
        else:
            click.echo("\n".join([f"{config.source}: valid", *meaning(config)]))
        return
    from ..daemon.service import Service

    setup_logging(LEVELS[config.daemon.log_level] + verbose)
    service = Service(config, lambda level: setup_logging(LEVELS[level] + verbose))
    try:
        service.loop.take_signals()
        drained = service.run()
    finally:
        service.close()
    if not drained:
        click.echo(f"pp1q: the drain was cut short after {config.daemon.drain_s:g} s", err=True)
        sys.exit(CUT_SHORT)

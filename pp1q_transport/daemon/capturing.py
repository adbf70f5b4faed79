"""The [capture] table of a daemon's configuration: what the frames of all its links are written to.

Between `config`, which reads it, and `capture.recorder`, which is loaded only when there is one. docs/replay.md says what a file
holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .settings import CaptureSettings

if TYPE_CHECKING:
    from pathlib import Path

    from ..capture.recorder import Capture
    from .tables import Table


def capture_settings(table: Table, base: Path) -> CaptureSettings:
    """[capture], checked; a relative path is relative to the configuration's own folder. Raises `ConfigError`."""
    settings = CaptureSettings(
        file=base / table.text("file"),
        file_mib=table.integer("file_mib", (1, 1 << 20), 256),
        files=table.integer("files", (1, 1000), 4),
        redact=table.boolean("redact", False),
    )
    table.done()
    return settings


def open_capture(settings: CaptureSettings) -> Capture:
    """The capture that the settings ask for. Raises `ConfigError`."""
    from ..capture.recorder import Capture

    return Capture(settings.file, settings.file_mib << 20, settings.files, settings.redact)

"""What `pp1q doctor`'s checks come to. Between the checks and the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PASS: Final = "PASS"
WARN: Final = "WARN"
FAIL: Final = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: what was checked, how it went, and what was found or is to be done."""

    check: str
    verdict: str
    detail: str

"""The last word on the lanes, on the host: what the machine left in the results folder, and what it left out.

Between `run.py` and the reader. The machine prints each lane as it ends; here only lanes without an outcome are added.
"""

from __future__ import annotations

import json
from pathlib import Path

from lanes import LANES, OUTCOMES, line


def report(chosen: list[str], results: Path, required: bool, missing: str = "", ended: str = "") -> int:
    """Status 0 when nothing failed. `missing`: why there was no machine; `ended`: why it did not finish."""
    outcomes = json.loads((results / OUTCOMES).read_text(encoding="utf-8")) if (results / OUTCOMES).exists() else {}
    for name in chosen or LANES:
        if name in outcomes:
            continue
        verdict = "SKIP" if missing and not required else "FAIL"
        cause = f"{missing} (PP1Q_REQUIRE_RDMA)" if missing and required else missing or ended or "no outcome"
        outcomes[name] = {"verdict": verdict, "detail": cause}
        print(line(verdict, name, cause))
    (results / OUTCOMES).write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")
    failed = [name for name, outcome in outcomes.items() if outcome["verdict"] == "FAIL"]
    if failed:
        print(f"rdma: failed: {', '.join(failed)}; logs are in {results}")
    return 1 if failed else 0

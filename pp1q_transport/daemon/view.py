"""One daemon's status as a few lines of 80 columns: what `pp1q top` shows, without the showing.

Between `status` and the command. Pure functions of one or two readings; asks nobody and prints nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ..counters import HistogramSnapshot, quantile_ns
from .status import Status

COLUMNS: Final = 80
_LABEL: Final = 9
_PART_CHARS: Final = 24  # of a name that a daemon says


@dataclass(frozen=True, slots=True)
class Reading:
    """What asking one daemon gave: a status, or why there is none. `at_s` is monotonic; `gone_since` is Unix time."""

    socket: str
    at_s: float
    status: Status | None
    fault: str = ""
    gone_since: float = 0.0


def describe(now: Reading, before: Reading | None = None, columns: int = COLUMNS) -> list[str]:
    """The lines for one daemon. Rates and quantiles are of the time since `before`; without it (or over a restart) there are no
    rates, and quantiles are of the daemon's whole life. No line is longer than `columns`, and none holds a control character."""
    status = now.status
    if status is None:
        since = time.strftime("%H:%M:%S", time.localtime(now.gone_since))
        return _fit([f"gone (since {since})  {now.socket}", "  " + now.fault], columns)
    earlier = before.status if before is not None else None
    if earlier is not None and (earlier["pid"] != status["pid"] or earlier["ready"] > status["ready"]):
        earlier = None
    lines = [_headline(status)]
    lines += [_row("peer", _session(session)) for session in status["sessions"]]
    group = status["group"]
    if group is not None and group["size"] > 1:
        ranks = f"rank {group['rank']}  {group['mode']}  {group['ranks_up']}/{group['size']} ranks up"
        lines.append(_row("group", "  ".join([ranks, f"epoch {group['epoch']}", *_breaker(status)])))
    if status["slots"]:
        lines.append(_row("slots", _pairs(status["slots"])))
    lines.append(_row("clients", _clients(status)))
    if earlier is not None and before is not None:
        lines.append(_row("rates", _rates(status, earlier, now.at_s - before.at_s)))
    else:
        lines.append(_row("totals", f"{status['ready']} rounds  {status['rows']} rows  {status['bytes_ready'] / 1e6:.1f} MB"))
    if status["slots"]:  # a leader has neither
        lines.append(_row("latency", _quantiles(status["latency"], earlier["latency"] if earlier else None, (0.5, 0.99, 0.999))))
        lines.append(_row("tail", _quantiles(status["tail"], earlier["tail"] if earlier else None, (0.5, 0.99))))
    discards = status.get("discards", status["reasons"])
    name = "discards" if "discards" in status else "refusals"
    lines.append(_row(name, _pairs(dict(sorted(discards.items(), key=lambda item: -item[1])))))
    return _fit(lines, columns)


def _headline(status: Status) -> str:
    sessions = status["sessions"]
    parts = [
        f"{status['role']} {status['name'][:_PART_CHARS]}" + ("  DRAINING" if status["draining"] else ""),
        f"pid {status['pid']}",
        f"up {_span(status['uptime_s'])}",
        f"sessions {sum(session['up'] for session in sessions)}/{len(sessions)}",
    ]
    group = status["group"]
    if group is None or group["size"] == 1:  # else it is in the group's line
        parts += _breaker(status)
    return "  ".join(parts)


def _breaker(status: Status) -> list[str]:
    if len(status["breakers"]) == 1:
        return [f"breaker {status['breakers'][0]['state']}"]
    tripped = [breaker for breaker in status["breakers"] if breaker["state"] != "closed"]
    if tripped:
        return ["breaker " + ", ".join(f"{breaker['peer'][:_PART_CHARS]} {breaker['state']}" for breaker in tripped)]
    return ["breaker closed"] if status["breakers"] else []


def _clients(status: Status) -> str:
    awaited = "draft" if status["role"] == "leader" else "target"
    named = "  ".join(f"{client['role']} {client['rank']} pid {client['pid']}" for client in status["clients"])
    return named or f"none: no {awaited} is attached"


def _session(session: Mapping[str, object]) -> str:
    state = "up" if session["up"] else "DOWN"
    since = _span(float(str(session["since_s"])))
    return f"{session['peer']}  {state} {since}  {session['link']}  {session['endpoint']}  formed {session['formed']}"


def _rates(now: Status, before: Status, elapsed_s: float) -> str:
    if elapsed_s <= 0:
        return "-"
    ready, discarded = now["ready"] - before["ready"], now["discarded"] - before["discarded"]
    megabytes = (now["bytes_ready"] - before["bytes_ready"]) / 1e6 / elapsed_s
    rows = (now["rows"] - before["rows"]) / elapsed_s
    share = f"{100 * discarded / (ready + discarded):.2f} %" if ready + discarded else "-"
    return f"{ready / elapsed_s:.1f} rounds/s  {rows:.1f} rows/s  {megabytes:.1f} MB/s  discarded {share}"


def _quantiles(now: HistogramSnapshot, before: HistogramSnapshot | None, shares: tuple[float, ...]) -> str:
    counts = now["counts"]
    if before is not None and before["bounds_ns"] == now["bounds_ns"]:
        counts = [max(0, late - early) for late, early in zip(counts, before["counts"], strict=True)]
    texts = []
    for share in shares:
        texts.append(f"p{100 * share:g} {_quantile(now['bounds_ns'], counts, share)}")
    return "  ".join(texts)


def _quantile(bounds_ns: Sequence[int], counts: Sequence[int], share: float) -> str:
    """Below the first bound and above the last one nothing is known but that."""
    value_ns = quantile_ns(bounds_ns, counts, share)
    if value_ns is None:
        return "-"
    if value_ns <= bounds_ns[0]:
        return f"< {_duration(bounds_ns[0])}"
    if sum(counts[:-1]) < share * sum(counts):
        return f"> {_duration(bounds_ns[-1])}"
    return _duration(value_ns)


def _duration(value_ns: float) -> str:
    """Three digits and a unit."""
    for unit, size in (("s", 1e9), ("ms", 1e6), ("us", 1e3)):
        if value_ns >= size:
            return f"{value_ns / size:#.3g} {unit}".replace(". ", " ")
    return f"{value_ns:.0f} ns"


def _span(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def _pairs(counts: Mapping[str, int]) -> str:
    return "  ".join(f"{name} {count}" for name, count in counts.items() if count) or "-"


def _row(label: str, text: str) -> str:
    return f"  {label:<{_LABEL}}{text}"


def _fit(lines: list[str], columns: int) -> list[str]:
    """Cut to the width, at the end; whatever a daemon said, no line of it moves the cursor."""
    clean = ("".join(char if char.isprintable() else "?" for char in line) for line in lines)
    return [line if len(line) <= columns else line[: columns - 3] + "..." for line in clean]

"""The daemon's metrics, by name, with their labels: what dashboards, rules and pages may use."""

from __future__ import annotations

# Metric -> its labels.
METRICS: dict[str, frozenset[str]] = {
    "pp1q_proposals_total": frozenset({"outcome"}),
    "pp1q_discards_total": frozenset({"reason"}),
    "pp1q_refusals_total": frozenset({"reason"}),
    "pp1q_slots": frozenset({"state"}),
    "pp1q_sessions_up": frozenset({"peer"}),
    "pp1q_sessions_total": frozenset({"peer"}),
    "pp1q_rows_total": frozenset(),
    "pp1q_payload_bytes_total": frozenset(),
    "pp1q_step_latency_seconds": frozenset({"le"}),
    "pp1q_tail_after_last_row_seconds": frozenset({"le"}),
    "pp1q_group_epoch": frozenset(),
    "pp1q_ranks_up": frozenset(),
    "pp1q_ranks": frozenset(),
    "pp1q_breaker_open": frozenset({"peer"}),
    "pp1q_clients": frozenset({"role"}),
    "pp1q_quarantined_slots": frozenset(),
    "pp1q_loops_total": frozenset(),
    "pp1q_draining": frozenset(),
    "pp1q_process_start_time_seconds": frozenset(),
    "pp1q_build_info": frozenset({"version"}),
}
HISTOGRAMS = {"pp1q_step_latency_seconds", "pp1q_tail_after_last_row_seconds"}

"""The simulator: a leader and its targets' ranks in one process on a virtual clock, under faults that a seed chooses.

Between the sans-IO sessions, which are the real ones, and `pp1q simulate` and the tests. Engines, target processes and the wire
are played here; no thread, no sleep, no wall clock. What must always hold is checked after every event. docs/simulation.md.
"""

"""Capture: every frame of a session written to a pcapng file, and what can be done with such a file afterwards.

Between an engine, which hands its sessions and links to a `Capture` where one is configured, and `pp1q replay` or Wireshark.
Changes no frame and decides nothing about one. docs/replay.md says what a file holds.
"""

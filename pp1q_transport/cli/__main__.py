"""`python -m pp1q_transport.cli`: the same as `pp1q`, for processes that start one another."""

from . import main

main(prog_name="pp1q")

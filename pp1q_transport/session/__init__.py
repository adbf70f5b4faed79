"""The sans-IO sessions: state machines that take headers, landed bytes and a clock value, and queue frames.

Between `wire` below and the links, control plane and engine above. No socket, no sleep, no wall clock in here.
"""

"""The sidecar: a process of its own between a draft or target process and the peers' daemons.

Above the engine and beside `client`; nothing is imported here, so that a command loads only what it uses. SPEC sections 2 and 9.
"""

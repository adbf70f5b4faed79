"""What passes between a daemon and its process on one host: records over shared memory, and the handshake that sets it up.

`messages` names the records, `channel` moves them, `attach` connects. Knows no session, no link and no proposal.
"""

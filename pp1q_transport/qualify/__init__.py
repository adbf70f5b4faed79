"""The link benchmark: its figures (`stats`), what the same machine can do at best (`floors`), and what drives both.

Between the client API and the commands. Measures; decides nothing about a session. SPEC section 9.
"""

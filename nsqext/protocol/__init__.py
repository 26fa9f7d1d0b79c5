"""The NSQ protocol of both generations and both roles, without I/O: bytes in, values out, and back.

Nothing here awaits, looks at a clock, or touches a socket.
"""

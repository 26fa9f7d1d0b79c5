"""The NSQ protocol of both generations and roles, without I/O: bytes in, values out, and back.

No module awaits, reads a clock or uses a socket.
"""

"""The NSQ protocol of both generations and both roles, without I/O: bytes in, values out, and back.

The modules await nothing, read no clock, and use no socket.
"""

"""The NSQ protocol of both generations and roles, without I/O: no module awaits, reads a clock or uses a socket."""

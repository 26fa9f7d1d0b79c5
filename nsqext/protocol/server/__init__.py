"""The server's side of the protocol: parse commands, negotiate."""

"""The server role: parse commands, negotiate."""

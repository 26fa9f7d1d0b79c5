"""Sockets and connections: bytes in and out of the protocol, on asyncio and trio alike."""

"""Connections to nsqd: sockets, handshake, reading and writing, on asyncio and trio."""

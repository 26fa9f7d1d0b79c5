"""Connections to nsqd, on asyncio and trio."""

"""Channels: read position, messages in flight, clients, dispatch."""

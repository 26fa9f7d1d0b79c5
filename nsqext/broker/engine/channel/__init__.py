"""Channels of a partition: read position, messages in flight, clients and dispatch."""

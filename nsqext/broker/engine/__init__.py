"""Queues, channels and their rules, without sockets or event loop, on a given clock."""

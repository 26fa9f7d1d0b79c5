"""Consume a topic through a channel."""

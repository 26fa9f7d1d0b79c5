"""Publish messages to topics."""

"""Recorded messages in files: `record` and `replay`."""

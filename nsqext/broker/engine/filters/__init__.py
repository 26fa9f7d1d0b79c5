"""Extend header filters of consumers."""

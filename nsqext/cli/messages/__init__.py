"""Commands that publish and consume messages."""

"""Commands that show and change topics, channels and nodes."""

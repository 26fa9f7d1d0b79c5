"""The client role: encode commands, match responses."""

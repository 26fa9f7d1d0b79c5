"""The client's side of the protocol: encode commands, match responses."""

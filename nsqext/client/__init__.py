"""Producer and Consumer: the smart client."""

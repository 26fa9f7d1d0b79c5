"""Producer and Consumer: what a user of the smart client holds."""

"""Commands that record messages to files and replay them."""

"""Hand received messages to handlers, and answer them."""

"""Write rows to topics."""

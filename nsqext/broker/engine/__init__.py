"""The pure engine: queues, channels and their rules; no socket, no loop, only a given clock."""

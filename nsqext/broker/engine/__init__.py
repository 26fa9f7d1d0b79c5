"""The pure engine: queues, channels and their rules; no socket, no loop, no clock but the one that is given."""

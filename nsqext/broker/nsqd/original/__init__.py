"""The server role of the original NSQ: its checks, its commands, its ids."""

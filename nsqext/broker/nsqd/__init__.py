"""A node: partitions, the server role of its connections, its TCP and HTTP servers."""

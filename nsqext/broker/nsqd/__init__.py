"""A node: partitions, connections in the server role, TCP and HTTP servers."""

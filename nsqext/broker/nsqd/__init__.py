"""A node: what it hosts, the server role of its connections, its TCP and HTTP servers."""

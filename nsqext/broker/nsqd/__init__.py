"""A node of the cluster: what it hosts, the server role of its connections, its TCP and HTTP servers."""

"""HTTP of the servers: requests, routes, the guard against foreign web pages, metrics."""

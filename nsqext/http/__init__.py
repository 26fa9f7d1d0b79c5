"""HTTP: client, server, routes, the guard against foreign web pages, metrics."""

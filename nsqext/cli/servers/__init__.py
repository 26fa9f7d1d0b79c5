"""Programs that serve: clusters, single servers with the original flags, and the web page."""

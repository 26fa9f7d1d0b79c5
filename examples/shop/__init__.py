"""A shop: orders over HTTP, invoices through topics, a ledger in SQLite."""

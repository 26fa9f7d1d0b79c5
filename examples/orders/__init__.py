"""Orders in PostgreSQL: an outbox, three workers, and an inbox."""

"""The same services before and after a migration to nsqext."""

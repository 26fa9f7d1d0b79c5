"""The command that runs an app in worker processes."""

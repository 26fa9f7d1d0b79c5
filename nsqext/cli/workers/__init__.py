"""`nsqext run`: an app in worker processes."""

"""nsqlookupd of both generations: what clients ask to find topics."""

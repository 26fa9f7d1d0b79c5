"""The on-disk format and the files of a partition."""

"""The reference cluster: nsqd and nsqlookupd of both generations in this process."""

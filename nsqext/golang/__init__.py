"""What the servers do only because the real servers are Go programs.

HTTP heads and redirects, texts, flags, options of ``/config`` and counters without effect. Nothing in this folder
decides what is stored or delivered. Words and numbers of the protocol are in `nsqext.protocol.server.go_format`.
"""

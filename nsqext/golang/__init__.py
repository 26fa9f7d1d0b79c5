"""What the servers do only because the real servers are Go programs; nothing here decides what is stored or delivered.

Words and numbers of the protocol are in `nsqext.protocol.server.go_format`.
"""

"""nsqlookupd: HTTP APIs of both generations, registrations over TCP, and their client side."""

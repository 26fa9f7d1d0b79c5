"""nsqlookupd: HTTP APIs of both generations, registrations over TCP, and the client side of registrations."""

"""Typed bodies and typed handlers: what an annotation says about decoding a body and calling a handler."""

"""Verify and time compiled modules in worker processes that may be killed."""

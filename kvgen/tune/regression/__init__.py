"""Checks whether an entry still holds: its claims, source, resources, numerics and, on its own device, its speed.

`entry` checks one entry, aspect by aspect, `speed` times it, `registry` checks all entries of a store.
"""

"""Checks whether an entry still holds: its claims, source, resources, numerics and, on its own device, its speed."""

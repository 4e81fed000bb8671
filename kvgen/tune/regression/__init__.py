"""Checks whether an entry still holds: its source, resources, numerics and, on its own device, its speed.

`run` checks a registry, `entry` one entry: each aspect has a module of its own. `finding` defines the results.
"""

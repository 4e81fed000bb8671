"""Does an entry still hold? Its source rendered anew, its resources, its numbers and, on its own device, its speed.

`run` checks a registry, `entry` one entry: each aspect has a module of its own. `finding` says what a check answers.
"""

"""Run a variant in a cage: is it right, and how fast."""

"""Attacks: scripts that feed the package what is malformed, cut short or interrupted, and say what it let through."""

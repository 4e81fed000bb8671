"""Attacks on kvgen: scripts that try to break it, runnable by themselves and, in small, by the tests."""

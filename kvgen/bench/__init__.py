"""A spec's kernel beside what a user would pick instead, in one run."""

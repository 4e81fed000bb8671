"""What a format costs: its size, errors of attention over it on seeded data, and which formats fit a model and a budget."""

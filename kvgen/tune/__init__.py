"""Spend a budget of measurements, propose winners, and register them."""

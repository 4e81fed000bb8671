"""What a packed cache is: layout, places of codes, residual, sizes. No other package decides any of it."""

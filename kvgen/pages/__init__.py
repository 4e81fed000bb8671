"""Self-contained HTML pages and SVG charts, without scripts and without the network; in light and dark mode."""

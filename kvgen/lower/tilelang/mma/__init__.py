"""Form "mma": every warp by itself, matrix instructions on fragments as they lie in the ring."""

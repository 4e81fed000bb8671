"""Form "mma": every warp works by itself, and issues matrix instructions on fragments as they lie in its ring."""

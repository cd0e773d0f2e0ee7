"""The page at `/`: plain files, and the routes that serve them."""

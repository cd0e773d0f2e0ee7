"""Several drafters as one: compositions, and the controller that chooses at each step."""

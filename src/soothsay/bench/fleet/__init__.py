"""A simulator of many engines behind the router: passes are replaced by their measured times."""

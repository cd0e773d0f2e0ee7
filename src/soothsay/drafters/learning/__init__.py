"""What drafters learn while they serve: how answers continue, and whom to believe."""

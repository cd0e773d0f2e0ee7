"""What drafters learn while they serve: how answers continue, and how often each drafter is right."""

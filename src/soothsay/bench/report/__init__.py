"""What Spec-Bench's results look like: tables in text, and a page with plots that needs nothing else."""

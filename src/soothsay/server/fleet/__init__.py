"""One or many engines that answer as one: which of them gets a job, and what happens when one is lost."""

"""Answers files of requests without a network."""

from soothsay.server.batch.batch_run import BatchSummary, run_batch

__all__ = ["BatchSummary", "run_batch"]

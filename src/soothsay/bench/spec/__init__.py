"""Spec-Bench (Xia et al. 2024, arXiv 2401.07851): 480 questions, 80 of each of six tasks.

`contenders` answer questions and measure `run_times`, `spec_bench` lets the contenders take turns,
`spec_results` stores and sums up the measurements with `theory`, `spec_page` and `spec_charts` show them.
"""

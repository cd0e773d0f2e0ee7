"""Spec-Bench (Xia et al. 2024, arXiv 2401.07851): 480 questions, 80 of each of six tasks.

`questions` reads the questions, `contenders` answer them and measure times, `spec_bench` lets the contenders
take turns, `spec_results` stores and sums up the measurements.
"""

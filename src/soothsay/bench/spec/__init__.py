"""Spec-Bench (Xia et al. 2024, arXiv 2401.07851): 480 questions, 80 of each of six tasks.

`questions` reads them, `contenders` answer and are timed, `compare` has them take turns, `results` keeps
what was measured and adds it up.
"""

"""The gains of integers, speculation, batching and prefix caching, one on top of the other, in one run.

`rungs` has the contenders, `stack_bench` lets them take turns, `stack_results` stores their answers and times
and computes factors, `stack_chart` draws them.
"""

"""What models are made of, as frozen values: a `ModelSpec` of `LayerSpec`s of specs of parts.

A part's spec describes this part alone. Sizes of keys, values and states, and numbers of parameters, are
sums over parts.
"""

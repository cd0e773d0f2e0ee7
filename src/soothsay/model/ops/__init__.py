"""The operations of layers: what a set of kernels computes, in stock form."""

"""Makes models smaller: linear layers in 8 or 4 bits, and the text that this is calibrated with."""

"""What passes of a model cost on this machine."""

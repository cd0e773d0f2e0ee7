"""ReDrafter."""

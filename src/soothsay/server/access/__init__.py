"""Who may ask, and how much: API keys, their limits, and the gate that each request passes."""

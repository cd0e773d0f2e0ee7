"""What a model's answer consists of: text, thoughts and tool calls, and the grammars that force them."""
